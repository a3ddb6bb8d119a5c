//! The division of a batch among replicas and micro-batches, and of the sums over its rows: pure
//! logic.

use std::ops::Range;

use crate::comm::GridShape;
use crate::sums::{Leaves, MOST_LEAVES, NUM_LEAVES, Section, Subtrees, shard};
use crate::{Error, Result};

/// The order of the sums that a layout divides: those over the rows of a batch, over the inputs of a
/// layer that ranks share, and over the classes of a loss.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Summation {
    /// Canonical sums, whose bits are the same in every layout.
    Canonical {
        /// The number of leaves of a sum.
        num_leaves: usize,
    },
    /// A chain of each rank, whose bits depend on the layout.
    ByLayout,
}

/// The division of a batch. A replica has consecutive leaves of the batch's rows, in consecutive
/// micro-batches. If every micro-batch is reduced over the replicas by itself, the micro-batches have
/// consecutive leaves, which the replicas share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchDivision {
    summation: Summation,
    num_replicas: usize,
    num_micro_batches: usize,
    reduces_each: bool,
}

impl Summation {
    /// Returns canonical sums of as many leaves as were `given`, or of [`NUM_LEAVES`], or of so many that
    /// every rank of the data and tensor axes of `shape` has one. Returns sums by layout if that would be
    /// more than [`MOST_LEAVES`].
    ///
    /// # Errors
    /// The number that was `given` is 0 or too large.
    pub fn canonical(given: Option<usize>, shape: GridShape) -> Result<Summation> {
        if let Some(given) = given.filter(|given| !(1..=MOST_LEAVES).contains(given)) {
            let why = format!("a sum has 1 to {MOST_LEAVES} leaves");
            return Err(Error::input(format!("--leaves {given}"), why));
        }
        let widest = shape.data.max(shape.tensor);
        match given.unwrap_or(widest.next_power_of_two().max(NUM_LEAVES)) {
            num_leaves if num_leaves > MOST_LEAVES => Ok(Summation::ByLayout),
            num_leaves => Ok(Summation::Canonical { num_leaves }),
        }
    }

    /// Returns the number of leaves of a sum that `num_ranks` ranks share.
    pub fn num_leaves(self, num_ranks: usize) -> usize {
        match self {
            Summation::Canonical { num_leaves } => num_leaves,
            Summation::ByLayout => num_ranks,
        }
    }
}

impl BatchDivision {
    /// Divides batches among `num_replicas` replicas, in `num_micro_batches` micro-batches.
    pub fn new(
        summation: Summation,
        num_replicas: usize,
        num_micro_batches: usize,
        reduces_each: bool,
    ) -> BatchDivision {
        BatchDivision { summation, num_replicas, num_micro_batches, reduces_each }
    }

    /// Returns the number of replicas.
    pub fn num_replicas(self) -> usize {
        self.num_replicas
    }

    /// Returns the number of micro-batches of a replica.
    pub fn num_micro_batches(self) -> usize {
        self.num_micro_batches
    }

    /// Returns true if sums have the same bits in every layout.
    pub fn is_canonical(self) -> bool {
        self.summation != Summation::ByLayout
    }

    /// Returns true if every micro-batch is reduced over the replicas by itself.
    pub fn reduces_each(self) -> bool {
        self.reduces_each
    }

    /// Returns the number of leaves of a batch.
    fn num_leaves(self) -> usize {
        match self.summation {
            Summation::ByLayout if self.reduces_each => self.num_replicas * self.num_micro_batches,
            summation => summation.num_leaves(self.num_replicas),
        }
    }

    /// Returns the leaves of the rows that are reduced after `micro_batch`, of all replicas.
    fn block(self, micro_batch: usize) -> Range<usize> {
        let num_leaves = self.num_leaves();
        match self.summation {
            _ if !self.reduces_each => 0..num_leaves,
            Summation::ByLayout => shard(num_leaves, micro_batch, self.num_micro_batches),
            Summation::Canonical { .. } => {
                let width = num_leaves.next_power_of_two();
                subtree(0, width, num_leaves, micro_batch, self.num_micro_batches)
            }
        }
    }

    /// Returns true if some rows are reduced after `micro_batch`. Otherwise no replica has any.
    pub fn has_rows(self, micro_batch: usize) -> bool {
        !self.block(micro_batch).is_empty()
    }

