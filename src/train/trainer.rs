//! One training step and one evaluation, whatever the strategy: the state of a rank and its walk through the plan.

use std::ops::Range;

use crate::comm::{Grid, Operation};
use crate::dataset::Batches;
use crate::device::{Device, Role, totals};
use crate::nn::{FlatBuffer, Model};
use crate::observe::{self, Name};
use crate::optim::OptimizerSettings;
use crate::parallel::data::{GradSync, Reduction, SyncChannels, SyncSettings};
use crate::parallel::layout::{Assembly, Layout, Plan};
use crate::parallel::pipeline::{Pipeline, PipelineChannels, Source, Weights};
use crate::parallel::{replica, shard};
use crate::{Error, Result};

/// How a rank trains.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TrainerSettings {
    /// The largest global batch, in samples.
    pub batch_size: usize,
    /// How gradients are brought together.
    pub sync: SyncSettings,
    /// How they become updates.
    pub optimizer: OptimizerSettings,
    /// Seed of the initial parameters.
    pub seed: u64,
}

/// How many ranks ask for something to be done after a step. The requests ride on the reduction of the loss, so all ranks
/// hear of them after the same step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Requests {
    /// To stop.
    pub stop: usize,
    /// To write a checkpoint.
    pub checkpoint: usize,
}

/// Sums over the whole global batch, or the whole test set, as means.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Outcome {
    /// The mean loss of a sample.
    pub loss: f64,
    /// The share of samples whose class was guessed, if there are classes.
    pub accuracy: Option<f64>,
    /// The norm of the gradient, every logical parameter counted once, before clipping; 0 after an evaluation.
    pub gradient_norm: f64,
    /// The number of samples.
    pub num_samples: usize,
    /// What the ranks ask for.
    pub requests: Requests,
}

/// A rank's part of a model in training.
pub struct Trainer<'a, D: Device> {
    device: &'a D,
    grid: &'a Grid,
    model: &'a Model,
    layout: Layout,
    pipeline: Pipeline<'a, D>,
    weights: Weights<D>,
    /// The most rows that a micro-batch has.
    capacity: usize,
}

