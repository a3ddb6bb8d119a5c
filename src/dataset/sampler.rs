//! The samples of each step's global batch: a pure function of the seed and the step, identical on
//! every rank and for every number of ranks.

/// The order of the samples within an epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// By sample number.
    Sequential,
    /// A new random permutation in each epoch.
    Shuffled,
}

/// Cuts epochs into global batches. The last batch of an epoch takes the remaining samples.
#[derive(Debug, Clone, Copy)]
pub struct Sampler {
    num_samples: usize,
    batch_size: usize,
    order: Order,
    seed: u64,
}

impl Sampler {
    /// Creates a sampler of batches of `batch_size ≥ 1` out of `num_samples ≥ 1`.
    pub fn new(num_samples: usize, batch_size: usize, order: Order, seed: u64) -> Sampler {
        Sampler { num_samples, batch_size, order, seed }
    }

    /// Returns the number of steps in an epoch.
    pub fn steps_per_epoch(&self) -> u64 {
        self.num_samples.div_ceil(self.batch_size) as u64
    }

    /// Returns the `(epoch, step within it)` of a step, both from 0.
    pub fn locate(&self, step: u64) -> (u64, u64) {
        (step / self.steps_per_epoch(), step % self.steps_per_epoch())
    }

    /// Returns the number of samples in the global batch of a step.
    pub fn batch_len(&self, step: u64) -> usize {
        let (_, within) = self.locate(step);
        self.batch_size.min(self.num_samples - within as usize * self.batch_size)
    }

    /// Writes the numbers of the samples at `positions` of the global batch of a step to `samples`.
    /// The cost per sample does not depend on its position.
    pub fn samples(&self, step: u64, positions: std::ops::Range<usize>, samples: &mut Vec<usize>) {
        let (epoch, within) = self.locate(step);
        let start = within as usize * self.batch_size;
        samples.clear();
        match self.order {
            Order::Sequential => samples.extend(start + positions.start..start + positions.end),
            Order::Shuffled => {
                let permutation = Permutation::new(self.num_samples as u64, mix(mix(self.seed) ^ epoch));
                samples.extend(positions.map(|position| permutation.at((start + position) as u64) as usize));
            }
        }
    }
}

/// A permutation of `0..len` whose elements are computed one by one, without a table: a Feistel
/// network on the smallest even number of bits that holds `len`, applied repeatedly until the
/// result is below `len` (J. Black and P. Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA
/// 2002, §4).
struct Permutation {
    len: u64,
    half_bits: u32,
    keys: [u64; Permutation::ROUNDS],
}

impl Permutation {
    const ROUNDS: usize = 6;

    fn new(len: u64, key: u64) -> Permutation {
        let bits = u64::BITS - (len.max(2) - 1).leading_zeros();
        let keys = std::array::from_fn(|round| mix(key.wrapping_add(round as u64 + 1)));
        Permutation { len, half_bits: bits.div_ceil(2), keys }
    }

    fn at(&self, index: u64) -> u64 {
        let mut value = index;
        loop {
            value = self.encrypt(value);
            if value < self.len {
                return value;
            }
        }
    }

    fn encrypt(&self, value: u64) -> u64 {
        let mask = (1 << self.half_bits) - 1;
        let (mut left, mut right) = (value >> self.half_bits, value & mask);
        for key in self.keys {
            (left, right) = (right, left ^ (mix(right ^ key) & mask));
        }
        left << self.half_bits | right
    }
}

/// The finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): every input bit reaches every
/// output bit.
fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let value = (value ^ value >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let value = (value ^ value >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    value ^ value >> 31
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_epoch_visits_every_sample_once_for_all_sizes() {
        let mut samples = Vec::new();
        for num_samples in 1..130 {
            for batch_size in [1, 2, 3, 7, 64, 129, 200] {
                for order in [Order::Sequential, Order::Shuffled] {
                    let sampler = Sampler::new(num_samples, batch_size, order, 9);
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
