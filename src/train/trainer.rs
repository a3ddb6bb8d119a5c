//! One training step and one evaluation, whatever the strategy: the state of a rank and the walk through its schedule.

use crate::comm::{Buffer, Grid, Operation};
use crate::dataset::Batches;
use crate::device::{Device, totals};
use crate::nn::{Activations, FlatBuffer, GradientPair, Model, Stage};
use crate::optim::OptimizerSettings;
use crate::parallel::data::{GradSync, Reduction, SyncChannels, SyncSettings};
use crate::parallel::schedule::{Action, Schedule};
use crate::parallel::{replica, shard};
use crate::{Error, Result};

/// How a rank trains.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TrainerSettings {
    /// The largest global batch, in samples.
    pub batch_size: usize,
    /// Parts that a rank's share of it is worked on in.
    pub num_micro_batches: usize,
    /// How gradients are brought together.
    pub sync: SyncSettings,
    /// How they become updates.
    pub optimizer: OptimizerSettings,
    /// Seed of the initial parameters.
    pub seed: u64,
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
}

/// A rank's part of a model in training.
pub struct Trainer<'a, D: Device> {
    device: &'a D,
    grid: &'a Grid,
    stage: Stage<'a>,
    schedule: Schedule,
    parameters: FlatBuffer<D>,
    gradients: FlatBuffer<D>,
    sync: GradSync<D>,
    activations: Vec<Activations<D>>,
    /// The most rows that a micro-batch has.
    capacity: usize,
    pair: GradientPair<D>,
    sums: D::Buffer,
}

impl<'a, D: Device<Buffer: Buffer<f32>>> Trainer<'a, D> {
    /// Allocates everything that training needs, and gives every rank the initial parameters of the seed. Collective.
    ///
    /// # Errors
    /// The device has not enough memory.
    pub fn new(device: &'a D, grid: &'a Grid, model: &'a Model, settings: TrainerSettings) -> Result<Trainer<'a, D>> {
        let channels = SyncChannels::new(&grid.data)?;
        let mut trainer = grid.agree(Trainer::allocate(device, grid, model, settings, channels))?;
        trainer.sync.start(&mut trainer.parameters, &mut trainer.gradients)?;
        Ok(trainer)
    }

    fn allocate(
        device: &'a D,
        grid: &'a Grid,
        model: &'a Model,
        settings: TrainerSettings,
        channels: SyncChannels,
    ) -> Result<Trainer<'a, D>> {
        let (sync, segmentation) = GradSync::new(device, model, channels, settings.sync, settings.optimizer)?;
        let stage = Stage::whole(model);
        let schedule = Schedule::single_stage(settings.num_micro_batches);
        let share = settings.batch_size.div_ceil(grid.data.size());
        let capacity = share.div_ceil(settings.num_micro_batches);
        let live = 0..schedule.most_live();
        let activations = live.map(|_| Activations::new(device, model, stage.layers.clone(), capacity));
        let mut trainer = Trainer {
            parameters: FlatBuffer::zeros(device, &model.tensors, &segmentation)?,
            gradients: FlatBuffer::zeros(device, &model.tensors, &segmentation)?,
            activations: activations.collect::<Result<_>>()?,
            pair: GradientPair::new(device, model, capacity)?,
            sums: device.allocate(totals::LEN)?,
            device,
            grid,
            stage,
            schedule,
            sync,
            capacity,
        };
        trainer.parameters.initialise(device, &model.tensors, settings.seed)?;
        Ok(trainer)
    }

    /// The way from gradients to new parameters that was chosen.
    pub fn reduction(&self) -> Reduction {
        self.sync.reduction()
    }

    /// The padded length of every bucket of gradients, in the order in which they travel.
    pub fn bucket_lengths(&self) -> Vec<usize> {
        (0..self.gradients.num_segments()).rev().map(|segment| self.gradients.segment_len(segment)).collect()
    }

    /// This rank's parameters.
    pub fn parameters_mut(&mut self) -> &mut FlatBuffer<D> {
        &mut self.parameters
    }

    /// The gradients of the last step; with [`Reduction::AllReduce`] the sums over the ranks.
    pub fn gradients(&self) -> &FlatBuffer<D> {
        &self.gradients
    }

    /// A hash of all parameters' bits in logical order. Not collective.
    ///
    /// # Errors
    /// The transfer from the device failed.
    pub fn digest(&self) -> Result<u128> {
        self.parameters.digest(self.device)
    }

    /// Checks that all replicas hold the same bits after step `step`, and returns their digest. Collective.
    ///
    /// # Errors
    /// They do not: the same error on every rank, which names the one that differs.
    pub fn check_replicas(&self, step: u64) -> Result<u128> {
        let digest = self.digest()?;
        replica::check(&self.grid.data, digest, step)?;
        Ok(digest)
    }

    /// Checks that all parameters are finite after step `step`: the loss of a step says it of the step before. Not collective
    /// in itself, but every rank has the same parameters and so the same outcome.
    ///
    /// # Errors
    /// They are not: the same error on every rank.
    pub fn check_finite(&self, step: u64) -> Result<()> {
        let mut all_finite = true;
        for tensor in 0..self.parameters.num_tensors() {
            self.device.read(self.parameters.tensor(self.device, tensor), &mut |values| {
                all_finite &= values.iter().all(|value| value.is_finite());
                Ok(())
            })?;
        }
        if all_finite { Ok(()) } else { Err(diverged(step, "a parameter is no finite number")) }
    }

