//! [`AuditedJob`], the job that is audited, and its parts.

use super::replay::Replay;
use super::roles::{Roles, keeps_copy};
use crate::Result;
use crate::comm::{Communicator, Grid, GridShape};
use crate::device::{Device, Role};
use crate::nn::{FlatBuffer, Model, Segmentation, TensorPosition};
use crate::parallel::batch::BatchDivision;
use crate::parallel::data::{StatePlan, SyncSettings, UpdateRuns, Weights};
use crate::parallel::layout::{Layout, ParallelPlan};
use crate::parallel::tensor::exchange::Exchanger;
use crate::parallel::watch::parts_of_leaf;
use crate::sums::Section;

/// The job that is audited.
pub(super) struct AuditedJob<'a, D: Device> {
    pub(super) device: &'a D,
    pub(super) grid: &'a Grid,
    pub(super) model: &'a Model,
    pub(super) plan: ParallelPlan,
    pub(super) sync: SyncSettings,
    pub(super) division: BatchDivision,
    /// The most samples of a batch.
    pub(super) batch_size: usize,
}

/// The stages and tensors of a rank, and their segments.
pub(super) struct Part {
    pub(super) layout: Layout,
    segmentation: Segmentation,
    /// The padded length of each segment.
    pub(super) lengths: Vec<usize>,
    /// The segments whose tensors one layer uses each: gradients of others are sums of two.
    pub(super) untied: Vec<usize>,
    rank: usize,
}

impl Part {
    /// Returns the number in the model of the tensor at element `at` of a segment.
    pub(super) fn tensor_at(&self, segment: usize, at: usize) -> usize {
        let positions = self.segmentation.positions(&self.layout.shards());
        let is_before = |position: &TensorPosition| position.segment == segment && position.range.start <= at;
        let local = positions.iter().rposition(is_before).unwrap_or_default();
        self.layout.tensors.get(local).map_or(0, |(number, _)| *number)
    }

    /// Returns the number in the model of each tensor.
    pub(super) fn numbers(&self) -> Vec<usize> {
        self.layout.tensors.iter().map(|(number, _)| *number).collect()
    }

    /// Returns the runs of the update of these tensors.
    pub(super) fn update_runs<D: Device>(&self, weights: &Weights<D>) -> UpdateRuns {
        weights.update_runs(&self.layout.shards(), &self.segmentation)
    }

    /// Allocates memory for the parameters.
    pub(super) fn parameters<D: Device>(&self, device: &D) -> Result<FlatBuffer<D>> {
        FlatBuffer::zeros(device, &self.layout.shards(), &self.segmentation, Role::Parameters)
    }
}

impl<'a, D: Device> AuditedJob<'a, D> {
    /// Returns the part of `rank`. Not collective.
    ///
    /// # Errors
    /// The plan does not fit the grid.
    pub(super) fn part(&self, rank: usize) -> Result<Part> {
        let layout = Layout::new(self.model, self.grid.shape, rank, &self.plan)?;
        let StatePlan { segmentation, lengths, .. } = StatePlan::new(&layout, self.sync, self.division);
        let is_untied = |segment: &usize| !layout.is_tied(&segmentation.segments[*segment]);
        let untied = (0..lengths.len()).filter(is_untied).collect();
        Ok(Part { layout, segmentation, lengths, untied, rank })
    }

    /// Returns the parts of the leaf with which the sums of `replica` begin in a batch of `len` rows.
    pub(super) fn leaf(&self, len: usize, replica: usize) -> Vec<Section> {
        leaf(self.division, len, replica)
    }

