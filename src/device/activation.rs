//! Contract of activations: elementwise functions and their derivatives.

use super::dropout::DropoutShape;
use super::memory::MemoryOperations;
use super::row_sums::RowSums;

/// An elementwise function after a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// x
    Identity,
    /// max(x, 0)
    Relu,
    /// x · Φ(x), with the exact normal distribution function (erf), as PyTorch's default
    Gelu,
    /// GELU with Φ approximated by tanh (Hendrycks and Gimpel, "Gaussian error linear units", 2016)
    GeluTanh,
    /// x · σ(x), with the logistic function σ
    Silu,
    /// tanh(x)
    Tanh,
}

/// The function of the gates of a gated linear unit (Shazeer, "GLU variants improve transformer", 2020).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gate {
    /// The logistic function, as PyTorch's `GLU`.
    Sigmoid,
    /// x · σ(x): SwiGLU.
    Silu,
    /// x · Φ(x), exact: GEGLU.
    Gelu,
}

impl Activation {
    /// Returns true if the backward pass needs more than the outputs: the forward pass then saves
    /// the derivatives, or the inputs, as the device prefers.
    pub fn saves(self) -> bool {
        matches!(self, Activation::Gelu | Activation::GeluTanh | Activation::Silu)
    }
}

/// The rows of values that a bias is added to.
#[derive(Debug, Clone, Copy)]
pub struct BiasShape {
    /// The values of a row, one for each element of the bias.
    pub columns: usize,
    /// The rows of a sample: the positions of an image, or 1.
    pub positions: usize,
}

/// Elementwise functions, forward and backward.
pub trait ActivationOperations: MemoryOperations {
    /// Computes `output = activation(input)`, elementwise.
    ///
    /// `saved`, of the same length, receives what [`ActivationOperations::activation_backward`]
    /// needs if [`Activation::saves`]; otherwise it may be empty.
    fn activation_forward(
        &self,
        activation: Activation,
        input: Self::View<'_>,
        saved: Self::ViewMut<'_>,
        output: Self::ViewMut<'_>,
    );

    /// Replaces `gradient`, `[samples, positions, columns]`, the gradient of the outputs, by the
    /// gradient of the inputs. Adds up its rows in `bias_gradient` if there is one.
    ///
    /// `saved` is what the forward pass saved if [`Activation::saves`], otherwise its output.
    fn activation_backward(
        &self,
        activation: Activation,
        shape: BiasShape,
        saved: Self::View<'_>,
        gradient: Self::ViewMut<'_>,
        bias_gradient: Option<RowSums<Self::ViewMut<'_>>>,
    );

    /// Computes `output = a · gate(b)`, `[rows, columns]`, of the first and the second half, a and b, of
    /// each row of `input`, `[rows, 2 · columns]`.
    fn gated_forward(&self, gate: Gate, columns: usize, input: Self::View<'_>, output: Self::ViewMut<'_>);

    /// Computes the gradient of the inputs of [`ActivationOperations::gated_forward`] from `gradient`, the
    /// gradient of its outputs.
    fn gated_backward(
        &self,
        gate: Gate,
        columns: usize,
        input: Self::View<'_>,
        gradient: Self::View<'_>,
        input_gradient: Self::ViewMut<'_>,
    );

    /// Copies `from` to `values`, or changes `values` in place: each is set to 0 with probability
    /// `dropout.rate`, and the others are divided by 1 − rate. With the same draws, that turns the gradient
    /// of the outputs into that of the inputs.
    fn dropout(&self, dropout: &DropoutShape, from: Option<Self::View<'_>>, values: Self::ViewMut<'_>);
}
