//! Loops over arrays: split among the threads, compiled for the widest vectors of the processor.

use std::iter::once;
use std::ops::AddAssign;

use pulp::{Simd, WithSimd};

use super::Cpu;
use crate::sums::ExactSum;

/// Elements over which a sum stays in `f32` lanes before it is continued in `f64`; threads take
/// whole chunks.
pub(super) const CHUNK: usize = 4096;

/// The fewest elements of a light pass, such as a sum over rows, that threads share: on two cores, starting
/// them took longer than they saved in a step of a small GPT.
pub(super) const LONG_PASS: usize = if cfg!(test) { 1 << 13 } else { 1 << 18 };

/// The lanes of a sum over a vector: twice the widest vector registers.
const LANES: usize = 32;

impl Cpu {
    /// Runs a loop compiled for the widest vectors of this processor. `work` must be marked
    /// `#[inline(always)]`; it is called as `FnMut`, because the shim that `FnOnce` would add is
    /// inlined only where the loop is small.
    #[inline(always)]
    pub(super) fn vectorised(&self, mut work: impl FnMut()) {
        struct Loop<'a, F>(&'a mut F);

        impl<F: FnMut()> WithSimd for Loop<'_, F> {
            type Output = ();

            #[inline(always)]
            fn with_simd<S: Simd>(self, _: S) {
                (self.0)();
            }
        }

        self.arch.dispatch(Loop(&mut work));
    }

    /// Returns the number of rows of a batch that each thread takes, all about the same.
    pub(super) fn rows_per_thread(&self, rows: usize) -> usize {
        rows.div_ceil(self.threads).max(1)
    }

    /// Runs `work` on every item: a single one on this thread, several on the pool's, if there is one.
    pub(super) fn for_each<I: Send>(&self, mut items: impl Iterator<Item = I>, work: impl Fn(I) + Sync) {
        if self.threads == 1 {
            return items.for_each(work);
        }
        let (Some(first), second) = (items.next(), items.next()) else { return };
        if second.is_none() {
            return work(first);
        }
        let (items, work) = (once(first).chain(second).chain(items), &work);
        rayon::in_place_scope(|scope| items.for_each(|item| scope.spawn(move |_| work(item))));
    }

    /// Returns the length of the parts that an array of `len` is split into: one for each thread,
    /// in whole chunks.
    pub(super) fn part_len(&self, len: usize) -> usize {
        if self.threads == 1 {
            len.max(1)
        } else {
            len.div_ceil(self.threads).next_multiple_of(CHUNK).max(CHUNK)
        }
    }

    /// Computes `values = function(values)`, elementwise.
    pub(super) fn map(&self, values: &mut [f32], function: impl Fn(f32) -> f32 + Sync) {
        self.for_each(values.chunks_mut(self.part_len(values.len())), |values| {
            self.vectorised(
                #[inline(always)]
                || values.iter_mut().for_each(|value| *value = function(*value)),
            );
        });
    }

    /// Computes `values = function(values, with)`, elementwise.
    pub(super) fn zip(&self, values: &mut [f32], with: &[f32], function: impl Fn(f32, f32) -> f32 + Sync) {
        let part = self.part_len(values.len());
        self.for_each(values.chunks_mut(part).zip(with.chunks(part)), |(values, with)| {
            self.vectorised(
                #[inline(always)]
                || values.iter_mut().zip(with).for_each(|(value, with)| *value = function(*value, *with)),
            );
        });
    }

    /// Returns the sum of the results of `work` for each part, added in the order of the parts.
    pub(super) fn sum_over<I: Send, T: Default + Clone + Send + AddAssign>(
        &self,
        parts: impl Iterator<Item = I>,
        work: impl Fn(I) -> T + Sync,
    ) -> T {
        let mut total = T::default();
        if self.threads == 1 {
            parts.for_each(|part| total += work(part));
            return total;
        }
        let parts: Vec<I> = parts.collect();
        let mut sums = vec![T::default(); parts.len()];
        self.for_each(parts.into_iter().zip(&mut sums), |(part, sum)| *sum = work(part));
        sums.into_iter().for_each(|sum| total += sum);
        total
    }

    /// Returns the sum of the squares of `values`, which has no order.
    pub(super) fn sum_squares_exactly(&self, values: &[f32]) -> ExactSum {
        self.sum_over(values.chunks(self.part_len(values.len())), |values| {
            let mut sum = ExactSum::default();
            self.vectorised(
                #[inline(always)]
                || sum.add_squares(values),
            );
            sum
        })
    }
}

/// Returns the sum of squares of a chunk short enough for `f32`, in lanes, so that it vectorises
/// and has one fixed order.
#[inline(always)]
pub(super) fn sum_of_squares(values: &[f32]) -> f64 {
    const LANES: usize = 64;
    let mut lanes = [0.0_f32; LANES];
    let pieces = values.chunks_exact(LANES);
    let rest = pieces.remainder();
    for piece in pieces {
        for (lane, value) in lanes.iter_mut().zip(piece) {
            *lane = value.mul_add(*value, *lane);
        }
    }
    let tail: f64 = rest.iter().map(|value| f64::from(*value) * f64::from(*value)).sum();
    lanes.iter().map(|lane| f64::from(*lane)).sum::<f64>() + tail
}

/// Returns the sum of `term` of the elements at each place of `arrays`, which are at least as long as the
/// first. It has a fixed number of lanes, which are added by halves, so its bits depend on the terms alone.
/// Vectors are explicit, because the compiler vectorises a loop over elements for some terms only.
#[inline(always)]
pub(super) fn sum_of<S: Simd, const N: usize>(
    simd: S,
    arrays: [&[f32]; N],
    term: impl Fn([S::f32s; N]) -> S::f32s,
) -> f32 {
    let (len, width) = (arrays[0].len(), S::F32_LANES);
    let mut vectors = [simd.splat_f32s(0.0); LANES];
    let vectors = &mut vectors[..LANES / width];
    let whole = len - len % LANES;
    for first in (0..whole).step_by(LANES) {
        for (number, sums) in vectors.iter_mut().enumerate() {
            let elements =
                arrays.map(|array| S::as_simd_f32s(&array[first + number * width..][..width]).0[0]);
            *sums = simd.add_f32s(*sums, term(elements));
        }
    }
    for (first, sums) in (whole..len).step_by(width).zip(&mut *vectors) {
        let end = len.min(first + width);
        let terms = term(arrays.map(|array| simd.partial_load_f32s(&array[first..end])));
        // the terms of the zeros after the last element may not be zero
        let terms = simd.partial_load_f32s(&as_elements::<S>(&[terms])[..end - first]);
        *sums = simd.add_f32s(*sums, terms);
    }
    let mut num_vectors = vectors.len();
    while num_vectors > 1 {
        num_vectors /= 2;
        for number in 0..num_vectors {
            vectors[number] = simd.add_f32s(vectors[number], vectors[number + num_vectors]);
        }
    }
    let mut lanes = [0.0; LANES];
    lanes[..width].copy_from_slice(as_elements::<S>(&vectors[..1]));
    let mut num_lanes = width;
    while num_lanes > 1 {
        num_lanes /= 2;
        for lane in 0..num_lanes {
            lanes[lane] += lanes[lane + num_lanes];
        }
    }
    lanes[0]
}

/// Returns the elements of vectors.
#[inline(always)]
fn as_elements<S: Simd>(vectors: &[S::f32s]) -> &[f32] {
    bytemuck::cast_slice(vectors)
}
