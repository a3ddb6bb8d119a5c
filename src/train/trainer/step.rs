//! One training step and one evaluation, whatever the strategy.
//!
//! On a device that works asynchronously the next step is started before the previous one is
//! finished, so that the device always has work. The operations are the same either way, and so are
//! the numbers.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use super::{OpenStep, Trainer, diverged};
use crate::Result;
use crate::comm::Operation;
use crate::comm::shard;
use crate::dataset::Batches;
use crate::device::{Device, StepTotals, totals};
use crate::parallel::batch::BatchDivision;
use crate::train::feed::{Parts, Resident, Rows};

/// The numbers of ranks that ask to stop and to write a checkpoint after a step. They are summed
/// together with the loss, so all ranks learn of them after the same step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RunRequests {
    /// The number of ranks that ask to stop.
    pub stop: usize,
    /// The number of ranks that ask for a checkpoint.
    pub checkpoint: usize,
}

impl RunRequests {
    /// Combines these requests with `others`, which were made at another step.
    pub(in crate::train) fn and(self, others: RunRequests) -> RunRequests {
        RunRequests { stop: self.stop.max(others.stop), checkpoint: self.checkpoint.max(others.checkpoint) }
    }
}

/// The results of one step, over the whole global batch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepOutcome {
    /// The step, counted from 1.
    pub step: u64,
    /// The mean loss of a prediction: of a sample, or of a position of a sequence.
    pub loss: f64,
    /// The share of predictions that are the right class or token, if there are classes or tokens.
    pub accuracy: Option<f64>,
    /// The norm of the gradient before clipping, every logical parameter counted once.
    pub gradient_norm: f64,
    /// The learning rate of the step.
    pub learning_rate: f64,
    /// The number of samples.
    pub num_samples: usize,
    /// The requests of the ranks.
    pub requests: RunRequests,
    /// The time since the previous step was finished, or, if none was open, since this one was
    /// started.
    pub elapsed: Duration,
}

/// The results of an evaluation, over the whole test set.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Evaluation {
    /// The mean loss of a prediction: of a sample, or of a position of a sequence.
    pub loss: f64,
    /// The share of predictions that are the right class or token, if there are classes or tokens.
    pub accuracy: Option<f64>,
}

/// The sums of a step or an evaluation over all ranks, as means.
struct Means {
    loss: f64,
    accuracy: Option<f64>,
    gradient_norm: f64,
    requests: RunRequests,
}