    /// Returns the sums that replicas add up by the reduction after `micro_batch`, if their order is
    /// canonical.
    pub fn canonical_subtrees(self, micro_batch: usize) -> Option<Subtrees> {
        self.is_canonical().then(|| self.subtrees(micro_batch))
    }

    /// Returns the most sums of a replica that one reduction adds up.
    pub fn num_sums_reduced(self) -> usize {
        let nums = (0..self.num_micro_batches).map(|micro_batch| self.subtrees(micro_batch).most());
        nums.max().unwrap_or(1)
    }

    /// Returns the sums that replicas add up by the reduction after `micro_batch`. If a micro-batch has
    /// fewer leaves than there are replicas, others have those of the next one.
    fn subtrees(self, micro_batch: usize) -> Subtrees {
        let block = self.block(micro_batch);
        Subtrees::new(block.len(), self.num_replicas).from_rank(block.start % self.num_replicas)
    }

    /// Returns the rows of a micro-batch of `replica` in a batch of `len` rows.
    pub fn section(self, len: usize, replica: usize, micro_batch: usize) -> Section {
        let leaves = Leaves { len, num: self.num_leaves() };
        let (first, own) = (self.block(micro_batch).start, self.subtrees(micro_batch).leaves(replica));
        let section = Section::of_leaves(leaves, first + own.start..first + own.end);
        if self.reduces_each { section } else { section.micro_batch(micro_batch, self.num_micro_batches) }
    }

    /// Returns the rows of each micro-batch of `replica` in a batch of `len` rows.
    pub fn sections(self, len: usize, replica: usize) -> impl Iterator<Item = Section> {
        (0..self.num_micro_batches).map(move |number| self.section(len, replica, number))
    }

    /// Returns the rows of `replica` in a batch of `len` rows: those of each micro-batch.
    pub fn rows(self, len: usize, replica: usize) -> Vec<Range<usize>> {
        self.sections(len, replica).map(|section| section.terms()).collect()
    }

    /// Returns the most rows of a micro-batch in batches of up to `len` rows.
    pub fn most_rows(self, len: usize) -> usize {
        let of_len = |len: usize| {
            let all = (0..self.num_replicas).flat_map(move |replica| self.sections(len, replica));
            all.map(Section::len)
        };
        self.lengths(len).flat_map(of_len).max().unwrap_or_default()
    }

    /// Returns the lengths to try when looking for the largest section of batches of up to `len` rows: `len`
    /// and those below it, as many as there are leaves. A batch that is shorter by the number of leaves has
    /// one row fewer in every leaf, so no shorter one can be larger.
    pub fn lengths(self, len: usize) -> Range<usize> {
        len.saturating_sub(self.num_leaves() - 1)..len + 1
    }

    /// Returns the number of arrays in which a replica adds up gradients: the most values on its
    /// stack between two micro-batches.
    pub fn num_arrays(self) -> usize {
        let depth = |replica: usize| self.sections(0, replica).map(Section::depth_after).max().unwrap_or(1);
        (0..self.num_replicas).map(depth).max().unwrap_or(1)
    }

    /// Returns the number of earlier sums, the nearest first, that the sum of a micro-batch is added
    /// to, if each is reduced by itself.
    pub fn num_merges(self, micro_batch: usize) -> usize {
        let block = self.block(micro_batch);
        match self.summation {
            Summation::Canonical { num_leaves } if self.reduces_each && !block.is_empty() => {
                let leaves = Leaves { len: 0, num: num_leaves };
                leaves.num_merges(block.end - 1, 0) - leaves.num_merges(block.end - 1, block.start)
            }
            Summation::ByLayout if self.reduces_each => usize::from(micro_batch > 0),
            _ => 0,
        }
    }

    /// Returns the most sums of micro-batches that are kept at a time, if each is reduced by itself.
    pub fn num_sums_kept(self) -> usize {
        let num = if self.reduces_each { self.num_micro_batches } else { 1 };
        let mut depth = 0;
        let depths = (0..num).filter(|micro_batch| !self.block(*micro_batch).is_empty()).map(|micro_batch| {
            depth = depth + 1 - self.num_merges(micro_batch);
            depth
        });
        depths.max().unwrap_or(1)
    }
}