impl<'a, D: Device> Trainer<'a, D> {
    /// Allocates everything that training needs, and gives every rank the initial parameters of the seed. Collective.
    ///
    /// # Errors
    /// `plan` does not fit the grid or the model, or the device has not enough memory.
    pub fn new(
        device: &'a D,
        grid: &'a Grid,
        model: &'a Model,
        plan: &Plan,
        settings: TrainerSettings,
    ) -> Result<Trainer<'a, D>> {
        let channels = (SyncChannels::new(grid)?, PipelineChannels::new(grid)?);
        let trainer = Trainer::allocate(device, grid, model, plan, settings, channels);
        let mut trainer = grid.all.agree(trainer)?;
        let Weights { parameters, gradients, sync, .. } = &mut trainer.weights;
        sync.start(device, parameters, gradients)?;
        Ok(trainer)
    }

    fn allocate(
        device: &'a D,
        grid: &'a Grid,
        model: &'a Model,
        plan: &Plan,
        settings: TrainerSettings,
        (sync_channels, pipeline_channels): (SyncChannels, PipelineChannels),
    ) -> Result<Trainer<'a, D>> {
        let layout = Layout::new(model, grid.shape, grid.all.rank(), plan)?;
        let (tensors, shards) = (&layout.tensors, layout.shards());
        let (sync, segmentation) =
            GradSync::new(device, tensors, model.tensors.len(), sync_channels, settings.sync, settings.optimizer)?;
        let share = settings.batch_size.div_ceil(grid.data.size());
        let capacity = share.div_ceil(plan.schedule.num_micro_batches);
        let mut weights = Weights {
            parameters: FlatBuffer::zeros(device, &shards, &segmentation, Role::Parameters)?,
            gradients: FlatBuffer::zeros(device, &shards, &segmentation, Role::Exact)?,
            sync,
            sums: device.allocate(totals::LEN, Role::Exact)?,
        };
        weights.parameters.initialise(device, &shards, settings.seed)?;
        let pipeline = Pipeline::new(device, pipeline_channels, &layout, &plan.schedule, capacity, plan.recompute)?;
        Ok(Trainer { device, grid, model, layout, pipeline, weights, capacity })
    }

    /// The way from gradients to new parameters that was chosen for this rank's.
    pub fn reduction(&self) -> Reduction {
        self.weights.sync.reduction()
    }

    /// The padded length of every bucket of this rank's gradients, in the order in which they travel.
    pub fn bucket_lengths(&self) -> Vec<usize> {
        let gradients = &self.weights.gradients;
        (0..gradients.num_segments()).rev().map(|segment| gradients.segment_len(segment)).collect()
    }

    /// This rank's parameters.
    pub fn parameters_mut(&mut self) -> &mut FlatBuffer<D> {
        &mut self.weights.parameters
    }

    /// Overwrites tensor `number` of the model, on the ranks that hold some of it, with `values`. Not collective.
    ///
    /// # Errors
    /// The transfer to the device failed.
    pub fn set_tensor(&mut self, number: usize, values: &[f32]) -> Result<()> {
        for (local, (other, shard)) in self.layout.tensors.iter().enumerate() {
            if *other == number {
                let into = self.weights.parameters.tensor_mut(self.device, local);
                self.device.write(into, &mut |block| {
                    shard.extract(values, block);
                    Ok(())
                })?;
            }
        }
        Ok(())
    }

    /// The names of what the optimizer keeps for each parameter.
    pub fn slot_names(&self) -> &'static [&'static str] {
        self.weights.sync.slot_names()
    }

    /// Overwrites tensor `number` of slot `slot` of the optimizer, as [`Trainer::set_tensor`].
    ///
    /// # Errors
    /// The transfer to the device failed.
    pub fn set_slot(&mut self, slot: usize, number: usize, values: &[f32]) -> Result<()> {
        let Weights { parameters, sync, .. } = &mut self.weights;
        for (local, (other, shard)) in self.layout.tensors.iter().enumerate() {
            if *other == number {
                let mut block = vec![0.0; shard.num_elements()];
                shard.extract(values, &mut block);
                sync.write_slot(self.device, parameters, (slot, local), &block)?;
            }
        }
        Ok(())
    }

    /// Puts the whole tensors of the model together in `whole`, on rank 0. Collective.
    ///
    /// # Errors
    /// What `whole` returns (rank 0 alone).
    pub fn assemble_parameters(&self, whole: &mut dyn Assembly) -> Result<()> {
        let part = |local, show: &mut dyn FnMut(&[f32]) -> Result<()>| {
            self.device.read(self.weights.parameters.tensor(self.device, local), show)
        };
        self.layout.gather(self.grid, 1, &part, whole)
    }

    /// The same for slot `slot` of the optimizer. Collective.
    ///
    /// # Errors
    /// What `whole` returns (rank 0 alone).
    pub fn assemble_slot(&self, slot: usize, whole: &mut dyn Assembly) -> Result<()> {
        let Weights { parameters, sync, .. } = &self.weights;
        let part = |local, show: &mut dyn FnMut(&[f32]) -> Result<()>| {
            sync.read_slot(self.device, parameters, (slot, local), show)
        };
        self.layout.gather(self.grid, self.grid.shape.data, &part, whole)
    }

    /// Shows all whole tensors of the model to `look` on rank 0, in logical order, each with its number. Collective.
    ///
    /// # Errors
    /// What `look` returns (rank 0 alone).
    pub fn gather_parameters(&self, look: &mut dyn FnMut(usize, &[f32]) -> Result<()>) -> Result<()> {
        self.layout.look_at(self.grid, self.device, &self.weights.parameters, look)
    }

    /// The same with the gradients of the last step; with [`Reduction::AllReduce`] they are the sums over the replicas.
    /// Collective.
    ///
    /// # Errors
    /// What `look` returns (rank 0 alone).
    pub fn gather_gradients(&self, look: &mut dyn FnMut(usize, &[f32]) -> Result<()>) -> Result<()> {
        self.layout.look_at(self.grid, self.device, &self.weights.gradients, look)
    }

    /// A hash of the bits of all parameters of the model, on every rank: see [`Layout::digest`]. Collective.
    ///
    /// # Errors
    /// The transfer from the device failed.
    pub fn digest(&self) -> Result<u128> {
        self.layout.digest(self.grid, self.device, &self.weights.parameters)
    }

    /// Checks that all replicas hold the same bits after step `step`. Collective.
    ///
    /// # Errors
    /// They do not: the same error on every rank, which names the one that differs.
    pub fn check_replicas(&self, step: u64) -> Result<()> {
        let digest = self.weights.parameters.digest(self.device)?;
        self.grid.all.agree(replica::check(&self.grid.data, digest, step))
    }

    /// Checks that all parameters are finite after step `step`: the loss of a step says it of the step before. Collective.
    ///
    /// # Errors
    /// They are not: the same error on every rank.
    pub fn check_finite(&self, step: u64) -> Result<()> {
        let mut all_finite = [1_u8];
        let parameters = &self.weights.parameters;
        for tensor in 0..parameters.num_tensors() {
            self.device.read(parameters.tensor(self.device, tensor), &mut |values| {
                all_finite[0] &= u8::from(values.iter().all(|value| value.is_finite()));
                Ok(())
            })?;
        }
        self.grid.all.all_reduce(&mut all_finite, Operation::Min)?;
        if all_finite[0] == 1 { Ok(()) } else { Err(diverged(step, "a parameter is no finite number")) }
    }

    /// Step `step`, from 0, with the samples that `batches` has for it: forward, backward, exchange of gradients, update.
    /// Collective.
    ///
    /// # Errors
    /// A sample cannot be read (this rank alone), or the loss is not a number (the same error on every rank).
    pub fn step(&mut self, step: u64, learning_rate: f64, batches: &mut Batches) -> Result<Outcome> {
        self.step_and_ask(step, learning_rate, batches, Requests::default)
    }

    /// The same; at the end of it this rank asks for what `requests` returns. Collective.
    ///
    /// # Errors
    /// As [`Trainer::step`].
    pub fn step_and_ask(
        &mut self,
        step: u64,
        learning_rate: f64,
        batches: &mut Batches,
        requests: impl FnOnce() -> Requests,
    ) -> Result<Outcome> {
        let num_samples = batches.sampler().batch_len(step);
        let share = shard(num_samples, self.grid.data.rank(), self.grid.data.size());
        let num_parts = self.pipeline.num_micro_batches();
        self.clear_sums();
        self.weights.sync.begin(self.device, step + 1, learning_rate)?;
        let mut rows = Rows { batches, step, share, parts: Parts::Equal(num_parts) };
        self.pipeline.train(&mut self.weights, &mut rows, 1.0 / num_samples as f32)?;
        let Weights { parameters, gradients, sync, sums } = &mut self.weights;
        sync.finish(self.device, parameters, gradients, sums)?;
        let mut sums = [0.0; totals::LEN];
        self.add_sums(&mut sums)?;
        let outcome = self.collect(sums, num_samples, requests())?;
        if !outcome.loss.is_finite() {
            return Err(diverged(step + 1, &format!("the loss is {}", outcome.loss)));
        }
        if outcome.gradient_norm.is_nan() {
            return Err(diverged(step + 1, "a parameter or a gradient is no finite number"));
        }
        Ok(outcome)
    }

    /// The loss and accuracy over all samples of `batches`, each replica with a share of them. Collective.
    ///
    /// # Errors
    /// A sample cannot be read (this rank alone).
    pub fn evaluate(&mut self, batches: &mut Batches) -> Result<Outcome> {
        let num_samples = batches.dataset().num_samples();
        let share = shard(num_samples, self.grid.data.rank(), self.grid.data.size());
        let mut sums = [0.0; totals::LEN];
        let round = self.capacity * self.pipeline.num_micro_batches();
        for start in share.clone().step_by(round) {
            let share = start..share.end.min(start + round);
            let mut rows = Rows { batches, step: 0, share, parts: Parts::Full(self.capacity) };
            self.clear_sums();
            self.pipeline.evaluate(&mut self.weights, &mut rows)?;
            self.add_sums(&mut sums)?;
        }
        self.collect(sums, num_samples, Requests::default())
    }

    /// Adds the device's sums to `sums`, which count on where `f32` would not.
    fn add_sums(&self, sums: &mut [f64; totals::LEN]) -> Result<()> {
        self.device.read(self.device.view(&self.weights.sums, 0..totals::LEN), &mut |values| {
            sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += f64::from(*value));
            Ok(())
        })
    }

    fn clear_sums(&mut self) {
        self.device.fill(self.device.view_mut(&mut self.weights.sums, 0..totals::LEN), 0.0);
    }

    /// Adds the ranks' sums up, everything counted once, and makes means of them. Collective.
    fn collect(&self, mut sums: [f64; totals::LEN], num_samples: usize, requests: Requests) -> Result<Outcome> {
        if !self.weights.sync.counts_squares() {
            sums[totals::GRADIENT_SQUARES] = 0.0;
        }
        if !self.grid.tensor.is_root() {
            // every rank of the tensor axis has evaluated the same loss
            (sums[totals::LOSS], sums[totals::CORRECT]) = (0.0, 0.0);
        }
        let Requests { stop, checkpoint } = requests;
        let mut all = [0.0; totals::LEN + 2];
        all[..totals::LEN].copy_from_slice(&sums);
        all[totals::LEN..].copy_from_slice(&[stop as f64, checkpoint as f64]);
        self.grid.all.all_reduce(&mut all, Operation::Sum)?;
        let requests = Requests { stop: all[totals::LEN] as usize, checkpoint: all[totals::LEN + 1] as usize };
        sums.copy_from_slice(&all[..totals::LEN]);
        let accuracy = sums[totals::CORRECT] / num_samples as f64;
        Ok(Outcome {
            loss: sums[totals::LOSS] / num_samples as f64,
            accuracy: self.model.loss.has_accuracy().then_some(accuracy),
            gradient_norm: sums[totals::GRADIENT_SQUARES].sqrt(),
            num_samples,
            requests,
        })
    }
}

