//! What is written down of every step: the metrics, the progress bar, the times.

use hdrhistogram::Histogram;

use super::TrainOptions;
use super::metrics::{MetricsFile, MetricsRow};
use super::step::Outcome;
use crate::app::Progress;
use crate::comm::World;
use crate::optim::LearningRate;
use crate::{Error, Result};

/// The record of a run.
pub(super) struct Journal {
    metrics: Option<MetricsFile>,
    progress: Progress,
    schedule: LearningRate,
    steps_per_epoch: u64,
    /// In nanoseconds, to three digits: of a fixed size, however many steps there are.
    step_times: Histogram<u64>,
    num_samples: usize,
    last_loss: Option<f64>,
}

impl Journal {
    /// For steps `first` to `num_steps`, of which the one before the first had this `loss`. Collective.
    ///
    /// # Errors
    /// The file of metrics cannot be made: the same error on every rank.
    pub(super) fn new(
        world: &World,
        options: &TrainOptions,
        (first, loss, num_steps): (u64, Option<f64>, u64),
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
            step_times: step_times()?,
            num_samples: 0,
            last_loss: loss,
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
        self.step_times.saturating_record((step_ms * 1e6) as u64);
        self.num_samples += outcome.num_samples;
        if let Some(metrics) = &mut self.metrics {
            let Outcome { loss, accuracy, gradient_norm, .. } = outcome;
            let learning_rate = self.schedule.at(done - 1);
            let row = MetricsRow { step: done, epoch, loss, accuracy, gradient_norm, learning_rate, step_ms };
            metrics.write(&row);
        }
        self.progress.set(done, || format!("epoch {epoch:.1}  loss {:.4}", outcome.loss));
        self.last_loss = Some(outcome.loss);
    }

    /// The loss of the last step, here or before, if it is known.
    pub(super) fn last_loss(&self) -> Option<f64> {
        self.last_loss
    }

    /// The loss of the last step, if it is known, the samples of all steps, and the median time of a step.
    pub(super) fn close(self) -> (Option<f64>, usize, f64) {
        let median = if self.step_times.is_empty() {
            0.0
        } else {
            self.step_times.value_at_quantile(0.5) as f64 / 1e6
        };
        (self.last_loss, self.num_samples, median)
    }
}

/// An empty record of times from a microsecond to an hour.
fn step_times() -> Result<Histogram<u64>> {
    let record = Histogram::new_with_bounds(1000, 3_600_000_000_000, 3);
    record.map_err(|error| Error::failed("making a record of times", error))
}

#[cfg(test)]
mod tests {
    use super::step_times;

    #[test]
    fn the_record_of_times_does_not_grow() {
        let mut record = step_times().unwrap();
        let size = record.distinct_values();
        for step in 0..1_000_000_u64 {
            record.saturating_record(1_700_000 + step % 1001);
        }
        // a suspended job, too
        record.saturating_record(u64::MAX);
        assert_eq!(record.distinct_values(), size);
        assert!(size * size_of::<u64>() < 1 << 18, "{size}");
        assert!((record.value_at_quantile(0.5) as f64 / 1_700_500.0 - 1.0).abs() < 1e-3);
    }
}
