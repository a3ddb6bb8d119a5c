//! [`Run`]: the parts of a run that do not depend on the device, what it says about them, and the checkpoints
//! from which it resumes and which it writes.

use std::sync::Arc;
use std::time::Instant;

use super::checkpoints::{CheckpointSettings, Checkpoints};
use super::identity::{self, Identity};
use super::journal::RunLength;
use super::options::{TrainOptions, name_of};
use super::resume::{self, Resumed, Start};
use super::samples::Samples;
use super::stop::StopRequest;
use super::trainer::Trainer;
use crate::Result;
use crate::checkpoint::Description;
use crate::comm::{Grid, World};
use crate::device::Device;
use crate::nn::{LONGEST_TEXT, Model};
use crate::parallel::layout::ParallelPlan;
use crate::parallel::tensor::positions::SharedValues;
use crate::parallel::zero::{Accumulation, ZeroStage};
use crate::sums::MOST_LEAVES;
use crate::trace::{self, Name};

/// The parts of a run that do not depend on the device.
pub(super) struct Run<'a> {
    pub(super) world: &'a World,
    pub(super) grid: &'a Grid,
    /// The name of the program.
    pub(super) program: &'a str,
    pub(super) options: &'a TrainOptions,
    pub(super) model: &'a Model,
    pub(super) plan: &'a ParallelPlan,
    /// The number of threads of each rank.
    pub(super) threads: usize,
    /// The time at which the run began.
    pub(super) began: Instant,
}

