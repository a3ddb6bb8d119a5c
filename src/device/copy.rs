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

/// Rows of a table, and the place where they are gathered.
#[derive(Debug)]
pub struct GatheredRows<V, W> {
    /// The elements of a row; may be 0.
    pub columns: usize,
    /// All rows.
    pub table: V,
    /// The gathered rows.
    pub into: W,
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

    /// Computes `output = first + second`, and then ReLU if `relu`; all are of one length and of one role, as
    /// with [`CopyOperations::add`].
    fn sum(&self, first: Self::View<'_>, second: Self::View<'_>, relu: bool, output: Self::ViewMut<'_>);

    /// Copies a block from one row-major matrix into another; the views begin where the block does.
    fn copy_block(&self, shape: &BlockShape, from: Self::View<'_>, into: Self::ViewMut<'_>);

    /// Transposes each of the `rows × columns` matrices that `input` consists of.
    fn transpose_each(&self, rows: usize, columns: usize, input: Self::View<'_>, output: Self::ViewMut<'_>);

    /// Copies row `numbers[i]` of each table to its row i, or leaves a table out whose destination is empty.
    /// The second is copied to values that no format rounds, those of [`Role::Exact`](super::Role::Exact).
    ///
    /// The numbers are integers, stored as the bits of `f32` elements.
    fn gather_rows(
        &self,
        numbers: Self::View<'_>,
        first: GatheredRows<Self::View<'_>, Self::ViewMut<'_>>,
        second: GatheredRows<Self::View<'_>, Self::ViewMut<'_>>,
    );
}
