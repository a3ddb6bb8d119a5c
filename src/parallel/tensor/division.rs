//! The division of features and of positions among the ranks of the tensor axis: pure logic.

use std::ops::Range;

use crate::parallel::batch::Summation;
use crate::sums::{Leaves, Section, Subtrees};

/// The division of the features of a layer among the ranks that share it: every rank has whole leaves
/// of the sums over them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FeatureDivision {
    summation: Summation,
    num_ranks: usize,
    shares_positions: bool,
}

/// The columns of a vector in parts of the ranks: whole leaves of features, or of the positions of a
/// sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ColumnShares {
    leaves: Leaves,
    /// The number of consecutive columns that are never cut.
    unit: usize,
    num_ranks: usize,
}

impl ColumnShares {
    /// Returns the columns of `rank`.
    pub fn of_rank(self, rank: usize) -> Range<usize> {
        Section::of_rank(self.leaves, rank, self.num_ranks).times(self.unit).terms()
    }

    /// Returns the most columns that a rank has.
    pub fn most(self) -> usize {
        (0..self.num_ranks).map(|rank| self.of_rank(rank).len()).max().unwrap_or_default()
    }

    /// Returns the length of a message with equal parts of all ranks for `num_sums` sums of `rows` vectors.
    pub fn message_len(self, rows: usize, num_sums: usize) -> usize {
        rows.saturating_mul(self.num_ranks).saturating_mul(self.most()).saturating_mul(num_sums)
    }
}

impl FeatureDivision {
    /// Divides features among `num_ranks` ranks for sums in the order of `summation`.
    pub fn new(summation: Summation, num_ranks: usize) -> FeatureDivision {
        FeatureDivision { summation, num_ranks, shares_positions: false }
    }

    /// Divides the positions of sequences too, if `shares_positions`: see [`super::positions`].
    pub fn with_positions(self, shares_positions: bool) -> FeatureDivision {
        FeatureDivision { shares_positions: shares_positions && self.num_ranks > 1, ..self }
    }

    /// Returns the number of ranks.
    pub fn num_ranks(self) -> usize {
        self.num_ranks
    }

    /// Returns true if layers may have some of the positions of a sequence.
    pub fn shares_positions(self) -> bool {
        self.shares_positions
    }

    /// Returns the division of a sum of `num_leaves` leaves among the ranks, if its order is canonical.
    pub fn canonical_subtrees(self, num_leaves: usize) -> Option<Subtrees> {
        (self.summation != Summation::ByLayout).then(|| Subtrees::new(num_leaves, self.num_ranks))
    }

    /// Returns the number of leaves of a sum over `width` features, of which `unit` at a time are never
    /// cut. Units of several features, heads, are leaves if they are few, so that ranks have heads alike.
    pub fn num_leaves(self, width: usize, unit: usize) -> usize {
        let most = self.summation.num_leaves(self.num_ranks);
        if unit == 1 { most } else { most.min(width / unit) }
    }

    fn leaves(self, width: usize, unit: usize) -> Leaves {
        Leaves { len: width / unit, num: self.num_leaves(width, unit) }
    }

    /// Returns the leaves of the positions of a sequence of `len`, at least one.
    pub fn position_leaves(self, len: usize) -> Leaves {
        Leaves { len, num: self.summation.num_leaves(self.num_ranks).min(len) }
    }

    /// Returns all positions of a sequence of `len` as the terms of a sum.
    pub fn positions(self, len: usize) -> Section {
        Section::whole(self.position_leaves(len))
    }

    /// Returns the positions of `rank` in a sequence of `len` as the terms of a sum.
    pub fn own_positions(self, len: usize, rank: usize) -> Section {
        Section::of_rank(self.position_leaves(len), rank, self.num_ranks)
    }

    /// Returns all of `width` features in units of `unit`.
    pub fn whole(self, width: usize, unit: usize) -> Section {
        Section::whole(self.leaves(width, unit)).times(unit)
    }

    /// Returns the features of `rank` among `width` in units of `unit`, as the terms of a sum.
    pub fn section(self, width: usize, unit: usize, rank: usize) -> Section {
        Section::of_rank(self.leaves(width, unit), rank, self.num_ranks).times(unit)
    }

    /// Returns the division of `width` features that may be parted anywhere.
    pub fn columns(self, width: usize) -> ColumnShares {
        ColumnShares { leaves: self.leaves(width, 1), unit: 1, num_ranks: self.num_ranks }
    }

    /// Returns the division of a sequence of `len` positions with `width` features each, as one vector.
    pub fn position_columns(self, len: usize, width: usize) -> ColumnShares {
        ColumnShares { leaves: self.position_leaves(len), unit: width, num_ranks: self.num_ranks }
    }

    /// Returns the number of arrays in which a rank forms its part of a sum of `num_leaves` leaves: the
    /// most of all ranks.
    pub fn num_sums(self, num_leaves: usize) -> usize {
        self.canonical_subtrees(num_leaves).map_or(1, Subtrees::most)
    }

    /// Returns the number of arrays in which `rank` forms its part of a sum of `num_leaves` leaves.
    pub fn num_own_sums(self, num_leaves: usize, rank: usize) -> usize {
        self.canonical_subtrees(num_leaves).map_or(1, |subtrees| subtrees.of_rank(rank))
    }
}
