//! One pass over the samples: rejects NaN and infinities, and computes means and deviations, the
//! largest class number, and a checksum.
//!
//! Samples are cut into leaves at fixed places, whatever the number of ranks. A rank reads whole
//! leaves. Its results, and then the results of all ranks, are combined along one binary tree over
//! the leaves, so means and deviations have the same bits on any number of ranks.

use std::ops::Range;

use xxhash_rust::xxh3::Xxh3;

use super::{BLOCK_SAMPLES, BLOCK_VALUES, Dataset, SampleBlocks, zeros};
use crate::memory::check_room;
use crate::nn::{Features, hash_values};
use crate::{Error, Result};

/// The number of values that are summed side by side, so that sums over few channels are vectorised
/// too.
const LANES: usize = 16;

/// Count, mean and sum of squared differences from the mean, for every channel of an image or every
/// feature.
#[derive(Debug, Clone, PartialEq)]
pub struct Moments {
    count: f64,
    means: Vec<f64>,
    squares: Vec<f64>,
}

impl Moments {
    /// Computes the moments of `values`, whose channels are interleaved, in two passes over their
    /// differences from the first value of each channel: exact where values never change.
    fn of(values: &[f32], channels: usize) -> Moments {
        let count = (values.len() / channels) as f64;
        let first: Vec<f64> = values[..channels].iter().map(|value| f64::from(*value)).collect();
        let sums = sums(values, &first, |difference| difference);
        let shifts: Vec<f64> = sums.iter().map(|sum| sum / count).collect();
        let means: Vec<f64> = first.iter().zip(&shifts).map(|(first, shift)| first + shift).collect();
        // the corrected two-pass formula: removes the rounding error of the mean from the squares
        let rests = self::sums(values, &means, |difference| difference);
        let squares = self::sums(values, &means, |difference| difference * difference);
        let squares = squares
            .iter()
            .zip(&rests)
            .map(|(squares, rest)| (squares - rest * rest / count).max(0.0))
            .collect();
        Moments { count, means, squares }
    }

    /// Adds the moments of later samples: T. F. Chan, G. H. Golub and R. J. LeVeque, "Updating
    /// Formulae and a Pairwise Algorithm for Computing Sample Variances", COMPSTAT 1982.
    fn add(&mut self, later: &Moments) {
        let count = self.count + later.count;
        let share = later.count / count;
        let pairs = self.means.iter_mut().zip(&mut self.squares).zip(later.means.iter().zip(&later.squares));
        for ((mean, squares), (later_mean, later_squares)) in pairs {
            let difference = later_mean - *mean;
            *mean += difference * share;
            *squares += later_squares + difference * difference * self.count * share;
        }
        self.count = count;
    }

    /// Returns mean and deviation of each channel or feature. A deviation of 0, where values never
    /// change, is replaced by 1.
    pub fn pairs(&self) -> Vec<[f64; 2]> {
        let pairs = self.means.iter().zip(&self.squares);
        let deviation = |squares: &f64| (squares / self.count).sqrt();
        pairs.map(|(mean, squares)| [*mean, if *squares > 0.0 { deviation(squares) } else { 1.0 }]).collect()
    }
}

/// Returns for each channel the sum of `term` of the values' differences from `from`.
fn sums(values: &[f32], from: &[f64], term: impl Fn(f64) -> f64) -> Vec<f64> {
    let channels = from.len();
    let lanes = if channels < LANES { LANES } else { 1 };
    let from: Vec<f64> = from.iter().copied().cycle().take(channels * lanes).collect();
    let mut sums = vec![0.0; from.len()];
    for row in values.chunks(from.len()) {
        let columns = sums.iter_mut().zip(row).zip(&from);
        columns.for_each(|((sum, value), from)| *sum += term(f64::from(*value) - from));
    }
    let (total, others) = sums.split_at_mut(channels);
    for lane in others.chunks_exact(channels) {
        total.iter_mut().zip(lane).for_each(|(total, sum)| *total += sum);
    }
    total.to_vec()
}

/// A node of the tree over all leaves: its first leaf, the number of leaves below it, and their
/// moments.
#[derive(Debug, Clone, PartialEq)]
struct Node {
    first: usize,
    size: usize,
    moments: Moments,
}

