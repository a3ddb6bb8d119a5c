//! The arithmetic of the softmax of a row of logits, whole or of some classes.

use smallvec::SmallVec;

use super::math;
use crate::device::LossShape;
use crate::device::logit_statistics::{BEST, LARGEST, LEN, OF_LABEL};
use crate::sums::{MOST_PENDING, Step};

/// The logits of a row over all classes, as the loss needs them.
pub(super) struct RowOfLogits {
    pub(super) largest: f32,
    /// The class of the largest logit.
    pub(super) best: usize,
    pub(super) of_label: f32,
}

impl RowOfLogits {
    /// Returns a row from the statistics of all ranks.
    #[inline(always)]
    pub(super) fn of_all(statistics: &[f32], rows: usize, row: usize) -> RowOfLogits {
        let mut all = RowOfLogits { largest: f32::NEG_INFINITY, best: 0, of_label: 0.0 };
        for (rank, part) in statistics.chunks_exact(LEN * rows).enumerate() {
            let at = |which: usize| part[which * rows + row];
            if rank == 0 || at(LARGEST) > all.largest {
                (all.largest, all.best) = (at(LARGEST), at(BEST) as usize);
            }
            // all terms but one are 0
            all.of_label += at(OF_LABEL);
        }
        all
    }

    /// Returns the loss, where the exponentials have the sum `exponentials`, and 1 if the prediction is
    /// correct.
    #[inline(always)]
    pub(super) fn prediction(&self, label: usize, exponentials: f32) -> [f32; 2] {
        // the logarithm of the C library has other bits on other machines
        let loss = libm::logf(exponentials) + (self.largest - self.of_label);
        [loss, if self.best == label { 1.0 } else { 0.0 }]
    }
}

/// The lanes in which the largest logit is searched for: the widest vector registers.
const LANES: usize = 16;

/// Returns the place of the largest of one logit or more, the first if several are the largest.
#[inline(always)]
pub(super) fn first_largest(logits: &[f32]) -> usize {
    let larger = |one: f32, other: f32| if other > one { other } else { one };
    let (blocks, rest) = logits.as_chunks::<LANES>();
    let mut largest = rest.iter().copied().fold(logits[0], larger);
    if !blocks.is_empty() {
        let mut lanes = [largest; LANES];
        for block in blocks {
            lanes.iter_mut().zip(block).for_each(|(lane, logit)| *lane = larger(*lane, *logit));
        }
        largest = lanes.into_iter().fold(largest, larger);
    }
    // if the first is NaN, none is larger
    logits.iter().position(|logit| *logit == largest).unwrap_or_default()
}

/// Computes the exponentials of the distances of logits to the largest.
#[inline(always)]
pub(super) fn exponentials(logits: &[f32], largest: f32, into: &mut [f32]) {
    into.iter_mut().zip(logits).for_each(|(into, logit)| *into = math::exp(logit - largest));
}

/// Turns the exponentials of a row's own classes into the gradient.
#[inline(always)]
pub(super) fn finish_row(shape: &LossShape, label: usize, exponentials: f32, gradient: &mut [f32]) {
    let factor = shape.scale / exponentials;
    gradient.iter_mut().for_each(|g| *g *= factor);
    let at = label.checked_sub(shape.classes.terms().start);
    if let Some(of_label) = at.and_then(|at| gradient.get_mut(at)) {
        *of_label -= shape.scale;
    }
}

/// The leaves of the sum over classes.
pub(super) type ClassSteps = SmallVec<[Step; 32]>;

/// The number of leaves that are added up side by side, because an addition waits for the one before it.
const SIDE_BY_SIDE: usize = 4;

/// Adds up leaves of `values`. Returns the number of whole subtrees, whose sums are on the `stack` then.
#[inline(always)]
pub(super) fn add_up(steps: &[Step], values: &[f32], stack: &mut [f32; MOST_PENDING]) -> usize {
    if let [_] = steps {
        stack[0] = values.iter().fold(0.0, |sum, value| sum + value);
        return 1;
    }
    let mut depth = 0;
    for some in steps.chunks(SIDE_BY_SIDE) {
        let mut leaves: [&[f32]; SIDE_BY_SIDE] = [&[]; SIDE_BY_SIDE];
        leaves.iter_mut().zip(some).for_each(|(leaf, step)| *leaf = &values[step.first..step.end]);
        for (step, mut sum) in some.iter().zip(chains(&leaves)) {
            for _ in 0..step.num_merges {
                depth -= 1;
                sum += stack[depth];
            }
            stack[depth] = sum;
            depth += 1;
        }
    }
    depth
}

/// Returns the sums of leaves, each in the order of its terms.
#[inline(always)]
fn chains(leaves: &[&[f32]; SIDE_BY_SIDE]) -> [f32; SIDE_BY_SIDE] {
    let mut sums = [0.0; SIDE_BY_SIDE];
    let common = leaves.iter().map(|leaf| leaf.len()).min().unwrap_or_default();
    let [first, second, third, fourth] = leaves.map(|leaf| leaf[..common].iter());
    for (((a, b), c), d) in first.zip(second).zip(third).zip(fourth) {
        sums = [sums[0] + a, sums[1] + b, sums[2] + c, sums[3] + d];
    }
    for (sum, leaf) in sums.iter_mut().zip(leaves) {
        leaf[common..].iter().for_each(|value| *sum += value);
    }
    sums
}
