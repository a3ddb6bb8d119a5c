//! [`Auditor`], the state of a rank's audits.

use std::ops::Range;

use super::replay::Replay;
use super::roles::Roles;
use super::settings::{AuditAction, AuditSettings};
use super::update;
use crate::comm::{Communicator, Grid};
use crate::device::{Device, Role};
use crate::nn::{FlatBuffer, Model, Segmentation, TensorPosition};
use crate::parallel::batch::{BatchDivision, Summation};
use crate::parallel::data::{StatePlan, SyncSettings};
use crate::parallel::layout::{Layout, ParallelPlan};
use crate::parallel::stage::Stage;
use crate::parallel::tensor::exchange::Exchanger;
use crate::parallel::watch::{Fault, FoldRecord, parts_of_leaf};
use crate::sums::Section;
use crate::{Error, Result};

/// The tensors of a part of the model, and their segments.
pub(super) struct Part {
    pub(super) layout: Layout,
    pub(super) segmentation: Segmentation,
    /// The padded length of each segment.
    pub(super) lengths: Vec<usize>,
}

impl Part {
    fn new(
        model: &Model,
        grid: &Grid,
        plan: &ParallelPlan,
        sync: SyncSettings,
        division: BatchDivision,
        rank: usize,
    ) -> Result<Part> {
        let layout = Layout::new(model, grid.shape, rank, plan)?;
        let StatePlan { segmentation, lengths, .. } = StatePlan::new(&layout, sync, division);
        Ok(Part { layout, segmentation, lengths })
    }

    /// Returns the number in the model of the tensor at element `at` of a segment.
    pub(super) fn tensor_at(&self, segment: usize, at: usize) -> usize {
        let positions = self.segmentation.positions(&self.layout.shards());
        let is_before = |position: &TensorPosition| position.segment == segment && position.range.start <= at;
        let local = positions.iter().rposition(is_before).unwrap_or_default();
        self.layout.tensors.get(local).map_or(0, |(number, _)| *number)
    }

    pub(super) fn numbers(&self) -> Vec<usize> {
        self.layout.tensors.iter().map(|(number, _)| *number).collect()
    }
}

/// The state of an audited step.
pub(super) struct OpenAudit {
    /// The checksums of the repeated leaf.
    pub(super) expected: FoldRecord,
    /// Those of this rank's parameters.
    pub(super) parameters: FoldRecord,
    /// The block of the part before the update.
    pub(super) before: Vec<f32>,
    /// The number of rows of the batch, and the factor of the loss's gradient.
    pub(super) batch: (usize, f32),
}

/// The audits of a rank.
pub struct Auditor<'a, D: Device> {
    pub(super) device: &'a D,
    pub(super) grid: &'a Grid,
    pub(super) model: &'a Model,
    pub(super) plan: ParallelPlan,
    pub(super) settings: AuditSettings,
    pub(super) division: BatchDivision,
    pub(super) roles: Roles,
    pub(super) channel: Communicator,
    pub(super) replay: Replay<'a, D>,
    pub(super) own: Part,
    pub(super) played: Part,
    /// The parameters of the part, if they are not this rank's; or those of before the step, if this
    /// rank may be asked what they give.
    pub(super) copy: Option<FlatBuffer<D>>,
    /// The number of audits so far.
    pub(super) number: u64,
    pub(super) open: Option<OpenAudit>,
}

