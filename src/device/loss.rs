//! Contract of losses, which are computed together with their gradients.

use super::memory::MemoryOperations;

/// A batch of outputs and the scale of its gradient.
#[derive(Debug, Clone, Copy)]
pub struct LossShape {
    /// Rows of the batch.
    pub rows: usize,
    /// Classes, or outputs.
    pub columns: usize,
    /// Factor of each row's gradient: 1 / the number of rows of the global batch, so that the sum
    /// over micro-batches and ranks is the gradient of the mean.
    pub scale: f32,
}

/// Losses with their gradients. Each adds its sums to a step's [`totals`](super::totals).
pub trait LossOperations: MemoryOperations {
    /// Computes softmax and cross-entropy of `logits`, `[rows, columns]`, with the class numbers in
    /// `labels`, `[rows]`: `gradient = scale · (softmax − one-hot)`. Adds the rows' losses and the
    /// number of correct predictions to `sums`.
    fn cross_entropy(
        &self,
        shape: &LossShape,
        logits: Self::View<'_>,
        labels: Self::View<'_>,
        gradient: Self::ViewMut<'_>,
        sums: Self::ViewMut<'_>,
    );

    /// Computes the mean over columns of `(output − target)²` for each row, and its gradient times
    /// `scale`; without targets, the mean of squares. Adds the rows' losses to `sums`.
    fn mean_squared_error(
        &self,
        shape: &LossShape,
        output: Self::View<'_>,
        targets: Option<Self::View<'_>>,
        gradient: Self::ViewMut<'_>,
        sums: Self::ViewMut<'_>,
    );
}