    /// Step `step`, from 0, with the samples that `batches` has for it: forward, backward, exchange of gradients, update.
    /// Collective.
    ///
    /// # Errors
    /// A sample cannot be read (this rank alone), or the loss is not a number (the same error on every rank).
    pub fn step(&mut self, step: u64, learning_rate: f64, batches: &mut Batches) -> Result<Outcome> {
        let num_samples = batches.sampler().batch_len(step);
        let share = shard(num_samples, self.grid.data.rank(), self.grid.data.size());
        let num_micro_batches = self.schedule.num_micro_batches;
        let part = |micro_batch| {
            let part = shard(share.len(), micro_batch, num_micro_batches);
            share.start + part.start..share.start + part.end
        };
        let scale = 1.0 / num_samples as f32;
        let last_backward = self.schedule.actions.iter().rposition(|action| matches!(action, Action::Backward(_)));
        self.clear_sums();
        self.sync.begin(step + 1, learning_rate);
        if share.is_empty() {
            self.gradients.clear(self.device);
        }
        let mut accumulate = false;
        for index in 0..self.schedule.actions.len() {
            match self.schedule.actions[index] {
                Action::Forward(micro_batch) => {
                    let slot = micro_batch % self.activations.len();
                    self.forward(slot, step, part(micro_batch), batches)?;
                }
                Action::Backward(micro_batch) => {
                    let (slot, rows) = (micro_batch % self.activations.len(), part(micro_batch).len());
                    self.backward(slot, rows, scale, accumulate, Some(index) == last_backward)?;
                    accumulate |= rows > 0;
                }
            }
        }
        self.sync.finish(self.device, &mut self.parameters, &mut self.gradients, &mut self.sums)?;
        let mut sums = [0.0; totals::LEN];
        self.add_sums(&mut sums)?;
        let outcome = self.collect(sums, num_samples)?;
        if !outcome.loss.is_finite() {
            return Err(diverged(step + 1, &format!("the loss is {}", outcome.loss)));
        }
        Ok(outcome)
    }

    /// The loss and accuracy over all samples of `batches`, each rank with a share of them. Collective.
    ///
    /// # Errors
    /// A sample cannot be read (this rank alone).
    pub fn evaluate(&mut self, batches: &mut Batches) -> Result<Outcome> {
        let num_samples = batches.dataset().num_samples();
        let share = shard(num_samples, self.grid.data.rank(), self.grid.data.size());
        let mut sums = [0.0; totals::LEN];
        let mut start = share.start;
        while start < share.end {
            let part = start..share.end.min(start + self.capacity);
            let rows = part.len();
            self.clear_sums();
            self.forward(0, 0, part, batches)?;
            self.stage.loss(self.device, rows, 0.0, &self.activations[0], &mut self.pair, &mut self.sums);
            self.add_sums(&mut sums)?;
            start += rows;
        }
        self.collect(sums, num_samples)
    }

    /// Adds the device's sums to `sums`, which count on where `f32` would not.
    fn add_sums(&self, sums: &mut [f64; totals::LEN]) -> Result<()> {
        self.device.read(self.device.view(&self.sums, 0..totals::LEN), &mut |values| {
            sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += f64::from(*value));
            Ok(())
        })
    }

    fn clear_sums(&mut self) {
        self.device.fill(self.device.view_mut(&mut self.sums, 0..totals::LEN), 0.0);
    }

    fn forward(&mut self, slot: usize, step: u64, part: std::ops::Range<usize>, batches: &mut Batches) -> Result<()> {
        let (rows, model) = (part.len(), self.stage.model);
        let activations = &mut self.activations[slot];
        let (input_len, targets_len) = (rows * model.input.len(), rows * model.targets_per_row());
        let targets = &mut activations.targets;
        self.device.write(self.device.view_mut(&mut activations.input, 0..input_len), &mut |inputs| {
            let targets = self.device.view_mut(targets, 0..targets_len);
            self.device.write(targets, &mut |targets| batches.read(step, part.clone(), inputs, targets))
        })?;
        self.stage.forward(self.device, &self.parameters, rows, activations);
        Ok(())
    }

    fn backward(&mut self, slot: usize, rows: usize, scale: f32, accumulate: bool, last: bool) -> Result<()> {
        let activations = &self.activations[slot];
        if rows > 0 {
            self.stage.loss(self.device, rows, scale, activations, &mut self.pair, &mut self.sums);
        }
        for index in self.stage.layers.clone().rev() {
            self.stage.backward_layer(
                self.device,
                index,
                rows,
                &self.parameters,
                activations,
                &mut self.gradients,
                &mut self.pair,
                accumulate,
            );
            let tensors = self.stage.model.layers[index].tensors();
            if last && !tensors.is_empty() {
                let (parameters, gradients) = (&mut self.parameters, &mut self.gradients);
                self.sync.completed(self.device, tensors.start, parameters, gradients, &mut self.sums)?;
            }
        }
        Ok(())
    }

    /// Adds the ranks' sums up and makes means of them. Collective.
    fn collect(&self, mut sums: [f64; totals::LEN], num_samples: usize) -> Result<Outcome> {
        if !self.sync.counts_squares() {
            sums[totals::GRADIENT_SQUARES] = 0.0;
        }
        self.grid.data.all_reduce(&mut sums, Operation::Sum)?;
        let accuracy = sums[totals::CORRECT] / num_samples as f64;
        Ok(Outcome {
            loss: sums[totals::LOSS] / num_samples as f64,
            accuracy: self.stage.model.loss.has_accuracy().then_some(accuracy),
            gradient_norm: sums[totals::GRADIENT_SQUARES].sqrt(),
            num_samples,
        })
    }
}

/// What every rank says when training has blown up at `step`, from 1.
pub(super) fn diverged(step: u64, what: &str) -> Error {
    let way_out = "try a smaller --learning-rate, --clip-norm 1, --warmup-steps or --standardise features";
    Error::on_every_rank(format!("step {step}"), format!("{what}; {way_out}"))
}
