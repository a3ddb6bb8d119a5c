//! What is minimised.

use crate::device::{Device, LossShape};

/// A loss: the mean over all rows of the global batch of what one row contributes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Loss {
    /// PyTorch's `CrossEntropyLoss` on logits; targets are class numbers, one a row.
    CrossEntropy,
    /// PyTorch's `MSELoss`; targets have the shape of the outputs.
    MeanSquaredError,
    /// The mean of the squares of the outputs; no targets. The loss of `deep-mlp`.
    MeanOfSquares,
}

impl Loss {
    /// How many target values each row has when the model has `outputs` outputs.
    pub fn targets_per_row(self, outputs: usize) -> usize {
        match self {
            Loss::CrossEntropy => 1,
            Loss::MeanSquaredError => outputs,
            Loss::MeanOfSquares => 0,
        }
    }

    /// True if rows can be right or wrong.
    pub fn has_accuracy(self) -> bool {
        self == Loss::CrossEntropy
    }

    /// The gradient with respect to `outputs`, and the rows' losses added to `sums` (see [`crate::device::totals`]).
    pub fn evaluate<D: Device>(
        self,
        device: &D,
        shape: &LossShape,
        outputs: D::View<'_>,
        targets: D::View<'_>,
        gradient: D::ViewMut<'_>,
        sums: D::ViewMut<'_>,
    ) {
        match self {
            Loss::CrossEntropy => device.cross_entropy(shape, outputs, targets, gradient, sums),
            Loss::MeanSquaredError => {
                device.mean_squared_error(shape, outputs, Some(targets), gradient, sums)
            }
            Loss::MeanOfSquares => device.mean_squared_error(shape, outputs, None, gradient, sums),
        }
    }
}
