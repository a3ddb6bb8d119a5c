//! One pass over samples: is every value a number, how are they distributed, which classes are there, and a checksum of it all.

use std::ops::Range;

use xxhash_rust::xxh3::Xxh3;

use super::Dataset;
use crate::Result;
use crate::nn::{Features, hash_values};

/// Sums that several ranks can add up.
#[derive(Debug, Clone, PartialEq)]
pub struct Statistics {
    /// Values seen of each channel of an image, or of each feature.
    pub count: f64,
    /// Their sums.
    pub sums: Vec<f64>,
    /// The sums of their squares.
    pub squares: Vec<f64>,
    /// The largest class number, −1 before the first.
    pub largest_label: f64,
    /// Over all samples, the sum of the upper and of the lower halves of a hash of each, with its number: a checksum that does not
    /// depend on who looks at which samples. It cannot overflow with fewer than 2³¹ of them.
    pub checksum: [i64; 2],
}

/// Bytes of samples that are looked at together.
const BLOCK_BYTES: usize = 16 << 20;

impl Statistics {
    /// Looks at samples `range` of `dataset`. Not collective: ranks share the work and then the sums.
    ///
    /// # Errors
    /// A sample cannot be read or holds something that is not a number.
    pub fn gather(dataset: &mut dyn Dataset, range: Range<usize>) -> Result<Statistics> {
        let channels = match dataset.features() {
            Features::Flat(len) => len,
            Features::Image { channels, .. } => channels,
        };
        let zeros = vec![0.0; channels];
        let mut found =
            Statistics { count: 0.0, sums: zeros.clone(), squares: zeros, largest_label: -1.0, checksum: [0; 2] };
        let (len, targets_len) = (dataset.features().len(), dataset.targets().len());
        let block = (BLOCK_BYTES / size_of::<f32>() / len.max(1)).clamp(1, 4096);
        let (mut inputs, mut targets) = (vec![0.0; block * len], vec![0.0; block * targets_len]);
        let mut samples = Vec::new();
        let mut start = range.start;
        while start < range.end {
            samples.clear();
            samples.extend(start..range.end.min(start + block));
            let (inputs, targets) = (&mut inputs[..samples.len() * len], &mut targets[..samples.len() * targets_len]);
            dataset.read(&samples, inputs, targets)?;
            for (index, sample) in samples.iter().enumerate() {
                let mut hash = Xxh3::with_seed(*sample as u64);
                hash_values(&mut hash, &inputs[index * len..(index + 1) * len]);
                hash_values(&mut hash, &targets[index * targets_len..(index + 1) * targets_len]);
                let hash = hash.digest();
                found.checksum[0] += (hash >> 32) as i64;
                found.checksum[1] += (hash & 0xFFFF_FFFF) as i64;
            }
            for pixel in inputs.chunks_exact(channels) {
                found.count += 1.0;
                for (channel, value) in pixel.iter().enumerate() {
                    found.sums[channel] += f64::from(*value);
                    found.squares[channel] += f64::from(*value) * f64::from(*value);
                }
            }
            if targets_len == 1 {
                found.largest_label = targets.iter().fold(found.largest_label, |most, t| most.max(f64::from(*t)));
            }
            start += block;
        }
        Ok(found)
    }

    /// Mean and deviation of each channel or feature; a deviation of 0, of values that never change, counts as 1.
    pub fn moments(&self) -> Vec<[f32; 2]> {
        let pairs = self.sums.iter().zip(&self.squares);
        let moments = pairs.map(|(sum, squares)| {
            let mean = sum / self.count;
            let deviation = (squares / self.count - mean * mean).max(0.0).sqrt();
            [mean as f32, if deviation > 1e-6 * mean.abs() { deviation as f32 } else { 1.0 }]
        });
        moments.collect()
    }
}
