//! Contract of fills, copies and sums within a device's memory.

use super::memory::MemoryOperations;

/// A block of a row-major matrix, to be copied into another matrix.
#[derive(Debug, Clone, Copy)]
pub struct BlockShape {
    /// Rows of the block.
    pub rows: usize,
    /// Columns of the block.
    pub columns: usize,
    /// Elements between the starts of two rows of the source.
    pub from_stride: usize,
    /// Elements between the starts of two rows of the destination.
    pub into_stride: usize,
}

/// Fills, copies and sums within a device's memory.
pub trait CopyOperations: MemoryOperations {
    /// Sets every element to `value`.
    fn fill(&self, into: Self::ViewMut<'_>, value: f32);

    /// Computes `into = from`; lengths are equal, formats may differ.
    fn copy(&self, from: Self::View<'_>, into: Self::ViewMut<'_>);

    /// Computes `into += from`; both are of one length, and of one role, which is
    /// [`Role::Exact`](super::Role::Exact) or [`Role::Activations`](super::Role::Activations).
    fn add(&self, from: Self::View<'_>, into: Self::ViewMut<'_>);

    /// Copies a block from one row-major matrix into another; the views begin where the block does.
    fn copy_block(&self, shape: &BlockShape, from: Self::View<'_>, into: Self::ViewMut<'_>);

    /// Transposes each of the `rows × columns` matrices that `input` consists of.
    fn transpose_each(&self, rows: usize, columns: usize, input: Self::View<'_>, output: Self::ViewMut<'_>);

    /// Copies row `numbers[i]` of `table` to row i of `into`; rows have `columns` elements.
    ///
    /// The numbers are integers, stored as the bits of `f32` elements. An empty `into` is allowed.
    fn gather_rows(
        &self,
        columns: usize,
        table: Self::View<'_>,
        numbers: Self::View<'_>,
        into: Self::ViewMut<'_>,
    );
}