impl<'a, D: Device> Auditor<'a, D> {
    /// Prepares to audit the steps of `model`, spread over `grid` as `plan` says, with batches of at most
    /// `batch_size` samples; `in_parts` is true if replicas keep parts of their parameters only.
    /// Collective.
    ///
    /// # Errors
    /// Sums have no canonical order, or the device does not have enough memory: the same error on every
    /// rank.
    #[allow(clippy::too_many_arguments)] // the parts of a trainer
    pub fn new(
        device: &'a D,
        grid: &'a Grid,
        model: &'a Model,
        plan: &ParallelPlan,
        sync: SyncSettings,
        in_parts: bool,
        batch_size: usize,
        settings: AuditSettings,
    ) -> Result<Auditor<'a, D>> {
        let (shape, rank) = (grid.shape, grid.all.rank());
        let division = sync.division(plan, shape.data);
        let roles = Roles::new(shape, |rank| grid.all.node_of(rank));
        let role = roles.role_of(rank);
        let channel = grid.all.duplicate();
        let tensor = if roles.move_along_tensor_axis() {
            grid.tensor.split(0, shape.coordinates(role).2)?
        } else {
            grid.tensor.duplicate()
        };
        let stages = grid.stage.duplicate();
        let allocate = || {
            if plan.summation == Summation::ByLayout {
                return Err(Error::input("--audit", "bits that depend on the layout cannot be compared"));
            }
            let own = Part::new(model, grid, plan, sync, division, rank)?;
            let played = Part::new(model, grid, plan, sync, division, role)?;
            let leaves: Vec<Vec<Section>> =
                (0..shape.data).map(|replica| parts(division, batch_size, replica)).collect();
            let rows = leaves.iter().flatten().map(|part| part.len()).max().unwrap_or_default();
            let num_parts = leaves.iter().map(Vec::len).max().unwrap_or_default();
            let widest = played.layout.stages.iter().map(Stage::widest_exchange).max().unwrap_or_default();
            let exchanger = match tensor.size() {
                1 => Exchanger::alone(device),
                _ => Exchanger::new(device, &tensor, played.layout.features, rows, widest)?,
            };
            let player = |stage: usize| {
                let owner = plan.schedule.rank_of(stage).unwrap_or_default();
                shape
                    .coordinates(roles.auditor_of(shape.rank(
                        shape.coordinates(role).0,
                        owner,
                        shape.coordinates(role).2,
                    )))
                    .1
            };
            let players = (0..plan.schedule.num_stages).map(player).collect();
            let Part { layout, segmentation, .. } = &played;
            let replay = Replay::new(exchanger, stages, players, layout, segmentation, num_parts, rows)?;
            let has_other_parameters = !roles.are_replicas() && !roles.are_own();
            let is_witness = roles.third(rank).is_some() && !in_parts;
            let copy = (has_other_parameters || is_witness).then(|| {
                FlatBuffer::zeros(device, &played.layout.shards(), &played.segmentation, Role::Parameters)
            });
            Ok((own, played, replay, copy.transpose()?))
        };
        let (own, played, replay, copy) = grid.all.agree(allocate())?;
        let (plan, open) = (plan.clone(), None);
        Ok(Auditor {
            device,
            grid,
            model,
            plan,
            settings,
            division,
            roles,
            channel,
            replay,
            own,
            played,
            copy,
            number: 0,
            open,
        })
    }

    /// Returns the consequence of a fault.
    pub fn action(&self) -> AuditAction {
        self.settings.action
    }

    /// Sets the fault to try audits out with.
    pub fn inject(&mut self, fault: Option<Fault>) {
        self.settings.fault = fault;
    }

    /// Returns true if `step`, from 1, is audited.
    pub fn is_due(&self, step: u64) -> bool {
        self.settings.every > 0 && step.is_multiple_of(self.settings.every)
    }

    pub(super) fn rank(&self) -> usize {
        self.grid.all.rank()
    }

    pub(super) fn role(&self) -> usize {
        self.roles.role_of(self.rank())
    }

    pub(super) fn replica_of(&self, rank: usize) -> usize {
        self.grid.shape.coordinates(rank).0
    }

    /// Returns the segment and the block of a part that this audit looks at.
    pub(super) fn block(&self, part: &Part, replica: usize) -> (usize, Range<usize>) {
        update::block(self.number, &part.lengths, replica, self.grid.shape.data)
    }
}

/// Returns the parts of the leaf with which the sums of `replica` begin in a batch of `len` rows.
pub(super) fn parts(division: BatchDivision, len: usize, replica: usize) -> Vec<Section> {
    let sections = (0..division.num_micro_batches()).map(|number| division.section(len, replica, number));
    parts_of_leaf(sections)
}