/// The moments of consecutive leaves, as the largest complete nodes of the tree over all leaves, in
/// order.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct MomentTree {
    nodes: Vec<Node>,
}

impl MomentTree {
    fn push(&mut self, node: Node) {
        self.nodes.push(node);
        while let [.., left, right] = self.nodes.as_slice()
            && left.size == right.size
            && left.first.is_multiple_of(2 * left.size)
            && right.first == left.first + left.size
            && let Some(right) = self.nodes.pop()
            && let Some(left) = self.nodes.last_mut()
        {
            left.moments.add(&right.moments);
            left.size *= 2;
        }
    }

    /// Adds the leaves that directly follow these.
    pub fn append(&mut self, later: MomentTree) {
        later.nodes.into_iter().for_each(|node| self.push(node));
    }

    /// Returns the moments of all leaves, if there are any.
    pub fn total(mut self) -> Option<Moments> {
        let mut total = self.nodes.pop()?.moments;
        while let Some(Node { moments, .. }) = self.nodes.pop() {
            let later = std::mem::replace(&mut total, moments);
            total.add(&later);
        }
        Some(total)
    }

    /// Encodes the tree as numbers that can be sent to another rank, `3 + 2 · channels` per node.
    pub fn to_values(&self) -> Vec<f64> {
        let node = |Node { first, size, moments }: &Node| {
            [&[*first as f64, *size as f64, moments.count][..], &moments.means, &moments.squares].concat()
        };
        self.nodes.iter().flat_map(node).collect()
    }

    /// Decodes the numbers of [`MomentTree::to_values`] for this number of channels.
    pub fn from_values(values: &[f64], channels: usize) -> MomentTree {
        let node = |values: &[f64]| {
            let (means, squares) = values[3..].split_at(channels);
            let moments = Moments { count: values[2], means: means.to_vec(), squares: squares.to_vec() };
            Node { first: values[0] as usize, size: values[1] as usize, moments }
        };
        MomentTree { nodes: values.chunks_exact(3 + 2 * channels).map(node).collect() }
    }
}

/// The statistics that a pass over samples computes, besides the largest class number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WantedStatistics {
    /// The distribution of the inputs.
    pub moments: bool,
    /// The checksum of the samples.
    pub checksum: bool,
    /// A look at every input, which refuses NaN and infinity.
    pub finite: bool,
}

impl WantedStatistics {
    /// Returns true if the pass reads inputs, and not targets alone.
    pub fn reads_inputs(self) -> bool {
        self.moments || self.checksum || self.finite
    }
}

/// The results of a pass over the samples of some leaves.
#[derive(Debug, Clone, PartialEq)]
pub struct Statistics {
    /// The distribution of the inputs; empty if it was not wanted.
    pub moments: MomentTree,
    /// The largest class number, −1 before the first.
    pub largest_label: f64,
    /// The sums over all samples of the upper and of the lower halves of a hash of each sample and
    /// its number: a checksum that does not depend on which rank reads which samples. It cannot
    /// overflow with fewer than 2³¹ samples. 0 if it was not wanted.
    pub checksum: [i64; 2],
}

/// Returns the number of values of each sample that have a mean of their own: the features, or the
/// channels of images.
pub fn num_channels(features: Features) -> usize {
    match features {
        Features::Flat(len) => len,
        Features::Image { channels, .. } => channels,
        Features::Tokens { .. } | Features::Sequence { .. } => 1,
    }
}

/// Returns the leaves of `dataset`: whole blocks, as many as are read together.
pub fn leaves(dataset: &dyn Dataset) -> SampleBlocks {
    let len = dataset.features().len().saturating_add(dataset.targets().len());
    dataset.blocks().joined((BLOCK_VALUES / len.max(1)).clamp(1, BLOCK_SAMPLES))
}