    /// Prepares to repeat a leaf in the part `played`, as one of `roles`; `tensors` are the ranks with
    /// which its layers are divided. Not collective.
    ///
    /// # Errors
    /// The device does not have enough memory.
    pub(super) fn replay(
        &self,
        roles: Roles,
        played: &Part,
        stages: Communicator,
        tensors: &Communicator,
    ) -> Result<Replay<'a, D>> {
        let shape = self.grid.shape;
        let (num_parts, rows) = largest_leaf(self.division, self.batch_size);
        let Part { layout, segmentation, rank, .. } = played;
        let exchanger = match tensors.size() {
            1 => Exchanger::alone(self.device),
            _ => Exchanger::new(self.device, tensors, layout.features, layout.longest_messages(rows))?,
        };
        let (data, _, tensor) = shape.coordinates(*rank);
        let player = |owner: Option<usize>| {
            let owner = shape.rank(data, owner.unwrap_or_default(), tensor);
            shape.coordinates(roles.auditor_of(owner)).1
        };
        let players = self.plan.schedule.owners().into_iter().map(player).collect();
        Replay::new(exchanger, stages, players, layout, segmentation, num_parts, rows)
    }
}

/// Returns the parts of the leaf with which the sums of `replica` begin in a batch of `len` rows.
fn leaf(division: BatchDivision, len: usize, replica: usize) -> Vec<Section> {
    parts_of_leaf(division.sections(len, replica))
}

/// Returns the most parts of a leaf, and the most rows of one, in batches of up to `batch_size` rows.
fn largest_leaf(division: BatchDivision, batch_size: usize) -> (usize, usize) {
    let of_replicas =
        |len: usize| (0..division.num_replicas()).map(move |replica| leaf(division, len, replica));
    let leaves: Vec<Vec<Section>> = division.lengths(batch_size).flat_map(of_replicas).collect();
    let rows = leaves.iter().flatten().map(|part| part.len()).max().unwrap_or_default();
    (leaves.iter().map(Vec::len).max().unwrap_or_default(), rows)
}

/// Returns the bytes that audits take on the rank that plays the largest part of `model`, which is spread
/// over a grid of `shape` as `plan` says: the arrays of a leaf, the gradients of the longest bucket, and
/// perhaps a copy of the parameters. Once a fault has been found, the search for the rank that is at fault
/// may take as much again. Not collective.
///
/// # Errors
/// The plan does not fit the model or the grid.
pub fn needed_bytes(
    model: &Model,
    plan: &ParallelPlan,
    shape: GridShape,
    sync: SyncSettings,
    batch_size: usize,
) -> Result<usize> {
    plan.schedule.check()?;
    let of_rank = |rank| {
        let layout = Layout::of_sound_plan(model, shape, rank, plan)?;
        Ok(bytes_of_part(&layout, plan, shape, sync, batch_size))
    };
    (0..shape.stage * shape.tensor).map(of_rank).try_fold(0, |most, bytes| Ok(bytes?.max(most)))
}

/// Returns the bytes of audits on a rank that plays the part of one with `layout`.
fn bytes_of_part(
    layout: &Layout,
    plan: &ParallelPlan,
    shape: GridShape,
    sync: SyncSettings,
    batch_size: usize,
) -> usize {
    let division = sync.division(plan, shape.data);
    let (num_parts, rows) = largest_leaf(division, batch_size);
    let StatePlan { lengths, stage, .. } = StatePlan::new(layout, sync, division);
    let width: usize = layout
        .stages
        .iter()
        .map(|stage| {
            let widths = stage.row_widths(&stage.one_group());
            widths.kept + widths.inner() + widths.gradients
        })
        .sum();
    let exchange = if shape.tensor > 1 { layout.longest_messages(rows).allocated() } else { 0 };
    let is_copied = keeps_copy(shape, stage.divides_parameters());
    let copy = if is_copied { lengths.iter().fold(0, |sum: usize, len| sum.saturating_add(*len)) } else { 0 };
    let values = num_parts.saturating_mul(rows).saturating_mul(width);
    let longest = lengths.iter().copied().max().unwrap_or_default();
    [values, longest, exchange, copy]
        .into_iter()
        .fold(0, usize::saturating_add)
        .saturating_mul(size_of::<f32>())
}
