//! Times of operations, in turns, and how much of them computing hides.

use std::hint::black_box;
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

/// Times that a computation looks after the operation, as a backward pass does between its layers.
const SLICES: usize = 16;

/// How much of an operation's time, `alone` in seconds, a computation of the same length hides, in percent: 100 if the two take no
/// longer together than the computation alone, 0 if they take as long as one after the other. Collective.
///
/// # Errors
/// There is no memory for messages.
pub fn overlap(all: &Communicator, subject: &mut dyn Subject, alone: f64) -> Result<f64> {
    // units of work that take as long as the operation, on the slowest rank
    let mut units = 1_000_000_usize;
    let mut rate = [f64::INFINITY];
    for _ in 0..3 {
        all.barrier();
        let start = Instant::now();
        work(units);
        rate[0] = start.elapsed().as_secs_f64() / units as f64;
        units = (0.002 / rate[0]) as usize;
    }
    all.all_reduce(&mut rate, Operation::Max)?;
    let units = (alone / rate[0]).max(1.0) as usize;
    let (mut together, mut computing) = (Vec::new(), Vec::new());
    for _ in 0..((0.1 / alone) as usize).clamp(5, 50) {
        all.barrier();
        let start = Instant::now();
        subject.run(&mut |test| {
            for _ in 0..SLICES {
                work(units / SLICES);
                test()?;
            }
            Ok(())
        })?;
        together.push(start.elapsed().as_secs_f64());
        all.barrier();
        let start = Instant::now();
        (0..SLICES).for_each(|_| work(units / SLICES));
        computing.push(start.elapsed().as_secs_f64());
    }
    let median = |mut samples: Vec<f64>| -> Result<f64> {
        all.all_reduce(&mut samples, Operation::Max)?;
        samples.sort_unstable_by(f64::total_cmp);
        Ok(samples[samples.len() / 2])
    };
    let (together, computing) = (median(together)?, median(computing)?);
    Ok((100.0 * (alone + computing - together) / alone).clamp(0.0, 100.0))
}

/// Arithmetic that needs no memory.
fn work(units: usize) {
    let mut x = black_box(0.5_f32);
    for _ in 0..units {
        x = x * 1.000_001 + 1e-9;
    }
    black_box(x);
}
