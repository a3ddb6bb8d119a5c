//! The arithmetic of the softmax of a block of queries, each of which has a lane.

use pulp::{Simd, WithSimd};

use crate::device::cpu::loops::sum_of;
use crate::device::cpu::math;
use crate::device::cpu::small_product::MatrixRows;

/// The queries of a block: two vectors of 16, so that a product reads a factor for two multiply-adds.
pub(super) const BLOCK: usize = 32;

/// Half of the lanes. In a causal block, its own keys from this one on are seen by none of the first half of
/// its queries.
pub(super) const HALF: usize = BLOCK / 2;

/// A product computes a multiple of this many lanes: those of a vector of 8.
pub(super) const FEWEST_LANES: usize = 8;

/// A value for each query of a block.
pub(super) type PerQuery = [f32; BLOCK];

/// A mask of each lane for each of a block's own keys: all bits are set if its query sees the key.
static SEEING: [[u32; BLOCK]; BLOCK] = {
    let mut masks = [[0; BLOCK]; BLOCK];
    let mut entry = 0;
    while entry < BLOCK * BLOCK {
        let (key, lane) = (entry / BLOCK, entry % BLOCK);
        masks[key][lane] = if lane < key { 0 } else { u32::MAX };
        entry += 1;
    }
    masks
};

/// Overwrites with `value` the entries of the queries before each key. Row k is that of the block's own k-th
/// key.
#[inline(always)]
pub(super) fn hide(rows: &mut [PerQuery], value: f32) {
    // masks, because the compiler does not vectorise comparisons here, or a fill of a part of each row
    for (entry, mask) in rows.as_flattened_mut().iter_mut().zip(SEEING.as_flattened()) {
        *entry = f32::from_bits(entry.to_bits() & mask | value.to_bits() & !mask);
    }
}

/// Returns the largest of each query's scores, of which NaN are passed over.
#[inline(always)]
pub(super) fn largest(scores: &[PerQuery]) -> PerQuery {
    let mut all = [f32::NEG_INFINITY; BLOCK];
    for scores in scores {
        for (largest, score) in all.iter_mut().zip(scores) {
            *largest = if score > largest { *score } else { *largest };
        }
    }
    all
}

/// Returns the sum of each query's values, added in four chains, that of key k in chain k mod 4. Zeros at the
/// end change nothing.
#[inline(always)]
pub(super) fn sums(values: &[PerQuery]) -> PerQuery {
    const CHAINS: usize = 4;
    let mut sums = [[0.0; BLOCK]; CHAINS];
    for values in values.chunks(CHAINS) {
        for (sums, values) in sums.iter_mut().zip(values) {
            sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
        }
    }
    let [a, b, c, d] = sums;
    std::array::from_fn(|lane| (a[lane] + b[lane]) + (c[lane] + d[lane]))
}

/// Turns scores into the exponentials of their distances to the largest, times `scale`. Only the lanes from
/// `HALF` on see the last `num_late` keys; the others of these keep what they have.
#[inline(always)]
pub(super) fn exponentials(scores: &mut [PerQuery], num_late: usize, largest: &PerQuery, scale: f32) {
    let (early, late) = scores.split_at_mut(scores.len() - num_late);
    early.iter_mut().for_each(|row| row_exponentials(row, largest, scale));
    late.iter_mut().for_each(|row| row_exponentials(&mut row[HALF..], &largest[HALF..], scale));
}

#[inline(always)]
fn row_exponentials(scores: &mut [f32], largest: &[f32], scale: f32) {
    for (score, largest) in scores.iter_mut().zip(largest) {
        *score = math::exp((*score - largest) * scale);
    }
}

/// The values of each query that the gradients of a block's scores need.
pub(super) struct QueryStatistics {
    /// The logarithm of the sum of exponentials.
    pub(super) logarithms: PerQuery,
    /// The sum of the products of outputs and their gradients.
    pub(super) means: PerQuery,
}

/// Turns scores into weights, and the gradients of weights into those of scores. Only the lanes from `HALF`
/// on see the last `num_late` keys; the others of these keep what they have.
#[inline(always)]
pub(super) fn score_gradients(
    [scores, gradients]: [&mut [PerQuery]; 2],
    num_late: usize,
    statistics: &QueryStatistics,
    scale: f32,
) {
    let num_early = scores.len() - num_late;
    for (key, (scores, gradients)) in scores.iter_mut().zip(gradients).enumerate() {
        let QueryStatistics { logarithms, means } = statistics;
        if key < num_early {
            row_gradients([scores, gradients], [logarithms, means], scale);
        } else {
            let rows = [&mut scores[HALF..], &mut gradients[HALF..]];
            row_gradients(rows, [&logarithms[HALF..], &means[HALF..]], scale);
        }
    }
}

#[inline(always)]
fn row_gradients([scores, gradients]: [&mut [f32]; 2], [logarithms, means]: [&[f32]; 2], scale: f32) {
    let statistics = logarithms.iter().zip(means);
    for ((score, gradient), (logarithm, mean)) in scores.iter_mut().zip(gradients).zip(statistics) {
        let weight = math::exp(score.mul_add(scale, -logarithm));
        *score = weight;
        *gradient = weight * (*gradient - mean) * scale;
    }
}

/// Computes the sum of the products of two rows of `width` elements for each of `sums`.
pub(super) struct RowProducts<'a> {
    pub(super) width: usize,
    pub(super) rows: [MatrixRows<'a>; 2],
    pub(super) sums: &'a mut [f32],
}

impl WithSimd for RowProducts<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        for (row, sum) in self.sums.iter_mut().enumerate() {
            let rows = self.rows.map(|rows| &rows.values[row * rows.stride..][..self.width]);
            *sum = sum_of(
                simd,
                rows,
                #[inline(always)]
                |[a, b]| simd.mul_f32s(a, b),
            );
        }
    }
}

/// Multiplies values by factors.
#[inline(always)]
pub(super) fn multiply(values: &mut [PerQuery], factors: &[PerQuery]) {
    for (value, factor) in values.as_flattened_mut().iter_mut().zip(factors.as_flattened()) {
        *value *= factor;
    }
}
