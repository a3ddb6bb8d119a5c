//! [`time`]: measures the times of operations alternately.

use std::time::Instant;

use super::contender::Contender;
use crate::Result;
use crate::comm::{Communicator, Operation};

/// Samples of one operation's time in seconds, each that of the slowest rank, in ascending order.
#[derive(Debug, Clone)]
pub struct Times(Vec<f64>);

impl Times {
    /// Returns the sample at `quantile`.
    fn at(&self, quantile: f64) -> f64 {
        self.0[((self.0.len() - 1) as f64 * quantile).round() as usize]
    }

    /// Returns the median, in seconds.
    pub fn median(&self) -> f64 {
        self.at(0.5)
    }

    /// Returns the shortest, in seconds.
    pub fn min(&self) -> f64 {
        self.at(0.0)
    }

    /// Returns the 99th percentile, in seconds.
    pub fn p99(&self) -> f64 {
        self.at(0.99)
    }
}

/// The shortest time of a sample, in seconds: shorter operations are run several times in one.
const SHORTEST_SAMPLE: f64 = 60e-6;

/// Runs `contenders` alternately, for about `seconds` each. Short operations run many times between
/// two barriers, one after the other: in operations with a root the root runs ahead, and the time
/// is that from one operation to the next. Collective.
///
/// # Errors
/// There is no memory for messages.
pub fn time(all: &Communicator, seconds: f64, contenders: &mut [Contender<'_>]) -> Result<Vec<Times>> {
    let (mut fastest, mut slowest) = (f64::INFINITY, 0.0_f64);
    for contender in contenders.iter_mut() {
        sample(all, contender, 3)?;
        let mut estimate = [sample(all, contender, 3)?];
        all.all_reduce(&mut estimate, Operation::Max)?;
        (fastest, slowest) = (fastest.min(estimate[0]), slowest.max(estimate[0]));
    }
    // equal for all, so that the caches are equally warm for all
    let batch = (SHORTEST_SAMPLE / fastest).ceil().clamp(1.0, 1000.0);
    let num_samples = (seconds / (slowest * batch)).clamp(5.0, 1e6) as usize;
    let mut samples = vec![Vec::with_capacity(num_samples); contenders.len()];
    for turn in 0..num_samples {
        for position in 0..contenders.len() {
            let index = (turn + position) % contenders.len();
            samples[index].push(sample(all, &mut contenders[index], batch as usize)?);
        }
    }
    let sorted = |mut samples: Vec<f64>| {
        all.all_reduce(&mut samples, Operation::Max)?;
        samples.sort_unstable_by(f64::total_cmp);
        Ok(Times(samples))
    };
    samples.into_iter().map(sorted).collect()
}

/// Returns the time of one of `batch` runs, in seconds.
fn sample(all: &Communicator, contender: &mut Contender<'_>, batch: usize) -> Result<f64> {
    all.barrier();
    let start = Instant::now();
    for _ in 0..batch {
        contender.run(&mut |_| Ok(()))?;
    }
    Ok(start.elapsed().as_secs_f64() / batch as f64)
}
