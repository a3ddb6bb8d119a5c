//! Contract of activations: elementwise functions and their derivatives.

use super::memory::MemoryOperations;

/// An elementwise function after a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// x
    Identity,
    /// max(x, 0)
    Relu,
    /// x · Φ(x), with the exact normal distribution function (erf), as PyTorch's default
    Gelu,
    /// tanh(x)
    Tanh,
}

impl Activation {
    /// Returns true if the backward pass needs more than the outputs: the forward pass then saves
    /// the derivatives, or the inputs, as the device prefers.
    pub fn saves(self) -> bool {
        self == Activation::Gelu
    }
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

    /// Replaces `gradient`, `[rows, columns]`, the gradient of the outputs, by the gradient of the
    /// inputs. Writes its sum over the rows to `bias_gradient` if there is one, or adds the sum if
    /// `accumulate`.
    ///
    /// `saved` is what the forward pass saved if [`Activation::saves`], otherwise its output.
    fn activation_backward(
        &self,
        activation: Activation,
        columns: usize,
        saved: Self::View<'_>,
        gradient: Self::ViewMut<'_>,
        bias_gradient: Option<Self::ViewMut<'_>>,
        accumulate: bool,
    );
}
