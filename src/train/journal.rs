//! The record of a run: the metrics of every step, the progress bar, and the times of steps.

use std::mem;
use std::time::Duration;

use hdrhistogram::Histogram;

use super::TrainOptions;
use super::metrics::{MetricsFile, MetricsRow};
use super::trainer::StepOutcome;
use crate::app::Progress;
use crate::comm::World;
use crate::{Error, Result};

/// The range of steps of this start of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RunLength {
    /// The number of steps done before.
    pub(super) first: u64,
    /// The number of steps of the whole run.
    pub(super) num_steps: u64,
    /// The number of steps of an epoch.
    pub(super) steps_per_epoch: u64,
}

impl RunLength {
    /// Returns the number of epochs after `done` steps; 1.5 is halfway through the second.
    pub(super) fn epoch(&self, done: u64) -> f64 {
        done as f64 / self.steps_per_epoch as f64
    }
}

/// The record of a run, summed up.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct JournalSummary {
    /// The loss of the last step, in this start or before, if it is known.
    pub(super) last_loss: Option<f64>,
    /// The number of samples of all steps of this start.
    pub(super) num_samples: usize,
    /// The median time of a step, in milliseconds; 0 if there was no step.
    pub(super) median_step_ms: f64,
}

/// The record of a run.
pub(super) struct Journal {
    metrics: Option<MetricsFile>,
    progress: Progress,
    length: RunLength,
    /// The times of steps in nanoseconds, to three digits; the size does not grow with the number
    /// of steps.
    step_times: Histogram<u64>,
    num_samples: usize,
    /// The number of samples, and the seconds of steps, at the last line of the log.
    last_line: (usize, f64),
    last_loss: Option<f64>,
}

impl Journal {
    /// Begins the record of the steps of `length`; `loss` is that of the step before, if it is
    /// known. Collective.
    ///
    /// # Errors
    /// The file of --metrics cannot be created: the same error on every rank.
    pub(super) fn new(
        world: &World,
        options: &TrainOptions,
        length: RunLength,
        loss: Option<f64>,
    ) -> Result<Journal> {
        let create = |path| MetricsFile::create(path, length.first);
        let metrics =
            world.communicator().agree_with_root(|| options.metrics.as_deref().map(create).transpose())?;
        let shows = world.is_root() && !options.common.quiet;
        Ok(Journal {
            metrics: metrics.flatten(),
            progress: Progress::new(length.first, length.num_steps, shows, options.progress),
            length,
            step_times: step_times()?,
            num_samples: 0,
            last_line: (0, 0.0),
            last_loss: loss,
        })
    }

    /// Records the outcome of a step.
    pub(super) fn record(&mut self, outcome: &StepOutcome) {
        let StepOutcome { step, loss, accuracy, gradient_norm, learning_rate, .. } = *outcome;
        let epoch = self.length.epoch(step);
        self.step_times.saturating_record(nanoseconds(outcome.elapsed));
        self.num_samples += outcome.num_samples;
        if let Some(metrics) = &mut self.metrics {
            let step_ms = outcome.elapsed.as_secs_f64() * 1e3;
            metrics.write(&MetricsRow { step, epoch, loss, accuracy, gradient_norm, learning_rate, step_ms });
        }
        self.progress.set(step, || format!("epoch {epoch:.1}  loss {loss:.4}"));
        self.last_loss = Some(loss);
    }

    /// Returns the loss of the last step, in this start or before, if it is known.
    pub(super) fn last_loss(&self) -> Option<f64> {
        self.last_loss
    }

    /// Returns the samples per second since the last line of the log; `seconds` is the time of all steps,
    /// with the waits for samples.
    pub(super) fn rate_since_line(&mut self, seconds: f64) -> f64 {
        let (samples_before, seconds_before) = mem::replace(&mut self.last_line, (self.num_samples, seconds));
        (self.num_samples - samples_before) as f64 / (seconds - seconds_before).max(1e-9)
    }

    /// Ends the record, with its progress bar and its file, and sums it up.
    pub(super) fn close(self) -> JournalSummary {
        let median_step_ms = if self.step_times.is_empty() {
            0.0
        } else {
            self.step_times.value_at_quantile(0.5) as f64 / 1e6
        };
        JournalSummary { last_loss: self.last_loss, num_samples: self.num_samples, median_step_ms }
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Returns an empty record of times from a microsecond to an hour.
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
