//! The segments of a rank's state, and what each replica keeps of them: pure logic.

use std::ops::Range;

use super::settings::SyncSettings;
use crate::nn::Segmentation;
use crate::parallel::batch::BatchDivision;
use crate::parallel::bucket::buckets;
use crate::parallel::layout::{Layout, TieEnd};
use crate::parallel::zero::{GradientUse, ZeroStage};

/// Below this many parameters per rank, on average, the latency of a message outweighs its bytes, and one
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
    /// The number of elements of each segment that this rank updates.
    pub updated: Vec<usize>,
    /// The number of elements whose gradients this rank exchanges with others that use the same tensors.
    pub num_shared: usize,
    /// The memory that gradients need.
    pub usage: GradientUse,
}

impl StatePlan {
    /// Plans the state of the tensors of `layout`, which the replicas of `division` share.
    pub fn new(layout: &Layout, sync: SyncSettings, division: BatchDivision) -> StatePlan {
        let num_replicas = division.num_replicas();
        let shards = layout.shards();
        let is_small = layout.mean_parameters / num_replicas < SMALL_PART;
        let fastest = if is_small { ZeroStage::None } else { ZeroStage::Slots };
        let stage = if num_replicas == 1 { ZeroStage::None } else { sync.zero.unwrap_or(fastest) };
        let segments = segments(layout, sync.bucket_bytes / size_of::<f32>());
        let segmentation = Segmentation { segments, multiple: num_replicas * SHARD_MULTIPLE };
        let lengths = segmentation.segment_lengths(&shards);
        let owned = |len: &usize| if stage == ZeroStage::None { *len } else { len / num_replicas };
        let updated: Vec<usize> = lengths.iter().map(owned).collect();
        let positions = segmentation.positions(&shards);
        let shared = layout.ties.iter().filter(|tie| matches!(tie.other, TieEnd::Peer(_)));
        let num_shared = shared.map(|tie| updated[positions[tie.tensor].segment]).sum();
        let usage =
            GradientUse { stage, division, waits: sync.clip_norm.is_some() || !layout.ties.is_empty() };
        StatePlan { stage, segmentation, lengths, updated, num_shared, usage }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::GridShape;
    use crate::nn::{Features, GptSizes, Network};
    use crate::parallel::layout::ParallelPlan;
    use crate::parallel::schedule::PipelineScheduleKind;
    use crate::parallel::zero::Accumulation;

    #[test]
    fn all_ranks_choose_one_stage_of_zero() {
        let network = Network::gpt(GptSizes { layers: 6, heads: 1, width: 16, bias: true, dropout: 0.0 });
        let shape = GridShape { data: 2, stage: 3, tensor: 1 };
        let sync = SyncSettings {
            bucket_bytes: 1 << 20,
            zero: None,
            accumulation: Accumulation::Whole,
            overlap: true,
            clip_norm: None,
        };
        // the first and the last stage have the table of tokens, that between them has little
        let chosen = [100, 10_000, 100_000].map(|vocabulary| {
            let model = network.build(Features::Tokens { len: 4, vocabulary }).unwrap();
            let schedule = PipelineScheduleKind::GPipe.generate(3, 3, 2).unwrap();
            let plan = ParallelPlan::pipeline(&model, schedule, None).unwrap();
            let stages = [0, 1, 2].map(|rank| {
                let layout = Layout::new(&model, shape, rank, &plan).unwrap();
                StatePlan::new(&layout, sync, sync.division(&plan, shape.data)).stage
            });
            assert_eq!([stages[0]; 3], stages, "{vocabulary} tokens");
            stages[0]
        });
        assert_eq!(chosen, [ZeroStage::None, ZeroStage::None, ZeroStage::Slots]);
    }
}