/// A replica's share of a global batch, in micro-batches.
struct Rows<'b> {
    batches: &'b mut Batches,
    step: u64,
    share: Range<usize>,
    parts: Parts,
}

/// How a share is cut.
enum Parts {
    /// Into so many parts, as equal as can be.
    Equal(usize),
    /// Into parts of so many rows, until none are left.
    Full(usize),
}

impl Rows<'_> {
    fn part(&self, micro_batch: usize) -> Range<usize> {
        let Range { start, end } = self.share;
        match self.parts {
            Parts::Equal(num) => {
                let part = shard(end - start, micro_batch, num);
                start + part.start..start + part.end
            }
            Parts::Full(rows) => end.min(start + micro_batch * rows)..end.min(start + (micro_batch + 1) * rows),
        }
    }
}

impl Source for Rows<'_> {
    fn rows(&self, micro_batch: usize) -> usize {
        self.part(micro_batch).len()
    }

    fn read(&mut self, micro_batch: usize, inputs: &mut [f32], targets: &mut [f32]) -> Result<()> {
        let _span = observe::work(Name::Read);
        self.batches.read(self.step, self.part(micro_batch), inputs, targets)
    }
}

/// What every rank says when training has blown up at `step`, from 1.
pub(super) fn diverged(step: u64, what: &str) -> Error {
    let way_out = "try a smaller --learning-rate, --clip-norm 1, --warmup-steps or --standardise features";
    Error::on_every_rank(format!("step {step}"), format!("{what}; {way_out}"))
}
