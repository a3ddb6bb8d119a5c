//! Loss functions.

use crate::device::{Device, LossOutputs, LossShape};

/// A loss: the mean of the predictions' losses over the global batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Loss {
    /// PyTorch's `CrossEntropyLoss` on logits; the target of a row is its class number.
    CrossEntropy,
    /// PyTorch's `MSELoss`; targets have the shape of the outputs.
    MeanSquaredError,
    /// The mean of the squared outputs, without targets: the loss of `deep-mlp`.
    MeanOfSquares,
}

impl Loss {
    /// Returns the number of target values of a prediction with `outputs` outputs.
    pub fn num_targets(self, outputs: usize) -> usize {
        match self {
            Loss::CrossEntropy => 1,
            Loss::MeanSquaredError => outputs,
            Loss::MeanOfSquares => 0,
        }
    }

    /// Returns true if [`Loss::evaluate_through`] takes the gradient through an activation.
    pub fn takes_activation(self) -> bool {
        self != Loss::CrossEntropy
    }

    /// Returns true if a row's output can be right or wrong.
    pub fn has_accuracy(self) -> bool {
        self == Loss::CrossEntropy
    }

    /// Computes the gradient with respect to `outputs` and adds the rows' losses to `sums` (see
    /// [`crate::device::totals`]). `outputs` and `gradient` are `[rows, columns]` of `shape`, `targets`
    /// `[rows, num_targets]`; the gradient is multiplied by the shape's scale.
    pub fn evaluate<D: Device>(
        self,
        device: &D,
        shape: &LossShape,
        outputs: D::View<'_>,
        targets: D::View<'_>,
        gradient: D::ViewMut<'_>,
        sums: D::ViewMut<'_>,
    ) {
        self.evaluate_through(device, shape, outputs.into(), targets, gradient, sums);
    }

    /// Does what [`Loss::evaluate`] does, but the gradient is that of the values before the activation of
    /// `outputs`, if they have one.
    pub fn evaluate_through<D: Device>(
        self,
        device: &D,
        shape: &LossShape,
        outputs: LossOutputs<D::View<'_>>,
        targets: D::View<'_>,
        gradient: D::ViewMut<'_>,
        sums: D::ViewMut<'_>,
    ) {
        match self {
            Loss::CrossEntropy => {
                assert!(outputs.activation.is_none(), "logits are before any activation");
                device.cross_entropy(shape, outputs.values, targets, gradient, sums);
            }
            Loss::MeanSquaredError => {
                device.mean_squared_error(shape, outputs, Some(targets), gradient, sums)
            }
            Loss::MeanOfSquares => device.mean_squared_error(shape, outputs, None, gradient, sums),
        }
    }
}