/// Returns the leaves of part `index` of `num` parts of the subtree of `width` leaves from `first` on,
/// cut off at `end`. Every part is a subtree, or empty if there are fewer leaves. The last part is never
/// empty.
fn subtree(first: usize, width: usize, end: usize, index: usize, num: usize) -> Range<usize> {
    let own = first..end.min(first + width);
    if num == 1 || own.len() <= 1 {
        return if index + 1 == num { own } else { first..first };
    }
    let half = width / 2;
    let middle = first + half;
    if middle >= end {
        return subtree(first, half, end, index, num);
    }
    let num_left = (num * half).div_ceil(own.len()).clamp(1, num - 1);
    match index.checked_sub(num_left) {
        None => subtree(first, half, end, index, num_left),
        Some(index) => subtree(middle, half, end, index, num - num_left),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_has_a_leaf_unless_the_number_is_given() {
        let canonical = |given, data, tensor| {
            let shape = GridShape { data, stage: 1, tensor };
            Summation::canonical(given, shape).map(|summation| summation.num_leaves(0))
        };
        assert_eq!(canonical(None, 1, 1).unwrap(), 8);
        assert_eq!(canonical(None, 3, 5).unwrap(), 8);
        assert_eq!(canonical(None, 9, 2).unwrap(), 16);
        assert_eq!(canonical(Some(3), 5, 1).unwrap(), 3);
        // by layout
        assert_eq!(canonical(None, 1000, 1).unwrap(), 0);
        for given in [0, 1000] {
            let error = canonical(Some(given), 1, 1).unwrap_err().to_string();
            assert!(error.contains("1 to 256 leaves"), "{error}");
        }
    }

    #[test]
    fn replicas_and_micro_batches_cover_a_batch_once() {
        for (num_replicas, num_micro_batches) in [(1, 1), (3, 1), (5, 8), (8, 3), (2, 4), (1, 20)] {
            for reduces_each in [false, true] {
                let shape = GridShape::data(num_replicas);
                let canonical = |given| Summation::canonical(given, shape).unwrap();
                let few = [1, 5, 8].map(|num| canonical(Some(num)));
                for summation in [Summation::ByLayout, canonical(None)].into_iter().chain(few) {
                    let division =
                        BatchDivision::new(summation, num_replicas, num_micro_batches, reduces_each);
                    for len in [0, 1, 7, 64, 101] {
                        let mut times = vec![0; len];
                        for replica in 0..num_replicas {
                            for micro_batch in 0..num_micro_batches {
                                let rows = division.section(len, replica, micro_batch);
                                assert!(rows.len() <= division.most_rows(len));
                                assert!(rows.depth_after() <= division.num_arrays());
                                rows.terms().for_each(|row| times[row] += 1);
                            }
                        }
                        assert_eq!(times, vec![1; len], "{division:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn micro_batches_that_are_reduced_by_themselves_are_subtrees() {
        for num_leaves in 1..=20 {
            for num in 1..=24 {
                let summation = Summation::Canonical { num_leaves };
                let division = BatchDivision::new(summation, 2, num, true);
                let (mut end, mut depth) = (0, 0);
                for micro_batch in 0..num {
                    let block = division.block(micro_batch);
                    if !block.is_empty() {
                        assert_eq!(block.start, end);
                        let width = block.len().next_power_of_two();
                        assert!(block.len() == width || block.end == num_leaves);
                        assert!(block.start.is_multiple_of(width));
                        depth = depth + 1 - division.num_merges(micro_batch);
                        assert!(depth <= division.num_sums_kept());
                        end = block.end;
                    }
                }
                assert_eq!((end, depth), (num_leaves, 1), "{num_leaves} leaves, {num} micro-batches");
                assert!(!division.block(num - 1).is_empty());
            }
        }
    }

    #[test]
    fn usual_layouts_have_one_array() {
        let num_arrays = |num_replicas, num_micro_batches| {
            let summation = Summation::Canonical { num_leaves: 8 };
            BatchDivision::new(summation, num_replicas, num_micro_batches, false).num_arrays()
        };
        let found = [(1, 1), (2, 1), (8, 1), (1, 2), (4, 2), (5, 1)].map(|(r, m)| num_arrays(r, m));
        assert_eq!(found, [1; 6]);
        let found = [(3, 1), (1, 4), (1, 8), (2, 8), (8, 8)].map(|(r, m)| num_arrays(r, m));
        assert_eq!(found, [2, 2, 3, 3, 1]);
        let by_layout = BatchDivision::new(Summation::ByLayout, 3, 8, false);
        assert_eq!((by_layout.num_arrays(), by_layout.num_sums_reduced()), (1, 1));
    }
}