impl Run<'_> {
    /// Gives all ranks the checkpoint or the weights with which the run starts, and sets up the
    /// checkpoints that it writes. Collective.
    pub(super) fn resume<D: Device>(
        &self,
        trainer: &mut Trainer<'_, D>,
        start: Option<Start>,
        identity: Identity,
        steps_per_epoch: u64,
        stop: Option<StopRequest>,
    ) -> Result<(Checkpoints<'_>, Option<Resumed>)> {
        let (all, options) = (self.world.communicator(), &self.options.checkpoints);
        let slots = trainer.slot_names();
        let span = trace::work(Name::Checkpoint);
        let resumed = resume::restore(all, self.model, start, trainer)?;
        drop(span);
        let in_parts = trainer.zero_stage().divides_parameters();
        let compares_replicas = self.grid.shape.data > 1 && self.options.check_replicas > 0 && !in_parts;
        let replicas = match self.grid.shape.data {
            1 => "one",
            _ if in_parts => "in parts",
            _ if compares_replicas => "the same bits",
            _ => "not compared",
        };
        let written_by = identity::written_by(self.program, self.world, self.grid, self.threads, replicas);
        let network = Some(&self.model.text).filter(|text| text.len() <= LONGEST_TEXT).cloned();
        let settings = CheckpointSettings {
            options,
            model: self.model,
            slots,
            parts: Arc::clone(trainer.parts()),
            description: Description {
                seed: self.options.seed,
                model: self.model.name.clone(),
                config: identity.config,
                options: identity.changeable,
                written_by,
                network,
                standardise: Some(identity.standardise),
                ..Description::default()
            },
            steps_per_epoch,
            compares_replicas,
        };
        let mut checkpoints = Checkpoints::begin(self.grid, settings, resumed, stop, self.began)?;
        if let Some(resumed) = resumed {
            checkpoints.save(trainer, resumed.position)?;
        }
        Ok((checkpoints, resumed))
    }

    /// Logs the steps that are about to be taken, after those of earlier starts if the run is
    /// `resumed`.
    pub(super) fn announce<D: Device>(
        &self,
        samples: &Samples,
        length: RunLength,
        resumed: Option<Resumed>,
        trainer: &Trainer<'_, D>,
    ) {
        let RunLength { first, num_steps, .. } = length;
        if num_steps < first && self.world.is_root() {
            log::warn!("the checkpoint has {first} steps already, more than the {num_steps} of this run");
        }
        let warmup = self.options.optimizer.warmup_steps;
        if warmup >= num_steps && num_steps > 0 && self.world.is_root() {
            log::warn!("--warmup-steps {warmup} is not less than the {num_steps} steps of this run");
        }
        log::debug!("buckets of {:?} parameters", trainer.bucket_lengths());
        log::trace!("{:?}", self.options);
        let sampler = samples.train.sampler();
        log::info!("{num_steps} steps of {} samples{}", sampler.batch_len(0), self.zero_words(trainer));
        let (division, num_replicas) = (trainer.division(), self.grid.shape.data);
        let has_rows = |len, replica| division.rows(len, replica).iter().any(|rows| !rows.is_empty());
        // replicas that have no leaf of any batch were counted when the order of sums was chosen
        let is_known = |replica| division.is_canonical() && !has_rows(MOST_LEAVES, replica);
        let is_idle = |replica| !has_rows(sampler.batch_len(0), replica) && !is_known(replica);
        let num_idle = (0..num_replicas).filter(|replica| is_idle(*replica)).count();
        if num_idle > 0 && self.world.is_root() {
            log::warn!(
                "{num_idle} of {num_replicas} replicas have no samples, because the {} samples of a batch \
                 are divided by the leaves of its sums",
                sampler.batch_len(0)
            );
        }
        self.announce_positions();
        self.announce_accumulation();
        if let (true, Some(last)) = (resumed.is_some(), first.checked_sub(1)) {
            let (epoch, within) = sampler.locate(last);
            log::info!("resuming after step {first}, step {} of epoch {}", within + 1, epoch + 1);
        }
    }

    /// Returns true if the ranks of the tensor axis have some of the positions of sequences each.
    pub(super) fn shares_positions(&self) -> bool {
        let is_on = self.plan.sequence_parallel && self.grid.shape.tensor > 1;
        is_on && !SharedValues::new(self.model, true).is_empty()
    }

    /// Says what --sequence-parallel does in this run.
    fn announce_positions(&self) {
        let (shared, num_ranks) = (SharedValues::new(self.model, true), self.grid.shape.tensor);
        if !self.plan.sequence_parallel {
            return;
        }
        if self.shares_positions() {
            let num =
                (0..self.model.layers.len()).filter(|at| shared.has_own_positions(self.model, *at)).count();
            log::info!(
                "sequence parallelism: {num_ranks} ranks share the positions of sequences in {num} of {} \
                 layers",
                self.model.layers.len()
            );
        } else if self.world.is_root() {
            let why = match shared.is_empty() {
                true => format!("no layer of {} treats the positions of a sequence alike", self.model.name),
                false => "there is one rank on the tensor axis".to_owned(),
            };
            log::warn!("--sequence-parallel has no effect: {why}");
        }
    }

    /// Returns the stage of ZeRO for the log.
    fn zero_words<D: Device>(&self, trainer: &Trainer<'_, D>) -> String {
        let wanted = self.options.zero.0.filter(|stage| *stage != ZeroStage::None);
        match (self.grid.shape.data, wanted) {
            (1, None) => String::new(),
            (1, Some(stage)) => {
                if self.world.is_root() {
                    log::warn!("--zero {} has no effect with one replica", name_of(&stage));
                }
                String::new()
            }
            _ => format!("; ZeRO stage {}", name_of(&trainer.zero_stage())),
        }
    }

    /// Says so if gradients cannot be reduced after each of several micro-batches, as was asked.
    fn announce_accumulation(&self) {
        let num_micro_batches = self.plan.schedule.num_micro_batches;
        let wants_parts = self.options.accumulate == Accumulation::Parts;
        if wants_parts && num_micro_batches == 1 && self.world.is_root() {
            log::warn!(
                "--accumulate parts has no effect: there is one micro-batch; --micro-batches 4 makes 4"
            );
        }
    }
}

/// Returns a loss and an accuracy for the log.
pub(super) fn words(loss: f64, accuracy: Option<f64>) -> String {
    match accuracy {
        Some(accuracy) => format!("loss {loss:.4}  accuracy {:.2} %", 100.0 * accuracy),
        None => format!("loss {loss:.6}"),
    }
}
