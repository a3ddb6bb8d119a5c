//! A rank's part of a model in training: its parameters, the optimizer's slots, and the step that
//! is under way.
//!
//! This file sets a [`Trainer`] up. `step.rs` has the steps and the evaluation, `state.rs` what
//! checkpoints and checks read and overwrite.

mod audit;
mod state;
mod step;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

pub use step::{Evaluation, RunRequests, StepOutcome};

use super::feed::Resident;
use crate::comm::Grid;
use crate::device::Device;
use crate::nn::Model;
use crate::optim::{LearningRateSchedule, OptimizerSettings};
use crate::parallel::audit::Auditor;
use crate::parallel::data::{StateParts, SyncSettings, WeightSettings, Weights};
use crate::parallel::layout::{Layout, ParallelPlan};
use crate::parallel::pipeline::Pipeline;
use crate::parallel::zero::{Gathering, ZeroStage};
use crate::{Error, Result};

/// The settings of a [`Trainer`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TrainerSettings {
    /// The largest global batch, in samples.
    pub batch_size: usize,
    /// The settings of the sum of gradients over the replicas.
    pub sync: SyncSettings,
    /// The time for which gathered parameters are kept in stage 3 of ZeRO.
    pub gathering: Gathering,
    /// The optimizer's rule and constants.
    pub optimizer: OptimizerSettings,
    /// The learning rate of every step.
    pub learning_rate: LearningRateSchedule,
    /// The seed of the initial parameters.
    pub seed: u64,
}

/// A rank's part of a model in training.
pub struct Trainer<'a, D: Device> {
    device: &'a D,
    grid: &'a Grid,
    model: &'a Model,
    layout: Layout,
    /// The ranks that provide each tensor.
    parts: Arc<StateParts>,
    pipeline: Pipeline<'a, D>,
    weights: Weights<D>,
    learning_rate: LearningRateSchedule,
    /// The most rows of a micro-batch.
    capacity: usize,
    /// The seed of the run, for random draws.
    seed: u64,
    /// The training samples, if they are kept on the device.
    resident: Option<Resident<D>>,
    /// For each number of samples, the operations of a step that the device can start again at
    /// once.
    recordings: HashMap<usize, Option<D::Recording>>,
    /// The audits.
    auditor: Option<Auditor<'a, D>>,
    /// The step that has been started and not finished.
    open: Option<OpenStep<D>>,
    /// The time at which the previous step was finished, or, if none was open, this one was
    /// started.
    lap: Instant,
}

/// A step that has been started and not finished.
struct OpenStep<D: Device> {
    step: u64,
    learning_rate: f64,
    num_samples: usize,
    totals: D::Totals,
}

impl<'a, D: Device> Trainer<'a, D> {
    /// Allocates all memory for training, and gives every rank the initial parameters of the seed.
    /// Collective.
    ///
    /// # Errors
    /// `plan` does not fit the grid or the model, or the device does not have enough memory.
    pub fn new(
        device: &'a D,
        grid: &'a Grid,
        model: &'a Model,
        plan: &ParallelPlan,
        settings: TrainerSettings,
    ) -> Result<Trainer<'a, D>> {
        let TrainerSettings { batch_size, sync, gathering, optimizer, learning_rate, seed } = settings;
        let division = sync.division(plan, grid.data.size());
        let capacity = division.most_rows(batch_size);
        let allocate = || {
            let layout = Layout::new(model, grid.shape, grid.all.rank(), plan)?;
            let parts = Arc::new(StateParts::new(model, grid.shape, plan, sync)?);
            let settings = WeightSettings { sync, optimizer, division, gathering, seed };
            let weights = Weights::new(device, &layout, &grid.channels, settings)?;
            let (schedule, recompute) = (&plan.schedule, plan.recompute);
            let pipeline = Pipeline::new(device, &grid.channels, &layout, schedule, capacity, recompute)?;
            Ok((layout, parts, weights, pipeline))
        };
        let (layout, parts, mut weights, pipeline) = grid.all.agree(allocate())?;
        weights.start(device)?;
        Ok(Trainer {
            device,
            grid,
            model,
            layout,
            parts,
            pipeline,
            weights,
            learning_rate,
            capacity,
            seed,
            resident: None,
            recordings: HashMap::new(),
            auditor: None,
            open: None,
            lap: Instant::now(),
        })
    }

    /// Returns the stage of ZeRO that was chosen.
    pub fn zero_stage(&self) -> ZeroStage {
        self.weights.stage()
    }

    /// Returns the padded length of every bucket of this rank's gradients, in the order in which
    /// they are sent.
    pub fn bucket_lengths(&self) -> Vec<usize> {
        let parameters = self.weights.parameters();
        (0..parameters.num_segments()).rev().map(|segment| parameters.segment_len(segment)).collect()
    }
}

/// Returns the error for training that diverged at `step`, counted from 1, because of `what`.
pub(super) fn diverged(step: u64, what: &str) -> Error {
    let way_out = "try a smaller --learning-rate, --clip-norm 1, --warmup-steps or --standardise features";
    Error::on_every_rank(format!("step {step}"), format!("{what}; {way_out}"))
}
