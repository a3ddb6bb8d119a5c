//! The arithmetic of the softmax of a block of queries, each of which has a lane.

/// The queries of a block: two vectors of 16, so that a product reads a factor for two multiply-adds.
pub(super) const BLOCK: usize = 32;

/// A product computes a multiple of this many lanes: those of a vector of 8.
pub(super) const FEWEST_LANES: usize = 8;

/// A value for each query of a block.
pub(super) type PerQuery = [f32; BLOCK];

/// Overwrites with `value` the entries of the queries before each key. Row k is that of the block's own k-th
/// key.
#[inline(always)]
pub(super) fn hide(rows: &mut [PerQuery], value: f32) {
    for (key, row) in rows.iter_mut().enumerate() {
        row[..key].fill(value);
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

/// Multiplies values by factors.
#[inline(always)]
pub(super) fn multiply(values: &mut [PerQuery], factors: &[PerQuery]) {
    for (value, factor) in values.as_flattened_mut().iter_mut().zip(factors.as_flattened()) {
        *value *= factor;
    }
}
