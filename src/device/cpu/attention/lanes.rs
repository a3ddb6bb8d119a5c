//! The arithmetic of the softmax of a block of queries, each of which has a lane.

use crate::device::cpu::math;

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

/// The lanes of a vector: half of those of a block. Loops over them are on arrays of their own, of which the
/// compiler knows that they do not overlap.
type Lanes = [f32; HALF];

/// The keys of a block, row by row: those that all of its queries see, then its own.
#[derive(Clone, Copy)]
pub(super) struct KeyRows {
    /// The number of keys.
    pub(super) num: usize,
    /// The first of the block's own keys, each of which is seen by its query and those after it.
    pub(super) own: usize,
    /// The first of those keys that no query of the first `HALF` lanes sees. These lanes keep what they have.
    pub(super) late: usize,
}

impl KeyRows {
    /// Calls `work` with each key, each half of the lanes that sees it, and the masks of these lanes, whose
    /// bits are all set if the lane sees the key.
    #[inline(always)]
    fn each(self, mut work: impl FnMut(usize, usize, &[u32; HALF])) {
        for key in 0..self.num {
            let masks = SEEING[key.saturating_sub(self.own)].as_chunks().0;
            if key < self.late {
                work(key, 0, &masks[0]);
            }
            work(key, 1, &masks[1]);
        }
    }
}

/// Returns the halves of rows, those of a row one behind the other.
#[inline(always)]
fn halves(rows: &mut [PerQuery]) -> &mut [[Lanes; 2]] {
    bytemuck::cast_slice_mut(rows)
}

/// Returns the largest of the scores that each query sees, of which NaN are passed over.
#[inline(always)]
pub(super) fn largest(keys: KeyRows, scores: &[PerQuery]) -> PerQuery {
    let mut all = [[f32::NEG_INFINITY; HALF]; 2];
    let scores: &[[Lanes; 2]] = bytemuck::cast_slice(scores);
    keys.each(
        #[inline(always)]
        |key, half, masks| {
            let (mut largest, scores) = (all[half], scores[key][half]);
            for lane in 0..HALF {
                // bits, because the compiler does not vectorise comparisons of lanes here
                let hidden = f32::NEG_INFINITY.to_bits() & !masks[lane];
                let score = f32::from_bits(scores[lane].to_bits() & masks[lane] | hidden);
                largest[lane] = if score > largest[lane] { score } else { largest[lane] };
            }
            all[half] = largest;
        },
    );
    bytemuck::cast(all)
}

/// Turns scores into the exponentials of their distances to the largest, times `scale`, and returns each
/// query's sum. It is added in four chains, key k in chain k mod 4. A key that a query does not see counts as
/// 0, which changes nothing.
#[inline(always)]
pub(super) fn exponentials(
    keys: KeyRows,
    scores: &mut [PerQuery],
    largest: &PerQuery,
    scale: f32,
) -> PerQuery {
    const CHAINS: usize = 4;
    let (largest, scores): (&[Lanes; 2], _) = (bytemuck::cast_ref(largest), halves(scores));
    let mut sums = [[[0.0; HALF]; 2]; CHAINS];
    keys.each(
        #[inline(always)]
        |key, half, masks| {
            let (mut weights, mut sum) = (scores[key][half], sums[key % CHAINS][half]);
            for lane in 0..HALF {
                let weight = math::exp((weights[lane] - largest[half][lane]) * scale);
                weights[lane] = f32::from_bits(weight.to_bits() & masks[lane]);
                sum[lane] += weights[lane];
            }
            (scores[key][half], sums[key % CHAINS][half]) = (weights, sum);
        },
    );
    let [a, b, c, d]: [PerQuery; CHAINS] = bytemuck::cast(sums);
    std::array::from_fn(|lane| (a[lane] + b[lane]) + (c[lane] + d[lane]))
}

/// Turns scores into weights, from the logarithm of each query's sum of exponentials, and the gradients of
/// weights into those of scores.
#[inline(always)]
pub(super) fn score_gradients(
    keys: KeyRows,
    [scores, gradients]: [&mut [PerQuery]; 2],
    logarithms: &PerQuery,
    scale: f32,
) {
    let (scores, gradients) = (halves(scores), halves(gradients));
    let logarithms: &[Lanes; 2] = bytemuck::cast_ref(logarithms);
    // each query's mean of the gradients of its weights, weighted by these
    let mut means = [[0.0_f32; HALF]; 2];
    keys.each(
        #[inline(always)]
        |key, half, masks| {
            let (mut weights, mut gradient) = (scores[key][half], gradients[key][half]);
            let (mut mean, logarithms) = (means[half], logarithms[half]);
            for lane in 0..HALF {
                let weight = math::exp(weights[lane].mul_add(scale, -logarithms[lane]));
                weights[lane] = f32::from_bits(weight.to_bits() & masks[lane]);
                // a hidden gradient may be infinite, which times 0 is not a number
                gradient[lane] = f32::from_bits(gradient[lane].to_bits() & masks[lane]);
                mean[lane] = weights[lane].mul_add(gradient[lane], mean[lane]);
            }
            (scores[key][half], gradients[key][half], means[half]) = (weights, gradient, mean);
        },
    );
    keys.each(
        #[inline(always)]
        |key, half, _| {
            let (weights, mean, mut gradient) = (scores[key][half], means[half], gradients[key][half]);
            for lane in 0..HALF {
                gradient[lane] = weights[lane] * (gradient[lane] - mean[lane]) * scale;
            }
            gradients[key][half] = gradient;
        },
    );
}

/// Multiplies values by factors.
#[inline(always)]
pub(super) fn multiply(values: &mut [PerQuery], factors: &[PerQuery]) {
    for (value, factor) in values.as_flattened_mut().iter_mut().zip(factors.as_flattened()) {
        *value *= factor;
    }
}
