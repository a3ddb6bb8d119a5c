//! [`Auditor`], the state of a rank's audits.

use std::ops::Range;

use super::job::{AuditedJob, Part};
use super::replay::{AuditedBatch, Replay};
use super::roles::{Roles, keeps_copy};
use super::settings::{AuditAction, AuditSettings};
use super::update;
use crate::comm::{Communicator, Grid};
use crate::device::Device;
use crate::nn::{FlatBuffer, Model};
use crate::parallel::batch::Summation;
use crate::parallel::data::SyncSettings;
use crate::parallel::layout::ParallelPlan;
use crate::parallel::watch::{Fault, FoldRecord};
use crate::sums::MOST_LEAVES;
use crate::{Error, Result};

/// The state of an audited step.
pub(super) struct OpenAudit {
    /// The checksums of the repeated leaf.
    pub(super) expected: FoldRecord,
    /// Those of this rank's parameters.
    pub(super) parameters: FoldRecord,
    /// The block of the part before the update.
    pub(super) before: Vec<f32>,
    pub(super) batch: AuditedBatch,
    /// The number that chooses the bit to flip in what this rank receives of the update.
    pub(super) received_fault: Option<u64>,
}

/// The communicators of the audits.
pub(super) struct AuditChannels {
    pub(super) all: Communicator,
    pub(super) stages: Communicator,
    pub(super) tensors: Communicator,
    /// The parts that ranks play besides their first, and the ranks that share layers there.
    pub(super) others: Option<(Roles, Communicator)>,
}

/// The audits of a rank.
pub struct Auditor<'a, D: Device> {
    pub(super) job: AuditedJob<'a, D>,
    pub(super) settings: AuditSettings,
    pub(super) roles: Roles,
    pub(super) channels: AuditChannels,
    pub(super) replay: Replay<'a, D>,
    pub(super) own: Part,
    pub(super) played: Part,
    /// The parameters of the part, if they are not this rank's; or those of before the step, if this
    /// rank may be asked what they give.
    pub(super) copy: Option<FlatBuffer<D>>,
    /// The last step whose audit found no fault.
    pub(super) last_clean: Option<u64>,
    pub(super) open: Option<OpenAudit>,
}

impl<'a, D: Device> Auditor<'a, D> {
    /// Prepares to audit the steps of `model`, spread over `grid` as `plan` says, with batches of at most
    /// `batch_size` samples; `in_parts` is true if replicas keep parts of their parameters only.
    /// Collective.
    ///
    /// # Errors
    /// Sums have no canonical order, the plan does not keep the gradients of values, or the device does not
    /// have enough memory: the same error on every rank.
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
        let tensors = grid.tensor.duplicate();
        let others = roles.another().map(|others| Ok((others, others.tensors(grid, &tensors)?)));
        let channels = AuditChannels {
            all: grid.all.duplicate(),
            stages: grid.stage.duplicate(),
            tensors,
            others: others.transpose()?,
        };
        let job = AuditedJob { device, grid, model, plan: plan.clone(), sync, division, batch_size };
        let tensors = roles.tensors(grid, &channels.tensors)?;
        let allocate = || {
            if plan.summation == Summation::ByLayout {
                let why = format!(
                    "the ranks' sums have no common order, so their bits cannot be compared; audits need \
                     --device cpu, and --leaves {MOST_LEAVES} where an axis has more ranks than that"
                );
                return Err(Error::input("--audit", why));
            }
            if !plan.keeps_all_gradients() {
                let why = "gradients of values share memory in this plan, but audits compare all of them";
                return Err(Error::input("--audit", why));
            }
            let (own, played) = (job.part(rank)?, job.part(roles.role_of(rank))?);
            let replay = job.replay(roles, &played, channels.stages.clone(), &tensors)?;
            let is_copied = keeps_copy(grid.shape, in_parts);
            let copy = is_copied.then(|| played.parameters(device)).transpose()?;
            Ok((own, played, replay, copy))
        };
        let (own, played, replay, copy) = grid.all.agree(allocate())?;
        Ok(Auditor {
            job,
            settings,
            roles,
            channels,
            replay,
            own,
            played,
            copy,
            last_clean: None,
            open: None,
        })
    }

    /// Returns the audits in words.
    pub fn words(&self) -> String {
        let when = match self.settings.every {
            1 => "in every step".to_owned(),
            every => format!("every {every} steps"),
        };
        format!("{when}, each rank repeats {}", self.roles.words())
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
        self.job.grid.all.rank()
    }

    pub(super) fn role(&self) -> usize {
        self.roles.role_of(self.rank())
    }

    pub(super) fn replica_of(&self, rank: usize) -> usize {
        self.job.grid.shape.coordinates(rank).0
    }

    /// Returns the segment and the block of a part of `replica` that the audit of `step` looks at.
    pub(super) fn block(&self, step: u64, part: &Part, replica: usize) -> (usize, Range<usize>) {
        let number = step / self.settings.every;
        update::block(number, &part.lengths, &part.untied, replica, self.job.grid.shape.data)
    }
}
