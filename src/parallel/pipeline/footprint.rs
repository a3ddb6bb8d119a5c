//! The memory that a rank needs to train, computed before anything is allocated: pure logic.
//!
//! A test holds every term to the allocations of a trainer, but for messages and joined gradients, whose
//! memory depends on how many are under way.

use super::program::RankProgram;
use super::stage_arrays::StageArrays;
use crate::comm::GridShape;
use crate::parallel::data::{StatePlan, SyncSettings};
use crate::parallel::layout::{Layout, ParallelPlan};
use crate::parallel::stage::Stage;
use crate::parallel::zero::{Gathering, ZeroStage};

/// The memory of a rank, in bytes, for values of 4 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Footprint {
    /// The parameters, or this rank's part and the gathered segments.
    pub parameters: usize,
    /// The gradients, or the open segments and this rank's part.
    pub gradients: usize,
    /// The optimizer's slots.
    pub slots: usize,
    /// The activations and their gradients, of all micro-batches under way.
    pub activations: usize,
    /// Of these, the activations of one micro-batch.
    pub micro_batch: usize,
    /// The values on their way from other ranks, but for the gradients of `shared`.
    pub messages: usize,
    /// The gradients of tensors that another rank uses too, on their way to it and from it.
    pub shared: usize,
    /// The inputs and gradients of micro-batches side by side, whose gradients of weights are one product.
    pub joined: usize,
}

/// The settings of a run on which its memory depends.
#[derive(Debug, Clone, Copy)]
pub struct FootprintSettings {
    /// The shape of the grid.
    pub shape: GridShape,
    /// This rank's number on the stage axis.
    pub stage_rank: usize,
    /// The largest global batch, in samples.
    pub batch_size: usize,
    /// The settings of the reduction of gradients.
    pub sync: SyncSettings,
    /// The number of values that the optimizer keeps for each parameter.
    pub num_slots: usize,
    /// The time for which gathered parameters are kept in stage 3.
    pub gathering: Gathering,
}

/// The most values of a reduction that are on their way to a rank at a time: two chunks of each of
/// two buckets.
const MOST_ON_THE_WAY: usize = 4 * (2 << 20) / size_of::<f32>();

impl Footprint {
    /// Returns the memory of the rank with `layout`, which `plan` made.
    pub fn new(layout: &Layout, plan: &ParallelPlan, settings: &FootprintSettings) -> Footprint {
        let FootprintSettings { shape, stage_rank, batch_size, sync, num_slots, gathering } = *settings;
        let division = sync.division(plan, shape.data);
        let StatePlan { stage, lengths, updated, num_shared, usage, .. } =
            StatePlan::new(layout, sync, division);
        let sum = |lengths: &[usize]| lengths.iter().copied().fold(0, usize::saturating_add);
        let (total, longest) = (sum(&lengths), lengths.iter().copied().max().unwrap_or(0));
        let part = total / shape.data;
        let parameters = match stage {
            ZeroStage::Parameters => part.saturating_add(sum(&gathering.buffers(&lengths))),
            _ => total,
        };
        let gradients = if usage.is_pooled() {
            let kept = if usage.keeps_parts() { part.saturating_mul(division.num_sums_kept()) } else { 0 };
            let open = usage.num_open(lengths.len()).saturating_mul(longest);
            open.saturating_mul(division.num_arrays()).saturating_add(kept)
        } else {
            total.saturating_mul(division.num_arrays())
        };
        let slots = num_slots.saturating_mul(sum(&updated));
        let rows = division.most_rows(batch_size);
        let (activations, micro_batch) = activations(layout, plan, stage_rank, rows);
        let num_joined = RankProgram::new(&plan.schedule, stage_rank).most_joined();
        let width = layout.stages.iter().map(Stage::widest_product).max().unwrap_or_default();
        let is_joined = num_joined > 1 && !division.reduces_each();
        let joined = if is_joined { num_joined.saturating_mul(rows).saturating_mul(width) } else { 0 };
        let messages = layout.longest_messages(rows);
        let exchange =
            if shape.tensor > 1 { messages.allocated().saturating_add(messages.longest()) } else { 0 };
        let num_sums = division.num_sums_reduced();
        let reduction =
            if shape.data > 1 { longest.min(MOST_ON_THE_WAY).saturating_mul(num_sums) } else { 0 };
        let bytes = |values: usize| values.saturating_mul(size_of::<f32>());
        Footprint {
            parameters: bytes(parameters),
            gradients: bytes(gradients),
            slots: bytes(slots),
            activations: bytes(activations),
            micro_batch: bytes(micro_batch),
            messages: bytes(exchange.saturating_add(reduction)),
            shared: bytes(num_shared.saturating_mul(2)),
            joined: bytes(joined),
        }
    }

    /// Returns the sum.
    pub fn total(&self) -> usize {
        let Footprint { parameters, gradients, slots, activations, messages, shared, joined, .. } = *self;
        [parameters, gradients, slots, activations, messages, shared, joined]
            .into_iter()
            .fold(0, usize::saturating_add)
    }
}

/// Returns the numbers of values of all activations and gradients of a rank, and of the activations
/// of one micro-batch, of at most `rows` rows.
fn activations(layout: &Layout, plan: &ParallelPlan, stage_rank: usize, rows: usize) -> (usize, usize) {
    let training = RankProgram::new(&plan.schedule, stage_rank);
    let evaluation = RankProgram::new(&plan.schedule.forward_only(), stage_rank);
    let (mut all, mut one) = (0_usize, 0_usize);
    for (local, stage) in layout.stages.iter().enumerate() {
        let programs = [&training, &evaluation];
        let StageArrays { num_slots, num_sets, num_inner, groups } =
            StageArrays::new(stage, local, programs, &plan.schedule, plan.recompute);
        let widths = stage.row_widths(&groups);
        let slot = if num_inner > 0 { widths.kept } else { widths.kept + widths.inner() };
        let values = num_slots
            .saturating_mul(slot)
            .saturating_add(num_inner.saturating_mul(widths.inner()))
            .saturating_add(num_sets.saturating_mul(widths.gradients));
        all = rows.saturating_mul(values).saturating_add(all);
        one = rows.saturating_mul(slot).saturating_add(one);
    }
    (all, one)
}
