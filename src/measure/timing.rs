//! Times of operations, in turns.

use std::time::Instant;

use super::Subject;
use crate::Result;
use crate::comm::{Communicator, Operation};

/// Samples of one operation's time, in seconds: of each the slowest rank's, the shortest first.
#[derive(Debug, Clone)]
pub struct Times(Vec<f64>);

impl Times {
    /// The sample below which the share `quantile` of all is.
    fn at(&self, quantile: f64) -> f64 {
        self.0[((self.0.len() - 1) as f64 * quantile).round() as usize]
    }

    /// The median, in seconds.
    pub fn median(&self) -> f64 {
        self.at(0.5)
    }

    /// The shortest, in seconds.
    pub fn min(&self) -> f64 {
        self.at(0.0)
    }

    /// What 99 in 100 stay below, in seconds.
    pub fn p99(&self) -> f64 {
        self.at(0.99)
    }
}

/// A sample takes at least this long, in seconds: shorter operations are run several times in it.
const SHORTEST_SAMPLE: f64 = 60e-6;

/// Runs `subjects` in turns, for about `seconds` each. Short operations run many times between two barriers, one after the other: of those
/// with a root the root runs ahead, and the time is that from one to the next. Collective.
///
/// # Errors
/// There is no memory for messages.
pub fn time(all: &Communicator, seconds: f64, subjects: &mut [&mut dyn Subject]) -> Result<Vec<Times>> {
    let (mut fastest, mut slowest) = (f64::INFINITY, 0.0_f64);
    for subject in subjects.iter_mut() {
        sample(all, *subject, 3)?;
        let mut estimate = [sample(all, *subject, 3)?];
        all.all_reduce(&mut estimate, Operation::Max)?;
        (fastest, slowest) = (fastest.min(estimate[0]), slowest.max(estimate[0]));
    }
    // the same for all: what is in the caches the second time is so for all
    let batch = (SHORTEST_SAMPLE / fastest).ceil().clamp(1.0, 1000.0);
    let num_samples = (seconds / (slowest * batch)).clamp(5.0, 2000.0) as usize;
    let mut samples = vec![Vec::with_capacity(num_samples); subjects.len()];
    for turn in 0..num_samples {
        for place in 0..subjects.len() {
            let index = (turn + place) % subjects.len();
            samples[index].push(sample(all, subjects[index], batch as usize)?);
        }
    }
    let sorted = |mut samples: Vec<f64>| {
        all.all_reduce(&mut samples, Operation::Max)?;
        samples.sort_unstable_by(f64::total_cmp);
        Ok(Times(samples))
    };
    samples.into_iter().map(sorted).collect()
}

/// The time of one of `batch` runs, in seconds.
fn sample(all: &Communicator, subject: &mut dyn Subject, batch: usize) -> Result<f64> {
    all.barrier();
    let start = Instant::now();
    for _ in 0..batch {
        subject.run(&mut |_| Ok(()))?;
    }
    Ok(start.elapsed().as_secs_f64() / batch as f64)
}
