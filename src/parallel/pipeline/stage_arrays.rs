//! The numbers of arrays that a rank needs for each of its stages: pure logic.

use super::program::RankProgram;
use crate::parallel::schedule::Schedule;
use crate::parallel::stage::{PieceGroup, Stage};

/// The arrays of a stage of a rank.
#[derive(Debug, Clone)]
pub(super) struct StageArrays {
    /// The number of micro-batches whose activations are kept.
    pub(super) num_slots: usize,
    /// The number of micro-batches that have gradients.
    pub(super) num_sets: usize,
    /// With recomputation, the number of micro-batches that have the arrays of a group.
    pub(super) num_inner: usize,
    /// The groups of pieces that are computed again together; all of them without recomputation.
    pub(super) groups: Vec<PieceGroup>,
}

impl StageArrays {
    /// Returns the arrays of `stage`, number `local` of a rank that runs `training` and
    /// `evaluation`, which are programs of `schedule`. With `recompute` the pieces are computed again
    /// in groups; in one group if gradients of weights are computed in passes of their own, because
    /// they need the activations until then.
    pub(super) fn new(
        stage: &Stage,
        local: usize,
        [training, evaluation]: [&RankProgram; 2],
        schedule: &Schedule,
        recompute: bool,
    ) -> StageArrays {
        let num_slots = training.num_slots[local].max(evaluation.num_slots[local]);
        let num_sets = training.num_sets[local].max(1);
        let num_inner = if recompute { num_sets + 1 } else { 0 };
        let groups = match recompute && !schedule.splits_passes() {
            true => stage.smallest_groups(num_slots, num_inner),
            false => stage.one_group(),
        };
        StageArrays { num_slots, num_sets, num_inner, groups }
    }
}
