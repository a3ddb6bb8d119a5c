//! Initial values, which depend only on the seed, the tensor's name and the element's index.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng as _, SeedableRng as _};

/// The distribution of a tensor's initial elements.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Initial {
    /// Uniform in −bound..bound: PyTorch's default for the weights and biases of `Linear` and
    /// `Conv2d`, with bound 1/√fan-in.
    Uniform {
        /// Half the width of the interval.
        bound: f32,
    },
    /// Normal with mean 0.
    Normal {
        /// The standard deviation.
        deviation: f32,
    },
    /// One value for all elements.
    Constant {
        /// The value.
        value: f32,
    },
}

impl Initial {
    /// Returns PyTorch's default for a layer whose outputs each depend on `fan_in` inputs.
    pub fn torch_default(fan_in: usize) -> Initial {
        Initial::Uniform { bound: 1.0 / (fan_in as f32).sqrt() }
    }

    /// Writes elements `first..first + values.len()` of the tensor called `name`. Any range of a
    /// tensor can be generated without the rest.
    pub fn fill(self, seed: u64, name: &str, first: usize, values: &mut [f32]) {
        let mut random = generator(seed, name);
        match self {
            Initial::Uniform { bound } => {
                random.set_word_pos(first as u128);
                values.iter_mut().for_each(|value| *value = bound * symmetric(random.next_u32()));
            }
            Initial::Normal { deviation } => {
                random.set_word_pos(2 * first as u128);
                for value in values {
                    let normal = box_muller(random.next_u32(), random.next_u32());
                    *value = (f64::from(deviation) * normal) as f32;
                }
            }
            Initial::Constant { value } => values.fill(value),
        }
    }
}

/// Returns a seekable generator (ChaCha with 8 rounds) for all random draws under `name` in a run
/// with `seed`.
pub fn generator(seed: u64, name: &str) -> ChaCha8Rng {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    key[8..24].copy_from_slice(&xxhash_rust::xxh3::xxh3_128(name.as_bytes()).to_le_bytes());
    ChaCha8Rng::from_seed(key)
}

/// Maps 32 random bits, of which an `f32` can hold 24, to a uniform number in −1..1.
pub fn symmetric(bits: u32) -> f32 {
    (bits >> 8) as f32 / (1 << 23) as f32 - 1.0
}

/// Maps two uniform numbers to a standard normal one (G. Box and M. Muller, 1958). The logarithm
/// and cosine come from `libm`, so that every machine draws identical numbers.
fn box_muller(a: u32, b: u32) -> f64 {
    const RANGE: f64 = (1_u64 << 32) as f64;
    let radius = (-2.0 * libm::log((f64::from(a) + 1.0) / RANGE)).sqrt();
    radius * libm::cos(std::f64::consts::TAU * f64::from(b) / RANGE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_part_of_a_tensor_is_the_same_as_in_the_whole() {
        for initial in [Initial::torch_default(25), Initial::Normal { deviation: 0.5 }] {
            let mut whole = [0.0; 1000];
            initial.fill(7, "fc1.weight", 0, &mut whole);
            for (first, len) in [(0, 1), (1, 999), (37, 64), (999, 1)] {
                let mut part = vec![0.0; len];
                initial.fill(7, "fc1.weight", first, &mut part);
                assert_eq!(part, whole[first..first + len]);
            }
        }
    }

    #[test]
    fn the_moments_are_right_and_names_and_seeds_differ() {
        let moments = |initial: Initial, name: &str, seed| {
            let mut values = vec![0.0; 100_000];
            initial.fill(seed, name, 0, &mut values);
            let mean = values.iter().map(|x| f64::from(*x)).sum::<f64>() / 1e5;
            let variance = values.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / 1e5 - mean * mean;
            (mean, variance, values[0])
        };
        let (mean, variance, _) = moments(Initial::Uniform { bound: 0.5 }, "a", 1);
        assert!(mean.abs() < 3e-3 && (variance - 1.0 / 12.0).abs() < 1e-3, "{mean} {variance}");
        let normal = Initial::Normal { deviation: 2.0 };
        let (mean, variance, first) = moments(normal, "a", 1);
        assert!(mean.abs() < 2e-2 && (variance - 4.0).abs() < 5e-2, "{mean} {variance}");
        assert_ne!(first, moments(normal, "b", 1).2);
        assert_ne!(first, moments(normal, "a", 2).2);
    }
}
