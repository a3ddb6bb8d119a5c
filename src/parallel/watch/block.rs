//! [`BlockWatch`], the block of a segment whose update an audit repeats.

use std::ops::Range;

use super::fault::FaultKind;

/// A block of every replica's part of one segment, and this rank's terms of the sums in them.
#[derive(Debug, Default)]
pub struct BlockWatch {
    /// The segment.
    pub segment: usize,
    /// The block that each replica owns, as elements of the segment.
    pub blocks: Vec<Range<usize>>,
    /// For each reduction its micro-batch and, for each block, this rank's arrays before it.
    pub terms: Vec<(usize, Vec<Vec<f32>>)>,
    /// The sums over the replicas in this rank's block: after each reduction, and before the update.
    pub sums: Vec<f32>,
    /// The bit that is flipped, and the number that chooses it.
    pub fault: Option<(FaultKind, u64)>,
}
