//! The kinds of exchanges, with the lengths of their arrays and messages: pure logic.

use crate::parallel::tensor::division::{ColumnShares, FeatureDivision};

/// The kind of an exchange between two layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExchangeKind {
    /// f: every rank has the values and uses them; the gradient is summed over the ranks.
    SumGradient,
    /// g: the values are summed over the ranks; every rank gets the gradient of the sum.
    SumValues,
    /// Every rank has some of the columns and gathers all; the gradient is summed over the ranks,
    /// of which each gets its own columns.
    Gather,
    /// Every rank has some of the columns and gathers all; every rank has the gradient of all
    /// columns already, because what follows is the same on all of them.
    GatherOutput,
    /// The values are summed over the ranks, of which each gets its own columns; every rank gathers the
    /// gradient of all columns.
    Scatter,
    /// Every rank has all columns and goes on with its own; every rank gathers the gradient of all.
    TakeOwn,
}

/// An exchange between two layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exchange {
    /// The kind of the exchange.
    pub kind: ExchangeKind,
    /// The number of vectors of a row, such as the positions of a sequence; 1 where positions are columns.
    pub positions: usize,
    /// The number of columns of a vector, of all ranks together.
    pub width: usize,
    /// The division of the columns among the ranks.
    pub columns: ColumnShares,
    /// The number of columns of this rank.
    pub own_width: usize,
    /// The number of leaves of the sums.
    pub num_leaves: usize,
    /// The number of arrays in which a rank forms its part of the sum: the most of all ranks.
    pub num_sums: usize,
    /// The number of these that this rank fills.
    pub num_own_sums: usize,
}

impl Exchange {
    /// Returns the exchange of `positions · width` values a row, of which the ranks of `division` divide
    /// `columns`, and which are sums of `num_leaves` leaves, for rank `rank`.
    pub fn of_columns(
        division: FeatureDivision,
        rank: usize,
        kind: ExchangeKind,
        [positions, width]: [usize; 2],
        columns: ColumnShares,
        num_leaves: usize,
    ) -> Exchange {
        Exchange {
            kind,
            positions,
            width,
            columns,
            own_width: columns.of_rank(rank).len(),
            num_leaves,
            num_sums: division.num_sums(num_leaves),
            num_own_sums: division.num_own_sums(num_leaves, rank),
        }
    }

    /// Returns the number of values of a row, of all ranks together.
    pub fn row_len(self) -> usize {
        self.positions * self.width
    }

    /// Returns the number of values of a row after the exchange.
    pub fn output_len(self) -> usize {
        match self.kind {
            ExchangeKind::Scatter | ExchangeKind::TakeOwn => self.positions * self.own_width,
            _ => self.row_len(),
        }
    }

    /// Returns the number of arrays of values before the exchange.
    pub fn num_value_sums(self) -> usize {
        if matches!(self.kind, ExchangeKind::SumValues | ExchangeKind::Scatter) { self.num_sums } else { 1 }
    }

    /// Returns the number of arrays of gradients after the exchange.
    pub fn num_gradient_sums(self) -> usize {
        if matches!(self.kind, ExchangeKind::SumGradient | ExchangeKind::Gather) { self.num_sums } else { 1 }
    }

    /// Returns the lengths of the messages of `rows` rows.
    pub fn message_lengths(self, rows: usize) -> MessageLengths {
        let vectors = rows.saturating_mul(self.positions);
        let none = MessageLengths::default();
        if self.is_in_place() {
            return MessageLengths { in_place: self.sums_len(rows), ..none };
        }
        let num_sums = self.num_value_sums().max(self.num_gradient_sums());
        MessageLengths { gathered: self.columns.message_len(vectors, num_sums), ..none }
    }

    /// Returns the number of values of all arrays of a sum of `rows` rows.
    pub fn sums_len(self, rows: usize) -> usize {
        rows.saturating_mul(self.row_len()).saturating_mul(self.num_sums)
    }

    /// Returns true if the exchange works in place.
    pub fn is_in_place(self) -> bool {
        matches!(self.kind, ExchangeKind::SumGradient | ExchangeKind::SumValues)
    }
}

/// The most values in a message of each kind of exchange of a rank.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct MessageLengths {
    /// Between layers, in the arrays of the layers.
    pub in_place: usize,
    /// Between layers, in memory for messages.
    pub gathered: usize,
    /// Of sums of the gradients of parameters over positions.
    pub position_sums: usize,
    /// Of statistics of logits.
    pub statistics: usize,
    /// Of the sums of exponentials of logits.
    pub exponentials: usize,
}

impl MessageLengths {
    /// Returns the longer of the messages of each kind.
    pub fn max(self, other: MessageLengths) -> MessageLengths {
        MessageLengths {
            in_place: self.in_place.max(other.in_place),
            gathered: self.gathered.max(other.gathered),
            position_sums: self.position_sums.max(other.position_sums),
            statistics: self.statistics.max(other.statistics),
            exponentials: self.exponentials.max(other.exponentials),
        }
    }

    /// Returns the number of values in the memory for messages.
    pub fn allocated(self) -> usize {
        let MessageLengths { gathered, position_sums, statistics, exponentials, .. } = self;
        [gathered, position_sums, statistics, exponentials].into_iter().fold(0, usize::saturating_add)
    }

    /// Returns the most values that are on their way to a rank at a time.
    pub fn longest(self) -> usize {
        // a sum over positions is under way beside another exchange
        let between = self.in_place.max(self.gathered).saturating_add(self.position_sums);
        between.max(self.statistics).max(self.exponentials)
    }
}