impl<D: Device> Trainer<'_, D> {
    /// Starts step `step`, counted from 0, with the samples that `batches` has for it: forward and
    /// backward pass, exchange of gradients, update. Then finishes the previous step, if that is
    /// still open, and returns its outcome; `requests` returns what this rank asks for at its end.
    /// The step itself stays open until the next call or [`Trainer::flush`]. Collective.
    ///
    /// # Errors
    /// A sample cannot be read or there is no memory for messages (this rank alone); an audit found a
    /// fault (the same error on every rank); the previous step failed as in [`Trainer::flush`].
    pub fn step(
        &mut self,
        step: u64,
        batches: &mut Batches,
        requests: impl FnOnce() -> RunRequests,
    ) -> Result<Option<StepOutcome>> {
        if self.open.is_none() {
            self.lap = Instant::now();
        }
        let started = self.start(step, batches)?;
        let previous = self.open.replace(started);
        previous.map(|previous| self.finish(previous, requests())).transpose()
    }

    /// Finishes the step that is open, if there is one, at the end of which this rank asks for
    /// `requests`. Collective.
    ///
    /// # Errors
    /// The loss is NaN or infinite (the same error on every rank), or the device failed.
    pub fn flush(&mut self, requests: RunRequests) -> Result<Option<StepOutcome>> {
        let open = self.open.take();
        open.map(|open| self.finish(open, requests)).transpose()
    }

    /// Returns true if a step should stay open until the next one is started, because the device
    /// works asynchronously.
    pub fn runs_ahead(&self) -> bool {
        self.device.is_asynchronous()
    }

    /// Returns the division of batches among the replicas.
    pub fn division(&self) -> BatchDivision {
        self.weights.division()
    }

    /// Keeps the samples of `batches` on the device if there is room for them, and returns their
    /// number. All steps that follow must be with `batches`. Not collective.
    ///
    /// # Errors
    /// A sample cannot be read.
    pub fn keep_samples(&mut self, batches: &mut Batches) -> Result<usize> {
        let [inputs, targets] = self.needs();
        // recorded steps gather from the samples kept before
        self.recordings.clear();
        self.resident = Resident::new(self.device, batches, self.capacity, inputs, targets)?;
        Ok(self.resident.as_ref().map_or(0, Resident::num_samples))
    }

    /// Returns whether this rank's stages take inputs, and whether they take targets.
    fn needs(&self) -> [bool; 2] {
        let stages = &self.layout.stages;
        [stages.iter().any(|stage| stage.index == 0), stages.iter().any(|stage| stage.head.is_some())]
    }

    /// Returns true if this rank reads samples in every step, because they do not stay on the device. Not
    /// collective.
    pub fn reads_samples(&self) -> bool {
        self.resident.is_none() && self.needs().contains(&true)
    }

    fn start(&mut self, step: u64, batches: &mut Batches) -> Result<OpenStep<D>> {
        let learning_rate = self.learning_rate.at(step);
        let num_samples = batches.sampler().batch_len(step);
        let replica = self.grid.data.rank();
        let scale = 1.0 / num_samples as f32;
        self.before_audited(step, batches, scale)?;
        let Trainer { device, pipeline, weights, resident, recordings, seed, .. } = self;
        let parts = Parts::Step { division: weights.division(), len: num_samples, replica };
        let (resident, seed) = (resident.as_mut(), *seed);
        let mut rows = Rows { batches, resident, seed, step, parts, has_numbers: false };
        weights.begin(device, step + 1, learning_rate)?;
        if pipeline.repeats() && weights.repeats() {
            pipeline.begin_repeated(&mut rows)?;
            let recording = recordings.entry(num_samples).or_default();
            let mut work = || {
                pipeline.train(weights, &mut rows, scale)?;
                weights.finish(device)
            };
            device.repeat(recording, step as u32, &mut work)?;
            // `work` does so itself, but not where it is replayed
            device.join_steps();
            pipeline.end_repeated();
        } else {
            pipeline.train(weights, &mut rows, scale)?;
            weights.finish(device)?;
        }
        let totals = device.take_totals(device.view_mut(weights.sums_mut(), 0..totals::LEN))?;
        self.after_audited(step, batches)?;
        Ok(OpenStep { step, learning_rate, num_samples, totals })
    }

    fn finish(&mut self, open: OpenStep<D>, requests: RunRequests) -> Result<StepOutcome> {
        let OpenStep { step, learning_rate, num_samples, totals } = open;
        let step = step + 1;
        let sums = self.device.finish_totals(totals)?;
        let Means { loss, accuracy, gradient_norm, requests } = self.collect(sums, num_samples, requests)?;
        if !loss.is_finite() {
            return Err(diverged(step, &format!("the loss is {loss}")));
        }
        if gradient_norm.is_nan() {
            return Err(diverged(step, "a parameter or a gradient is NaN or infinite"));
        }
        let now = Instant::now();
        let elapsed = now - std::mem::replace(&mut self.lap, now);
        Ok(StepOutcome { step, loss, accuracy, gradient_norm, learning_rate, num_samples, requests, elapsed })
    }

    /// Returns the loss and accuracy over all samples of `batches`, of which each replica evaluates
    /// a share; or breaks off with the number of ranks that ask to stop between two parts of them.
    /// `asks_to_stop` returns whether this rank does. Collective.
    ///
    /// # Errors
    /// A sample cannot be read (this rank alone).
    pub fn evaluate(
        &mut self,
        batches: &mut Batches,
        asks_to_stop: impl Fn() -> bool,
    ) -> Result<ControlFlow<usize, Evaluation>> {
        let num_samples = batches.dataset().num_samples();
        let share = shard(num_samples, self.grid.data.rank(), self.grid.data.size());
        let mut sums = StepTotals::default();
        // a device may count correct predictions in an `f32`, which is exact up to 2²⁴
        let most_samples = (1 << 24) / self.model.num_predictions().max(1);
        let round_len = (self.capacity * self.pipeline.num_micro_batches()).min(most_samples.max(1));
        // as many rounds on every replica, for all of them take part in gathers of parameters
        for round_start in (0..num_samples.div_ceil(self.grid.data.size())).step_by(round_len) {
            let mut num_stopping = [i64::from(round_start > 0 && asks_to_stop())];
            if round_start > 0 {
                self.grid.all.all_reduce(&mut num_stopping, Operation::Sum)?;
            }
            if num_stopping != [0] {
                return Ok(ControlFlow::Break(num_stopping[0] as usize));
            }
            let start = share.end.min(share.start + round_start);
            let of_round = start..share.end.min(start + round_len);
            let parts = Parts::Full { share: of_round, most: self.capacity };
            let (resident, seed) = (None, self.seed);
            let mut rows = Rows { batches, resident, seed, step: 0, parts, has_numbers: false };
            self.pipeline.evaluate(&mut self.weights, &mut rows)?;
            let sums_of_round = self.device.view_mut(self.weights.sums_mut(), 0..totals::LEN);
            let totals = self.device.take_totals(sums_of_round)?;
            sums += self.device.finish_totals(totals)?;
        }
        let Means { loss, accuracy, .. } = self.collect(sums, num_samples, RunRequests::default())?;
        Ok(ControlFlow::Continue(Evaluation { loss, accuracy }))
    }

    /// Adds the ranks' sums, everything counted once, and returns them as means. Collective.
    fn collect(&self, mut sums: StepTotals, num_samples: usize, requests: RunRequests) -> Result<Means> {
        const LEN: usize = StepTotals::MESSAGE_LEN;
        if !self.weights.counts_squares() {
            sums.gradient_squares = 0.0;
        }
        if !self.grid.tensor.is_root() {
            // every rank of the tensor axis has evaluated the same loss
            sums = StepTotals { gradient_squares: sums.gradient_squares, ..StepTotals::default() };
        }
        let mut message = [0.0; LEN + 2];
        message[..LEN].copy_from_slice(&sums.into_message());
        message[LEN..].copy_from_slice(&[requests.stop as f64, requests.checkpoint as f64]);
        self.grid.all.all_reduce(&mut message, Operation::Sum)?;
        let [sums @ .., stop, checkpoint] = &message;
        let StepTotals { loss, correct, gradient_squares } = StepTotals::from_message(sums);
        let requests = RunRequests { stop: *stop as usize, checkpoint: *checkpoint as usize };
        let num_predictions = (num_samples * self.model.num_predictions()) as f64;
        Ok(Means {
            loss: loss.value() / num_predictions,
            accuracy: self.model.loss.has_accuracy().then_some(correct / num_predictions),
            gradient_norm: gradient_squares.sqrt(),
            requests,
        })
    }
}
