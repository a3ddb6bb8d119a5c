//! The samples of each step's global batch: a pure function of the seed and the step, identical on
//! every rank and for every number of ranks.

use std::cell::RefCell;
use std::ops::Range;

use super::block_order::{BlockOrder, EpochOrder};
use super::permutation::{Permutation, mix};

/// The order of the samples within an epoch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Order {
    /// By sample number.
    Sequential,
    /// A new random permutation in each epoch.
    Shuffled,
    /// A new random order of blocks in each epoch, and of the samples in each window of blocks.
    Blocks(BlockOrder),
}

/// Cuts epochs into global batches. The last batch of an epoch takes the remaining samples.
#[derive(Debug, Clone)]
pub struct Sampler {
    num_samples: usize,
    batch_size: usize,
    order: Order,
    seed: u64,
    /// The order of the blocks in the epoch that was asked for last.
    epoch: RefCell<Option<EpochOrder>>,
}

impl Sampler {
    /// Creates a sampler of batches of `batch_size ≥ 1` out of `num_samples ≥ 1`.
    pub fn new(num_samples: usize, batch_size: usize, order: Order, seed: u64) -> Sampler {
        Sampler { num_samples, batch_size, order, seed, epoch: RefCell::new(None) }
    }

    /// Returns the number of steps in an epoch.
    pub fn steps_per_epoch(&self) -> u64 {
        self.num_samples.div_ceil(self.batch_size) as u64
    }

    /// Returns the `(epoch, step within it)` of a step, both from 0.
    pub fn locate(&self, step: u64) -> (u64, u64) {
        (step / self.steps_per_epoch(), step % self.steps_per_epoch())
    }

    /// Returns the order of the samples.
    pub fn order(&self) -> &Order {
        &self.order
    }

    /// Returns the positions in its epoch of the global batch of a step.
    pub fn positions(&self, step: u64) -> Range<usize> {
        let start = self.locate(step).1 as usize * self.batch_size;
        start..self.num_samples.min(start + self.batch_size)
    }

    /// Returns the number of samples in the global batch of a step.
    pub fn batch_len(&self, step: u64) -> usize {
        self.positions(step).len()
    }

    /// Writes the numbers of the samples at `positions` of the global batch of a step to `samples`.
    /// The cost per sample does not depend on its position.
    pub fn samples(&self, step: u64, positions: Range<usize>, samples: &mut Vec<usize>) {
        let (epoch, within) = self.locate(step);
        let start = within as usize * self.batch_size;
        samples.clear();
        match &self.order {
            Order::Sequential => samples.extend(start + positions.start..start + positions.end),
            Order::Shuffled => {
                let permutation = Permutation::new(self.num_samples as u64, mix(mix(self.seed) ^ epoch));
                samples.extend(positions.map(|position| permutation.at((start + position) as u64) as usize));
            }
            Order::Blocks(order) => {
                let mut known = self.epoch.borrow_mut();
                let order = match known.take() {
                    Some(known) if known.epoch == epoch => known,
                    _ => order.epoch(epoch),
                };
                order.samples(start + positions.start..start + positions.end, samples);
                *known = Some(order);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dataset::blocks::SampleBlocks;

    #[test]
    fn every_epoch_visits_every_sample_once_for_all_sizes() {
        let mut samples = Vec::new();
        for num_samples in 1..130 {
            for batch_size in [1, 2, 3, 7, 64, 129, 200] {
                let blocks = BlockOrder::new(SampleBlocks::every(8, num_samples), 3, 9);
                for order in [Order::Sequential, Order::Shuffled, Order::Blocks(blocks)] {
                    let sampler = Sampler::new(num_samples, batch_size, order.clone(), 9);
                    for epoch in 0..2 {
                        let mut seen = vec![false; num_samples];
                        for within in 0..sampler.steps_per_epoch() {
                            let step = epoch * sampler.steps_per_epoch() + within;
                            assert_eq!(sampler.locate(step), (epoch, within));
                            sampler.samples(step, 0..sampler.batch_len(step), &mut samples);
                            samples.iter().for_each(|&s| assert!(!std::mem::replace(&mut seen[s], true)));
                        }
                        assert!(seen.iter().all(|seen| *seen));
                    }
                }
            }
        }
    }

    #[test]
    fn parts_of_a_batch_are_parts_of_the_whole() {
        let sampler = Sampler::new(1000, 96, Order::Shuffled, 1);
        let (mut whole, mut part) = (Vec::new(), Vec::new());
        for step in 0..12 {
            sampler.samples(step, 0..sampler.batch_len(step), &mut whole);
            for start in 0..whole.len() {
                sampler.samples(step, start..whole.len(), &mut part);
                assert_eq!(part, whole[start..]);
            }
        }
    }

    #[test]
    fn epochs_and_seeds_differ_and_places_are_even() {
        let first = |seed, step| {
            let mut samples = Vec::new();
            Sampler::new(50, 50, Order::Shuffled, seed).samples(step, 0..50, &mut samples);
            samples
        };
        assert_ne!(first(1, 0), first(1, 1));
        assert_ne!(first(1, 0), first(2, 0));
        // sample 0 over 50,000 epochs: χ² of its position, 49 degrees of freedom, stays below 100
        let mut counts = [0_i32; 50];
        (0..50_000).for_each(|epoch| counts[first(3, epoch).iter().position(|s| *s == 0).unwrap()] += 1);
        let chi_squared: f64 = counts.iter().map(|n| f64::from(n - 1000).powi(2) / 1000.0).sum();
        assert!(chi_squared < 100.0, "{chi_squared} {counts:?}");
    }
}
