//! Contract of linear layers: matrix products with bias and activation.

use super::activation::Activation;
use super::memory::MemoryOperations;

/// The order of a weight matrix in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightLayout {
    /// `[outputs, inputs]`, PyTorch's `Linear`: y = x · Wᵀ.
    OutputsByInputs,
    /// `[inputs, outputs]`: y = x · W.
    InputsByOutputs,
}

/// A product of a batch with a weight matrix.
#[derive(Debug, Clone, Copy)]
pub struct LinearShape {
    /// Rows of the batch.
    pub rows: usize,
    /// Input features.
    pub inputs: usize,
    /// Output features.
    pub outputs: usize,
    /// Order of the weight in memory.
    pub layout: WeightLayout,
    /// The leaves of a sum over the features of a row: see [`crate::sums`]. A GPU sums in orders of
    /// its own.
    pub leaves: usize,
}

/// The activation before a layer, whose backward pass is fused into the backward pass of the layer.
#[derive(Debug, Clone, Copy)]
pub struct FusedActivation<V> {
    /// The activation.
    pub activation: Activation,
    /// The values that the forward pass of the activation saved.
    pub saved: V,
}

/// Linear layers, forward and backward.
pub trait LinearOperations: MemoryOperations {
    /// Computes `output = activation(input · W + bias)`, `[rows, outputs]`.
    ///
    /// `saved`, of the same shape, receives what
    /// [`activation_backward`](super::ActivationOperations::activation_backward) needs if
    /// [`Activation::saves`]; otherwise it may be empty.
    #[allow(clippy::too_many_arguments)] // one argument for each array of the formula
    fn linear_forward(
        &self,
        shape: &LinearShape,
        input: Self::View<'_>,
        weight: Self::View<'_>,
        bias: Option<Self::View<'_>>,
        activation: Activation,
        saved: Self::ViewMut<'_>,
        output: Self::ViewMut<'_>,
    );

    /// Computes `weight_gradient = inputᵀ · gradient` in the layout of the weight, or continues the
    /// sum over rows in `weight_gradient` if `accumulate`: on the CPU, it has the same bits for any
    /// division of the rows.
    fn linear_backward_weight(
        &self,
        shape: &LinearShape,
        input: Self::View<'_>,
        gradient: Self::View<'_>,
        weight_gradient: Self::ViewMut<'_>,
        accumulate: bool,
    );

    /// Computes `input_gradient = gradient · Wᵀ`, `[rows, inputs]`, and continues backward through
    /// the activation `previous`, if there is one.
    fn linear_backward_input(
        &self,
        shape: &LinearShape,
        gradient: Self::View<'_>,
        weight: Self::View<'_>,
        input_gradient: Self::ViewMut<'_>,
        previous: Option<FusedActivation<Self::View<'_>>>,
    );

    /// Returns true if [`LinearOperations::linear_backward_input`] is faster with `activation`
    /// fused into it than followed by its backward pass.
    fn fuses_activation_backward(&self, _activation: Activation) -> bool {
        false
    }
}
