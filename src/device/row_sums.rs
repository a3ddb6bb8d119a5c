//! [`RowSums`], the sums of a gradient over the rows of a batch, as far as they have been added up, and
//! [`ParameterSums`], those of a layer's weight and bias.

use smallvec::SmallVec;

use super::memory::MemoryOperations;
use crate::sums::{MOST_PENDING, Section};

/// The sums over the rows of a batch that a pass adds up further: an array for each value on the
/// stack of its [`Section`]. A GPU sums in orders of its own and has a single array.
#[derive(Debug)]
pub struct RowSums<V> {
    /// The arrays, one behind the other. Between two of them there may be other values. Arrays above those
    /// that the stack has after the pass end with arbitrary values.
    pub stack: V,
    /// The distance from an array to the next.
    pub stride: usize,
    /// The rows of the pass, among those of the batch.
    pub rows: Section,
}

impl<V> RowSums<V> {
    /// Makes a chain of `num_rows` rows that are added to `sum`, or, unless it `continues`, to 0.
    pub fn chain(sum: V, num_rows: usize, continues: bool) -> RowSums<V> {
        RowSums { stack: sum, stride: usize::MAX, rows: Section::of_chain(num_rows, continues) }
    }
}

impl<'a> RowSums<&'a mut [f32]> {
    /// Returns the arrays, each of `len` elements.
    pub(super) fn arrays(self, len: usize) -> SmallVec<[&'a mut [f32]; MOST_PENDING]> {
        let most = self.rows.depth_before().max(self.rows.depth_after());
        if len == 0 {
            return (0..most).map(|_| &mut [][..]).collect();
        }
        let arrays: SmallVec<[&mut [f32]; MOST_PENDING]> =
            self.stack.chunks_mut(self.stride).map(|array| &mut array[..len]).collect();
        assert!(arrays.len() >= most, "{} arrays for {most} sums", arrays.len());
        arrays
    }
}

/// The gradients of a layer's weight and bias, to which an operation adds the same rows. They may lie in
/// one buffer, so each is viewed in turn.
pub trait ParameterSums<D: MemoryOperations + ?Sized> {
    /// Calls `add` with the sums of the weight.
    fn weight<R>(&mut self, add: impl FnOnce(RowSums<D::ViewMut<'_>>) -> R) -> R;

    /// Calls `add` with the sums of the bias, if the layer has one.
    fn bias<R>(&mut self, add: impl FnOnce(RowSums<D::ViewMut<'_>>) -> R) -> Option<R>;
}

/// Sums that the caller views, each for one use. Every layer has a weight.
#[derive(Debug)]
pub struct ViewedSums<V> {
    /// The sums of the weight.
    pub weight: Option<RowSums<V>>,
    /// The sums of the bias.
    pub bias: Option<RowSums<V>>,
}

impl<'a, D: MemoryOperations> ParameterSums<D> for ViewedSums<D::ViewMut<'a>> {
    fn weight<R>(&mut self, add: impl FnOnce(RowSums<D::ViewMut<'_>>) -> R) -> R {
        add(self.weight.take().expect("an operation asks for the sums of the weight once"))
    }

    fn bias<R>(&mut self, add: impl FnOnce(RowSums<D::ViewMut<'_>>) -> R) -> Option<R> {
        self.bias.take().map(add)
    }
}
