//! The order of a canonical sum: its terms are cut into leaves at fixed places. A leaf is one chain
//! of fused multiply-adds in the order of its terms, from +0. The leaves are added by one binary
//! tree over all of them, whose inner nodes cover `j·2ᵗ..(j + 1)·2ᵗ`, cut off at the last leaf. A
//! node's value depends on its terms alone, so a rank that holds whole leaves computes whole nodes.
//!
//! A tree is added up with a stack, as a binary counter counts: [`Leaves::num_merges`] says how
//! many values on top of the stack a new leaf completes.

use std::ops::Range;

use phalanx::comm::shard;

/// The largest number of leaves.
pub const MOST_LEAVES: usize = 8;

/// The largest number of values on the stack that adds up a tree of [`MOST_LEAVES`].
pub const MOST_PENDING: usize = MOST_LEAVES.ilog2() as usize;

/// A sum of `len` terms, cut into `num` leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Leaves {
    /// The number of terms.
    pub len: usize,
    /// The number of leaves, at least 1.
    pub num: usize,
}

impl Leaves {
    /// Returns the terms of a leaf. Lengths differ by at most 1, with the longer leaves first.
    pub fn terms(self, leaf: usize) -> Range<usize> {
        shard(self.len, leaf, self.num)
    }

    /// Returns the number of values on top of the stack that are added to the value of `leaf`, one
    /// after the other, where the leaves before it were pushed in order.
    #[inline(always)]
    pub fn num_merges(self, leaf: usize) -> usize {
        let merges = if leaf + 1 == self.num { leaf.count_ones() } else { leaf.trailing_ones() };
        merges as usize
    }

    /// Returns the sum of the products of the factors of each term, by plain loops.
    pub fn sum(self, factors: impl Fn(usize) -> (f32, f32)) -> f32 {
        let chain = |sum: f32, (left, right): (f32, f32)| left.mul_add(right, sum);
        let value = |leaf| self.terms(leaf).map(&factors).fold(0.0, chain);
        let mut nodes: Vec<f32> = (0..self.num).map(value).collect();
        while nodes.len() > 1 {
            nodes = nodes
                .chunks(2)
                .map(|pair| pair.iter().copied().reduce(|a, b| a + b).unwrap_or(0.0))
                .collect();
        }
        nodes[0]
    }
}
