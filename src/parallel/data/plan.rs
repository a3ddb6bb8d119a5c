//! The segments of a rank's state, and what each replica keeps of them: pure logic.

use std::ops::Range;

use super::settings::SyncSettings;
use crate::nn::{Segmentation, TensorShard};
use crate::parallel::batch::BatchDivision;
use crate::parallel::bucket::buckets;
use crate::parallel::layout::{Layout, TieEnd};
use crate::parallel::zero::{GradientUse, ZeroStage};

/// Below this many parameters per rank the latency of a message outweighs its bytes, and one
/// operation is faster than two with the update in between.
const SMALL_PART: usize = 1 << 16;

/// Shards begin on a cache line.
const SHARD_MULTIPLE: usize = 32;

/// The plan of a rank's state.
#[derive(Debug, Clone)]
pub struct StatePlan {
    /// The stage of ZeRO; [`ZeroStage::None`] if there is one replica.
    pub stage: ZeroStage,
    /// The tensors of each segment.
    pub segmentation: Segmentation,
    /// The padded length of each segment.
    pub lengths: Vec<usize>,
    /// The memory that gradients need.
    pub usage: GradientUse,
}

impl StatePlan {
    /// Plans the state of the tensors of `layout`, which the replicas of `division` share.
    pub fn new(layout: &Layout, sync: SyncSettings, division: BatchDivision) -> StatePlan {
        let num_replicas = division.num_replicas();
        let shards = layout.shards();
        let num_elements = shards.iter().map(TensorShard::num_elements).fold(0, usize::saturating_add);
        let is_small = num_elements / num_replicas < SMALL_PART;
        // two ranks that share a tensor exchange its gradient, so both keep the same part of it
        let shares_tensor = layout.ties.iter().any(|tie| matches!(tie.other, TieEnd::Peer(_)));
        let fastest = if is_small && !shares_tensor { ZeroStage::None } else { ZeroStage::Slots };
        let stage = if num_replicas == 1 { ZeroStage::None } else { sync.zero.unwrap_or(fastest) };
        let segments = segments(layout, sync.bucket_bytes / size_of::<f32>());
        let segmentation = Segmentation { segments, multiple: num_replicas * SHARD_MULTIPLE };
        let lengths = segmentation.segment_lengths(&shards);
        let usage =
            GradientUse { stage, division, waits: sync.clip_norm.is_some() || !layout.ties.is_empty() };
        StatePlan { stage, segmentation, lengths, usage }
    }
}

/// Cuts the tensors of `layout` into buckets of at most `most` elements. A layer is never cut, nor
/// do layers of two stages share a bucket, nor does one with a tied tensor share any.
fn segments(layout: &Layout, most: usize) -> Vec<Range<usize>> {
    let mut segments = Vec::new();
    for stage in &layout.stages {
        let layers: Vec<Range<usize>> =
            (0..stage.num_pieces()).map(|at| stage.tensors_of(at)).filter(|own| !own.is_empty()).collect();
        let len =
            |own: &Range<usize>| layout.tensors[own.clone()].iter().map(|(_, s)| s.num_elements()).sum();
        let is_tied = |own: &Range<usize>| layout.is_tied(own);
        for layers in layers.chunk_by(|one, next| !is_tied(one) && !is_tied(next)) {
            let lengths: Vec<usize> = layers.iter().map(len).collect();
            for bucket in buckets(&lengths, most) {
                segments.push(layers[bucket.start].start..layers[bucket.end - 1].end);
            }
        }
    }
    let num_tensors: usize = segments.iter().map(ExactSizeIterator::len).sum();
    assert_eq!(num_tensors, layout.tensors.len(), "every tensor belongs to a layer");
    segments
}
