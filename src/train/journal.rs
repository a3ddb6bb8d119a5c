//! What is written down of every step: the metrics, the progress bar, the times.

use super::TrainOptions;
use super::metrics::{MetricsFile, MetricsRow, median};
use super::step::Outcome;
use crate::Result;
use crate::app::Progress;
use crate::comm::World;
use crate::optim::LearningRate;

/// The record of a run.
pub(super) struct Journal {
    metrics: Option<MetricsFile>,
    progress: Progress,
    schedule: LearningRate,
    steps_per_epoch: u64,
    step_ms: Vec<f64>,
    num_samples: usize,
    last: Option<Outcome>,
}

impl Journal {
    /// For steps `first` to `num_steps`. Collective.
    ///
    /// # Errors
    /// The file of metrics cannot be made: the same error on every rank.
    pub(super) fn new(
        world: &World,
        options: &TrainOptions,
        (first, num_steps): (u64, u64),
        steps_per_epoch: u64,
    ) -> Result<Journal> {
        let metrics = options.metrics.as_deref().filter(|_| world.is_root());
        let metrics = metrics.map(|path| MetricsFile::create(path, first)).transpose();
        let metrics = world.communicator().agree_with_root(metrics)?;
        let shows = world.is_root() && !options.common.quiet;
        Ok(Journal {
            metrics,
            progress: Progress::new(first, num_steps, shows, options.progress),
            schedule: options.schedule(num_steps),
            steps_per_epoch,
            step_ms: Vec::with_capacity(usize::try_from(num_steps).unwrap_or(usize::MAX).min(1 << 24)),
            num_samples: 0,
            last: None,
        })
    }

    /// The learning rate of every step.
    pub(super) fn schedule(&self) -> &LearningRate {
        &self.schedule
    }

    /// Epochs that are complete after `done` steps, with their fraction.
    pub(super) fn epoch(&self, done: u64) -> f64 {
        done as f64 / self.steps_per_epoch as f64
    }

    /// Writes down what came of step number `done`, from 1, and how long it took.
    pub(super) fn record(&mut self, done: u64, outcome: Outcome, step_ms: f64) {
        let epoch = self.epoch(done);
        self.step_ms.push(step_ms);
        self.num_samples += outcome.num_samples;
        if let Some(metrics) = &mut self.metrics {
            let Outcome { loss, accuracy, gradient_norm, .. } = outcome;
            let learning_rate = self.schedule.at(done - 1);
            let row = MetricsRow { step: done, epoch, loss, accuracy, gradient_norm, learning_rate, step_ms };
            metrics.write(&row);
        }
        self.progress.set(done, || format!("epoch {epoch:.1}  loss {:.4}", outcome.loss));
        self.last = Some(outcome);
    }

    /// The loss of the last step, if there was one, the samples of all steps, and the median time of a step.
    pub(super) fn close(mut self) -> (Option<f64>, usize, f64) {
        (self.last.map(|outcome| outcome.loss), self.num_samples, median(&mut self.step_ms))
    }
}
