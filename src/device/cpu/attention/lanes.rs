//! The arithmetic of the softmax of a block of queries, each of which has a lane.

/// The queries of a block.
pub(super) const BLOCK: usize = 16;

/// A value for each query of a block.
pub(super) type Queries = [f32; BLOCK];

/// Writes `value` in place of what queries have for the keys after them. The first row is that of the first
/// query's own key.
#[inline(always)]
pub(super) fn hide(rows: &mut [Queries], value: f32) {
    for (key, row) in rows.iter_mut().enumerate() {
        row[..key].fill(value);
    }
}

/// Returns the largest of each query's scores, of which NaN are passed over.
#[inline(always)]
pub(super) fn largest(scores: &[Queries]) -> Queries {
    let mut all = [f32::NEG_INFINITY; BLOCK];
    for scores in scores {
        for (largest, score) in all.iter_mut().zip(scores) {
            *largest = if score > largest { *score } else { *largest };
        }
    }
    all
}

/// Returns the sum of each query's values, of which each fourth one is in a chain.
#[inline(always)]
pub(super) fn sums(values: &[Queries]) -> Queries {
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
pub(super) fn multiply(values: &mut [Queries], factors: &[Queries]) {
    for (value, factor) in values.as_flattened_mut().iter_mut().zip(factors.as_flattened()) {
        *value *= factor;
    }
}
