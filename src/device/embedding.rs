//! Contract of embeddings: tables with a row for each token, or for each position.

use super::memory::MemoryOperations;
use super::row_sums::RowSums;

/// Tokens that are looked up in some rows of a table.
#[derive(Debug, Clone, Copy)]
pub struct EmbeddingShape {
    /// The number of tokens.
    pub tokens: usize,
    /// The first token that has a row here.
    pub first: usize,
    /// The number of rows.
    pub rows: usize,
    /// The length of a row.
    pub columns: usize,
}

/// Embeddings, forward and backward. Tokens are numbers in `f32`, which are exact below 2²⁴.
pub trait EmbeddingOperations: MemoryOperations {
    /// Computes `output`, `[tokens, columns]`: the row of `table`, `[rows, columns]`, of each token, or 0
    /// if it has none here. An element −0 becomes +0, as in a sum with the zeros of other ranks.
    fn embed(
        &self,
        shape: &EmbeddingShape,
        tokens: Self::View<'_>,
        table: Self::View<'_>,
        output: Self::ViewMut<'_>,
    );

    /// Adds up the gradient of the table: in the row of each token the `gradient` of its places.
    fn embed_backward(
        &self,
        shape: &EmbeddingShape,
        tokens: Self::View<'_>,
        gradient: Self::View<'_>,
        table_gradient: RowSums<Self::ViewMut<'_>>,
    );

    /// Computes `output = input + table` for each sample; the table has the length of one.
    fn add_table(&self, input: Self::View<'_>, table: Self::View<'_>, output: Self::ViewMut<'_>);
}
