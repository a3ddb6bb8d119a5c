//! Contract of linear layers: matrix products with bias and activation.

use super::activation::Activation;
use super::memory::MemoryOperations;
use super::row_sums::{ParameterSums, RowSums};
use crate::sums::{Leaves, Section};

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
    /// The input features as terms of canonical sums, of which there may be more on other ranks. A
    /// GPU sums in orders of its own.
    pub input_terms: Section,
    /// The output features as terms of canonical sums.
    pub output_terms: Section,
}

impl LinearShape {
    /// Returns the shape of a product whose sums are whole and have `num_leaves` leaves.
    pub fn whole(
        rows: usize,
        inputs: usize,
        outputs: usize,
        layout: WeightLayout,
        num_leaves: usize,
    ) -> LinearShape {
        let terms = |len| Section::whole(Leaves { len, num: num_leaves });
        let (input_terms, output_terms) = (terms(inputs), terms(outputs));
        LinearShape { rows, inputs, outputs, layout, input_terms, output_terms }
    }
}

/// The rows of a micro-batch from which the gradient of a weight is computed.
#[derive(Debug, Clone, Copy)]
pub struct WeightOperands<V> {
    /// The number of rows.
    pub rows: usize,
    /// The inputs of the layer, `[rows, inputs]`.
    pub input: V,
    /// The gradient of its outputs, `[rows, outputs]`.
    pub gradient: V,
}

/// The arrays that the backward pass of a linear layer reads besides the weight.
#[derive(Debug, Clone, Copy)]
pub struct LinearTape<V> {
    /// The inputs, `[rows, inputs]`.
    pub input: V,
    /// The activation after the layer.
    pub activation: Activation,
    /// The values that the forward pass saved if [`Activation::saves`], otherwise its outputs.
    pub saved: V,
    /// The gradient of the outputs, after the activation.
    pub gradient: V,
}

/// Linear layers, forward and backward.
pub trait LinearOperations: MemoryOperations {
    /// Computes `output = activation(input · W + bias)`, `[rows, outputs]`. If the inputs are some of a
    /// sum's terms, `output` holds an array for each value that they leave on the stack, of which the
    /// first begins with the bias, and there is no activation.
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

    /// Adds up `inputᵀ · gradient`, in the layout of the weight, over the rows of consecutive
    /// micro-batches, of which there is at least one; `shape.rows` is not read. Several at once are
    /// one product, which reads and writes the gradient once.
    fn linear_backward_weight(
        &self,
        shape: &LinearShape,
        operands: &[WeightOperands<Self::View<'_>>],
        weight_gradient: RowSums<Self::ViewMut<'_>>,
    );

    /// Computes `input_gradient = gradient · Wᵀ`, `[rows, inputs]`. If the outputs are some of a sum's
    /// terms, `input_gradient` holds an array for each value that they leave on the stack.
    fn linear_backward_input(
        &self,
        shape: &LinearShape,
        gradient: Self::View<'_>,
        weight: Self::View<'_>,
        input_gradient: Self::ViewMut<'_>,
    );

    /// Returns true if the device has [`LinearOperations::linear_backward`] for this shape.
    fn fuses_linear_backward(&self, _shape: &LinearShape) -> bool {
        false
    }

    /// Runs the whole backward pass, with the bits of its parts: those of the activation, of the weight, with
    /// the bias, and of the input.
    fn linear_backward(
        &self,
        _shape: &LinearShape,
        _tape: &LinearTape<Self::View<'_>>,
        _weight: Self::View<'_>,
        _sums: impl ParameterSums<Self>,
        _input_gradient: Self::ViewMut<'_>,
    ) {
        unreachable!("the device runs the parts of a linear layer's backward pass one by one")
    }
}