impl Statistics {
    /// Reads the samples of some [`leaves`] of `dataset` and computes what is `wanted` of them. Calls
    /// `after_leaf` after each leaf. Not collective: the caller divides the leaves among the ranks and
    /// combines the results.
    ///
    /// # Errors
    /// A sample cannot be read or holds NaN or an infinity, or there is no memory for a leaf.
    pub fn gather(
        dataset: &mut dyn Dataset,
        leaves: Range<usize>,
        wanted: WantedStatistics,
        after_leaf: &mut dyn FnMut(),
    ) -> Result<Statistics> {
        let channels = num_channels(dataset.features());
        let mut found = Statistics { moments: MomentTree::default(), largest_label: -1.0, checksum: [0; 2] };
        let WantedStatistics { moments: with_moments, checksum: with_checksum, .. } = wanted;
        let len = if wanted.reads_inputs() { dataset.features().len() } else { 0 };
        let targets_len = dataset.targets().len();
        let all = self::leaves(dataset);
        let room = all.largest();
        let (mut inputs, mut targets) = (zeros(room * len)?, zeros(room * targets_len)?);
        if with_moments {
            // room for the means and squares of one node for each halving of the number of leaves,
            // and of a few more
            let num_nodes = all.num_blocks().ilog2() as usize + 4;
            let fail = |why: String| Error::failed("finding means and deviations", why);
            check_room(channels.saturating_mul(2 * size_of::<f64>() * num_nodes)).map_err(fail)?;
        }
        for leaf in leaves {
            let samples: Vec<usize> = all.samples(leaf).collect();
            let (inputs, targets) =
                (&mut inputs[..samples.len() * len], &mut targets[..samples.len() * targets_len]);
            dataset.read(&samples, inputs, targets)?;
            for (index, sample) in samples.iter().enumerate().filter(|_| with_checksum) {
                let mut hash = Xxh3::with_seed(*sample as u64);
                hash_values(&mut hash, &inputs[index * len..(index + 1) * len]);
                hash_values(&mut hash, &targets[index * targets_len..(index + 1) * targets_len]);
                let hash = hash.digest();
                found.checksum[0] += (hash >> 32) as i64;
                found.checksum[1] += (hash & 0xFFFF_FFFF) as i64;
            }
            if with_moments {
                found.moments.push(Node { first: leaf, size: 1, moments: Moments::of(inputs, channels) });
            }
            if targets_len == 1 {
                found.largest_label =
                    targets.iter().fold(found.largest_label, |most, t| most.max(f64::from(*t)));
            }
            after_leaf();
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_cut_into_ranks_gives_the_same_bits() {
        let values = |leaf: usize| -> Vec<f32> {
            let length = if leaf == 10 { 4 } else { 20 };
            (0..length).map(|i| 1e5 + ((leaf * 31 + i * 17) % 23) as f32 / 7.0).collect()
        };
        let leaf = |leaf: usize| Node { first: leaf, size: 1, moments: Moments::of(&values(leaf), 2) };
        let mut whole = MomentTree::default();
        (0..11).for_each(|at| whole.push(leaf(at)));
        let whole = whole.total().unwrap();
        for cuts in
            [vec![0, 11], vec![0, 5, 11], vec![0, 3, 4, 9, 11], vec![0, 0, 1, 2, 3, 11], (0..=11).collect()]
        {
            let mut all = MomentTree::default();
            for cut in cuts.windows(2) {
                let mut part = MomentTree::default();
                (cut[0]..cut[1]).for_each(|at| part.push(leaf(at)));
                all.append(MomentTree::from_values(&part.to_values(), 2));
            }
            assert_eq!(all.total().unwrap(), whole, "{cuts:?}");
        }
        for channel in 0..2 {
            let of: Vec<f64> = (0..11)
                .flat_map(|at| values(at).into_iter().skip(channel).step_by(2))
                .map(f64::from)
                .collect();
            let mean = of.iter().sum::<f64>() / of.len() as f64;
            let variance = of.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / of.len() as f64;
            let [found, deviation] = whole.pairs()[channel];
            assert!(
                (found - mean).abs() < 1e-9 && (deviation - variance.sqrt()).abs() < 1e-12,
                "{found} {deviation}"
            );
        }
    }

    #[test]
    fn values_that_never_change_have_a_deviation_of_1_and_small_changes_are_seen() {
        let constant = Moments::of(&[0.1, 1e6, 0.1, 1e6, 0.1, 1e6 + 0.0625], 2);
        assert_eq!(constant.pairs()[0], [f64::from(0.1_f32), 1.0]);
        let [mean, deviation] = constant.pairs()[1];
        assert!(
            (mean - 1e6 - 0.0625 / 3.0).abs() < 1e-9
                && (deviation - 0.0625 * (2.0_f64).sqrt() / 3.0).abs() < 1e-12
        );
    }
}
