//! Arrays with a matrix for each place of a square: the coefficients of tiles, or the taps of a kernel.

use pulp::Simd;

use super::image::{load, store};
use super::transform::{VectorSink, VectorSource};

/// The elements between two matrices: a cache line, because the coefficients of a tile would otherwise
/// share a few sets of the first cache.
const GAP: usize = 16;

/// `SIDE × SIDE` matrices.
pub(super) struct Matrices<'a, const SIDE: usize> {
    values: &'a mut [f32],
    /// Elements from a matrix to the next.
    space: usize,
}

impl<'a, const SIDE: usize> Matrices<'a, SIDE> {
    /// Returns the number of elements of matrices of `len`.
    pub(super) fn len(len: usize) -> usize {
        SIDE * SIDE * (len + GAP)
    }

    /// Takes memory for matrices of `len` elements from the front of `room`.
    pub(super) fn split_off(room: &mut &'a mut [f32], len: usize) -> Matrices<'a, SIDE> {
        let values = room.split_off_mut(..Self::len(len)).expect("the room has space for all matrices");
        Matrices { values, space: len + GAP }
    }

    /// Returns a matrix, with what follows it.
    #[inline(always)]
    pub(super) fn matrix(&self, number: usize) -> &[f32] {
        &self.values[number * self.space..]
    }

    #[inline(always)]
    pub(super) fn matrix_mut(&mut self, number: usize) -> &mut [f32] {
        &mut self.values[number * self.space..]
    }

    /// Returns the vectors that begin at element `at` of each matrix.
    #[inline(always)]
    pub(super) fn from(&mut self, at: usize) -> VectorSquare<'_, SIDE> {
        VectorSquare { values: &mut self.values[at..], space: self.space }
    }
}

/// A vector of each matrix.
pub(super) struct VectorSquare<'a, const SIDE: usize> {
    pub(super) values: &'a mut [f32],
    pub(super) space: usize,
}

impl<S: Simd, const SIDE: usize> VectorSource<S> for VectorSquare<'_, SIDE> {
    #[inline(always)]
    fn get(&self, row: usize, column: usize) -> S::f32s {
        load::<S>(&self.values[(row * SIDE + column) * self.space..])
    }
}

impl<S: Simd, const SIDE: usize> VectorSink<S> for VectorSquare<'_, SIDE> {
    #[inline(always)]
    fn put(&mut self, row: usize, column: usize, vector: S::f32s) {
        store::<S>(&mut self.values[(row * SIDE + column) * self.space..], vector);
    }
}

/// A square to which vectors are added.
pub(super) struct AddedSquare<'a, S: Simd, const SIDE: usize> {
    pub(super) simd: S,
    pub(super) vectors: VectorSquare<'a, SIDE>,
}

impl<S: Simd, const SIDE: usize> VectorSink<S> for AddedSquare<'_, S, SIDE> {
    #[inline(always)]
    fn put(&mut self, row: usize, column: usize, vector: S::f32s) {
        let sum = VectorSource::<S>::get(&self.vectors, row, column);
        VectorSink::<S>::put(&mut self.vectors, row, column, self.simd.add_f32s(sum, vector));
    }
}

/// Vectors in the opposite order: a square that is turned by half a turn.
pub(super) struct Turned<'a, const SIDE: usize>(pub(super) VectorSquare<'a, SIDE>);

impl<S: Simd, const SIDE: usize> VectorSource<S> for Turned<'_, SIDE> {
    #[inline(always)]
    fn get(&self, row: usize, column: usize) -> S::f32s {
        VectorSource::<S>::get(&self.0, SIDE - 1 - row, SIDE - 1 - column)
    }
}
