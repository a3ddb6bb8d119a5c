//! Contract of activations: elementwise functions and their derivatives.

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
}
