//! Samples of any shape and number that are generated on the fly: uniform inputs with mean 0 and
//! deviation 1, and the targets that a random network of one hidden layer, the teacher, assigns to
//! them. A sample depends only on the seed and its number.

use rand_chacha::rand_core::Rng as _;

use super::{Dataset, Table, Targets, zeros};
use crate::Result;
use crate::nn::{Features, Initial, generator, symmetric};

/// Hidden units of the teacher.
const HIDDEN: usize = 32;

/// The most inputs that the teacher reads: more would only blur the classes.
const SEEN: usize = 256;

/// Datasets up to this size are generated once and kept.
const KEPT_BYTES: usize = 1 << 28;

/// A dataset of generated samples.
pub struct Synthetic {
    features: Features,
    targets: Targets,
    first: usize,
    num_samples: usize,
    seed: u64,
    /// The teacher's weights, `[HIDDEN, seen inputs]` and `[outputs, HIDDEN]`.
    teacher: [Vec<f32>; 2],
    /// Scratch for the input of one sample, for callers that read only its target.
    input: Vec<f32>,
}

impl Synthetic {
    /// Generates `num_samples` samples from number `first` on, and keeps them in memory if they are
    /// small. Not collective.
    ///
    /// # Errors
    /// There is not enough memory.
    pub fn open(
        features: Features,
        targets: Targets,
        first: usize,
        num_samples: usize,
        seed: u64,
    ) -> Result<Box<dyn Dataset>> {
        let mut set = Synthetic::new(features, targets, first, num_samples, seed);
        if num_samples.saturating_mul(features.len()) > KEPT_BYTES / size_of::<f32>() {
            return Ok(Box::new(set));
        }
        let samples: Vec<usize> = (0..num_samples).collect();
        let mut inputs = zeros(num_samples * features.len())?;
        let mut target_values = zeros(num_samples.saturating_mul(targets.len()))?;
        set.read(&samples, &mut inputs, &mut target_values)?;
        Ok(Box::new(Table { source: set.source(), features, targets, inputs, target_values }))
    }

    /// Creates a dataset of `num_samples` samples from number `first` on, which are generated
    /// whenever they are read. Not collective.
    pub fn new(
        features: Features,
        targets: Targets,
        first: usize,
        num_samples: usize,
        seed: u64,
    ) -> Synthetic {
        let seen = features.len().min(SEEN);
        let outputs = match targets {
            Targets::Classes(outputs) | Targets::Values(outputs) => outputs,
            Targets::Tokens { .. } | Targets::Nothing => 0,
        };
        let mut teacher = [vec![0.0; HIDDEN * seen], vec![0.0; outputs * HIDDEN]];
        let deviation = |inputs: usize| Initial::Normal { deviation: 1.5 / (inputs as f32).sqrt() };
        deviation(seen).fill(seed, "teacher.hidden", 0, &mut teacher[0]);
        deviation(HIDDEN).fill(seed, "teacher.output", 0, &mut teacher[1]);
        Synthetic { features, targets, first, num_samples, seed, teacher, input: vec![0.0; features.len()] }
    }

    fn teach(&self, input: &[f32], target: &mut [f32]) {
        let seen = input.len().min(SEEN);
        let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
        let hidden: [f32; HIDDEN] = std::array::from_fn(|unit| {
            libm::tanhf(dot(&self.teacher[0][unit * seen..][..seen], &input[..seen]))
        });
        let outputs = self.teacher[1].chunks_exact(HIDDEN).map(|weights| dot(weights, &hidden));
        match self.targets {
            Targets::Classes(_) => {
                let best = outputs.enumerate().max_by(|a, b| a.1.total_cmp(&b.1));
                target[0] = best.map_or(0, |(class, _)| class) as f32;
            }
            Targets::Values(_) => {
                target.iter_mut().zip(outputs).for_each(|(target, output)| *target = output)
            }
            Targets::Tokens { .. } | Targets::Nothing => {}
        }
    }
}

/// The tokens that may follow a token.
const FOLLOWERS: usize = 3;

/// Makes tokens of random numbers in −1..1: of the followers of the token before, one.
fn make_tokens(vocabulary: usize, input: &mut [f32], target: &mut [f32]) {
    let below = |value: f32, num: usize| (((value + 1.0) / 2.0 * num as f32) as usize).min(num - 1);
    let mut token = below(input[0], vocabulary);
    for (at, value) in input.iter_mut().enumerate() {
        let next = (5 * token + 1 + below(*value, FOLLOWERS)) % vocabulary;
        *value = token as f32;
        if let Some(target) = target.get_mut(at) {
            *target = next as f32;
        }
        token = next;
    }
}

impl Dataset for Synthetic {
    fn source(&self) -> String {
        "synthetic data".into()
    }

    fn num_samples(&self) -> usize {
        self.num_samples
    }

    fn features(&self) -> Features {
        self.features
    }

    fn targets(&self) -> Targets {
        self.targets
    }

    fn fingerprint(&mut self) -> Result<u128> {
        // seed, shape and number determine the samples, and ranks compare them as options
        Ok(0)
    }

    fn read(&mut self, samples: &[usize], inputs: &mut [f32], targets: &mut [f32]) -> Result<()> {
        let (len, targets_len) = (self.features.len(), self.targets.len());
        let mut random = generator(self.seed, "synthetic.input");
        let mut own = std::mem::take(&mut self.input);
        for (at, &sample) in samples.iter().enumerate() {
            let input = if inputs.is_empty() { &mut own[..] } else { &mut inputs[at * len..][..len] };
            random.set_stream((self.first + sample) as u64);
            random.set_word_pos(0);
            random.fill_bytes(bytemuck::cast_slice_mut(input));
            input.iter_mut().for_each(|value| *value = symmetric(u32::from_le(value.to_bits())));
            let target = targets.get_mut(at * targets_len..(at + 1) * targets_len).unwrap_or_default();
            if let Features::Tokens { vocabulary, .. } = self.features {
                make_tokens(vocabulary, input, target);
                continue;
            }
            input.iter_mut().for_each(|value| *value *= 3f32.sqrt());
            if !target.is_empty() {
                self.teach(input, target);
            }
        }
        self.input = own;
        Ok(())
    }
}
