//! One training step and one evaluation, whatever the strategy: the walk of a rank through the plan.
//!
//! A step is started and finished apart: a device that works behind the host's back has its next step begun before the host looks at
//! what came of the last. What is started is the same either way, and so are the numbers.

use super::feed::{Parts, Resident, Rows};
use super::trainer::{Trainer, diverged};
use crate::Result;
use crate::comm::Operation;
use crate::dataset::Batches;
use crate::device::{Device, totals};
use crate::parallel::pipeline::Weights;
use crate::parallel::shard;

/// How many ranks ask for something to be done after a step. The requests ride on the reduction of the loss, so all ranks
/// hear of them after the same step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Requests {
    /// To stop.
    pub stop: usize,
    /// To write a checkpoint.
    pub checkpoint: usize,
}

impl Requests {
    /// These and `others`, of another step: as many ranks as asked for either.
    pub(super) fn and(self, others: Requests) -> Requests {
        Requests { stop: self.stop.max(others.stop), checkpoint: self.checkpoint.max(others.checkpoint) }
    }
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

/// A step whose operations have been started.
pub struct Started<D: Device> {
    step: u64,
    num_samples: usize,
    totals: D::Totals,
}

impl<D: Device> Trainer<'_, D> {
    /// Step `step`, from 0, with the samples that `batches` has for it: forward, backward, exchange of gradients, update.
    /// Collective.
    ///
    /// # Errors
    /// A sample cannot be read (this rank alone), or the loss is not a number (the same error on every rank).
    pub fn step(&mut self, step: u64, learning_rate: f64, batches: &mut Batches) -> Result<Outcome> {
        let started = self.start_step(step, learning_rate, batches)?;
        self.finish_step(started, Requests::default())
    }

    /// Keeps the samples of `batches` on the device if there is room for them; all steps that follow must be with `batches`. Returns
    /// how many are there. Not collective.
    ///
    /// # Errors
    /// A sample cannot be read.
    pub fn keep_samples(&mut self, batches: &mut Batches) -> Result<usize> {
        let stages = &self.layout.stages;
        let needs =
            [stages.iter().any(|stage| stage.index == 0), stages.iter().any(|stage| stage.head.is_some())];
        self.resident = Resident::new(self.device, batches, self.capacity, needs)?;
        Ok(self.resident.as_ref().map_or(0, Resident::num_samples))
    }

    /// True if the next step should be started before the last is finished: the device works on its own.
    pub fn runs_ahead(&self) -> bool {
        self.device.is_asynchronous()
    }

    /// Starts step `step`, as [`Trainer::step`] does. Collective.
    ///
    /// # Errors
    /// A sample cannot be read (this rank alone), or there is no memory for messages.
    pub fn start_step(&mut self, step: u64, learning_rate: f64, batches: &mut Batches) -> Result<Started<D>> {
        let num_samples = batches.sampler().batch_len(step);
        let share = shard(num_samples, self.grid.data.rank(), self.grid.data.size());
        let scale = 1.0 / num_samples as f32;
        let Trainer { device, pipeline, weights, resident, recordings, .. } = self;
        let parts = Parts::Equal(pipeline.num_micro_batches());
        let mut rows = Rows { batches, resident: resident.as_mut(), step, share, parts };
        weights.sync.begin(device, step + 1, learning_rate)?;
        if pipeline.repeats() && weights.sync.repeats() {
            pipeline.load(&mut rows)?;
            let recording = recordings.entry(num_samples).or_default();
            let mut work = || {
                clear_sums(*device, weights);
                pipeline.train(weights, &mut rows, scale)?;
                finish_sync(*device, weights)
            };
            device.repeat(recording, &mut work)?;
            pipeline.unload();
        } else {
            clear_sums(*device, weights);
            pipeline.train(weights, &mut rows, scale)?;
            finish_sync(*device, weights)?;
        }
        let totals = device.start_totals(device.view(&weights.sums, 0..totals::LEN))?;
        Ok(Started { step, num_samples, totals })
    }

    /// Waits for what came of a step, at the end of which this rank asks for `requests`. Collective, in the order of the steps.
    ///
    /// # Errors
    /// The loss is not a number (the same error on every rank), or the device failed.
    pub fn finish_step(&self, started: Started<D>, requests: Requests) -> Result<Outcome> {
        let Started { step, num_samples, totals } = started;
        let sums = self.device.finish_totals(totals)?.map(f64::from);
        let outcome = self.collect(sums, num_samples, requests)?;
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
            let mut rows =
                Rows { batches, resident: None, step: 0, share, parts: Parts::Full(self.capacity) };
            clear_sums(self.device, &mut self.weights);
            self.pipeline.evaluate(&mut self.weights, &mut rows)?;
            let round = self.device.start_totals(self.device.view(&self.weights.sums, 0..totals::LEN))?;
            // sums count on where `f32` would not
            let round = self.device.finish_totals(round)?;
            sums.iter_mut().zip(round).for_each(|(sum, value)| *sum += f64::from(value));
        }
        self.collect(sums, num_samples, Requests::default())
    }

    /// Adds the ranks' sums up, everything counted once, and makes means of them. Collective.
    fn collect(
        &self,
        mut sums: [f64; totals::LEN],
        num_samples: usize,
        requests: Requests,
    ) -> Result<Outcome> {
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
        let requests =
            Requests { stop: all[totals::LEN] as usize, checkpoint: all[totals::LEN + 1] as usize };
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

fn clear_sums<D: Device>(device: &D, weights: &mut Weights<D>) {
    device.fill(device.view_mut(&mut weights.sums, 0..totals::LEN), 0.0);
}

fn finish_sync<D: Device>(device: &D, weights: &mut Weights<D>) -> Result<()> {
    let Weights { parameters, gradients, sync, sums } = weights;
    sync.finish(device, parameters, gradients, sums)
}
