//! The division of features among the ranks of the tensor axis: pure logic.

use std::ops::Range;

use crate::parallel::batch::Summation;
use crate::sums::{Leaves, Section, Subtrees};

/// The division of the features of a layer among the ranks that share it: every rank has whole leaves
/// of the sums over them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FeatureDivision {
    summation: Summation,
    num_ranks: usize,
}

impl FeatureDivision {
    /// Divides features among `num_ranks` ranks for sums in the order of `summation`.
    pub fn new(summation: Summation, num_ranks: usize) -> FeatureDivision {
        FeatureDivision { summation, num_ranks }
    }

    /// Returns the number of ranks.
    pub fn num_ranks(self) -> usize {
        self.num_ranks
    }

    /// Returns the parts of a sum that the ranks add up, if their order is canonical.
    pub fn canonical_subtrees(self) -> Option<Subtrees> {
        (self.summation != Summation::ByLayout).then(|| Subtrees::new(self.leaves(0).num, self.num_ranks))
    }

    fn leaves(self, width: usize) -> Leaves {
        Leaves { len: width, num: self.summation.num_leaves(self.num_ranks) }
    }

    /// Returns all of `width` features.
    pub fn whole(self, width: usize) -> Section {
        Section::whole(self.leaves(width))
    }

    /// Returns the features of `rank` among `width`, as the terms of a sum.
    pub fn section(self, width: usize, rank: usize) -> Section {
        Section::of_rank(self.leaves(width), rank, self.num_ranks)
    }

    /// Returns the features of `rank` among `width`.
    pub fn columns(self, width: usize, rank: usize) -> Range<usize> {
        self.section(width, rank).terms()
    }

    /// Returns the most features that a rank has of `width`.
    pub fn most_columns(self, width: usize) -> usize {
        (0..self.num_ranks).map(|rank| self.columns(width, rank).len()).max().unwrap_or_default()
    }

    /// Returns the length of a message with equal parts of all ranks for sums of `rows` rows.
    pub fn message_len(self, rows: usize, width: usize) -> usize {
        let len = rows.saturating_mul(self.num_ranks).saturating_mul(self.most_columns(width));
        len.saturating_mul(self.num_sums())
    }

    /// Returns the number of arrays in which a rank forms its part of a sum: the most of all ranks.
    pub fn num_sums(self) -> usize {
        self.canonical_subtrees().map_or(1, Subtrees::most)
    }

    /// Returns the number of arrays in which `rank` forms its part of a sum.
    pub fn num_own_sums(self, rank: usize) -> usize {
        self.canonical_subtrees().map_or(1, |subtrees| subtrees.of_rank(rank))
    }
}
