//! Contract of normalisations.

use super::memory::MemoryOperations;
use super::row_sums::RowSums;

/// Vectors that are each normalised.
#[derive(Debug, Clone, Copy)]
pub struct NormShape {
    /// The number of vectors.
    pub rows: usize,
    /// The length of a vector.
    pub columns: usize,
    /// ε, which is added to the variance.
    pub epsilon: f32,
}

impl NormShape {
    /// The number of values that the forward pass saves for each vector: its mean and 1/σ.
    pub const SAVED: usize = 2;
}

/// Normalisations, forward and backward. With x̂ = (x − mean(x)) / √(var(x) + ε), where the variance is
/// that of all values, not an estimate from a sample.
pub trait NormOperations: MemoryOperations {
    /// Computes `output = x̂ · weight + bias` for each vector x, `[rows, columns]`. `saved` receives
    /// [`NormShape::SAVED`] values of each.
    fn layer_norm_forward(
        &self,
        shape: &NormShape,
        input: Self::View<'_>,
        weight: Self::View<'_>,
        bias: Option<Self::View<'_>>,
        saved: Self::ViewMut<'_>,
        output: Self::ViewMut<'_>,
    );

    /// Adds up the gradient of the weight, x̂ times `gradient`, over the vectors.
    fn layer_norm_backward_weight(
        &self,
        shape: &NormShape,
        input: Self::View<'_>,
        saved: Self::View<'_>,
        gradient: Self::View<'_>,
        weight_gradient: RowSums<Self::ViewMut<'_>>,
    );

    /// Computes the gradient of the inputs: with g = weight · `gradient`,
    /// (g − mean(g) − x̂ · mean(g · x̂)) / √(var(x) + ε).
    fn layer_norm_backward_input(
        &self,
        shape: &NormShape,
        input: Self::View<'_>,
        weight: Self::View<'_>,
        saved: Self::View<'_>,
        gradient: Self::View<'_>,
        input_gradient: Self::ViewMut<'_>,
    );
}
