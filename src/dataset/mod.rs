//! Where samples come from and in which order. Knows no rank: it is asked for samples by number.

mod batch;
mod cifar;
mod digits;
mod hdf5_file;
mod idx;
mod memory;
mod sampler;
mod statistics;
mod synthetic;

#[cfg(test)]
mod tests;

pub use batch::{Batches, Standardise};
pub use cifar::{is_cifar, open as open_cifar};
pub use digits::open as open_digits;
pub use hdf5_file::{Hdf5File, Hdf5Options};
pub use idx::{IdxFamily, is_idx, open as open_idx};
pub use memory::{ByteImages, Subset, Table};
pub use sampler::{Order, Sampler};
pub use statistics::{MomentTree, Statistics, num_channels};
pub use synthetic::Synthetic;

use std::fs::File;
use std::path::Path;

use xxhash_rust::xxh3::Xxh3;

use crate::nn::{Features, hash_values};
use crate::{Error, Result};

pub use crate::nn::LARGEST_SIZE;

/// What a sample is to be mapped to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Targets {
    /// A class number below this.
    Classes(usize),
    /// This many real values.
    Values(usize),
    /// Nothing: the loss looks at the outputs only.
    Nothing,
}

impl Targets {
    /// Values per sample.
    pub fn len(self) -> usize {
        match self {
            Targets::Classes(_) => 1,
            Targets::Values(len) => len,
            Targets::Nothing => 0,
        }
    }

    /// True if samples have no target.
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }
}

/// Samples that are looked at where all would be too many: each may cost a packed chunk.
const SEEN_SAMPLES: usize = 8;

/// The most bytes of a file that is read whole, unpacked: twice what the images of EMNIST have, the largest set of this kind.
const LARGEST_FILE: usize = 1 << 30;

/// True for the names of the files that published sets are made of, IDX or CIFAR-10.
pub fn is_published_name(name: &str) -> bool {
    name.contains("-ubyte") || name.ends_with("_batch.bin") || name.starts_with("data_batch_")
}

/// Opens a file that is one: to open a pipe would be to wait for somebody who writes to it.
fn open_file(path: &Path) -> std::result::Result<File, String> {
    let metadata = std::fs::metadata(path).map_err(|error| error.to_string())?;
    if !metadata.is_file() {
        return Err("it is no file but a directory, a pipe or a device".into());
    }
    File::open(path).map_err(|error| error.to_string())
}

/// So many zeros on the heap.
///
/// # Errors
/// The system has not that much memory.
fn zeros(len: usize) -> Result<Vec<f32>> {
    let fail = |why: String| Error::failed(format!("allocating {len} values for samples"), why);
    let bytes =
        len.checked_mul(size_of::<f32>()).ok_or_else(|| fail("that is more than can be addressed".into()))?;
    crate::memory::check_room(bytes).map_err(fail)?;
    let mut values = Vec::new();
    values.try_reserve_exact(len).map_err(|error| fail(error.to_string()))?;
    values.resize(len, 0.0);
    Ok(values)
}

/// Samples with numbers.
pub trait Dataset {
    /// Where the samples come from, for messages: a file, a directory, a name.
    fn source(&self) -> String;

    /// The number of samples.
    fn num_samples(&self) -> usize;

    /// The shape of one sample's input; images are channels last.
    fn features(&self) -> Features;

    /// What samples are mapped to.
    fn targets(&self) -> Targets;

    /// Means and deviations to standardise with, one for each channel of an image or one for all, as published for this set;
    /// `None` to leave values as they are.
    fn preset(&self) -> Option<Vec<[f32; 2]>> {
        None
    }

    /// A hash by which ranks see whether they have the same data: of all samples where they are in memory, else of some that are spread
    /// over the set. Not collective.
    ///
    /// # Errors
    /// A sample cannot be read.
    fn fingerprint(&mut self) -> Result<u128> {
        let num_samples = self.num_samples();
        let num_seen = num_samples.min(SEEN_SAMPLES);
        let mut hash = Xxh3::new();
        let (mut inputs, mut targets) = (zeros(self.features().len())?, zeros(self.targets().len())?);
        for at in 0..num_seen {
            // the first, the last, and others in between
            let sample = at * (num_samples - 1) / (num_seen - 1).max(1);
            self.read(&[sample], &mut inputs, &mut targets)?;
            hash_values(&mut hash, &inputs);
            hash_values(&mut hash, &targets);
        }
        Ok(hash.digest128())
    }

    /// Writes the inputs and targets of `samples`, in that order, one sample after the other; either is left out where it is
    /// empty. Bytes of images come as 0 to 1.
    ///
    /// # Errors
    /// The file cannot be read (any more), or a value is not a number.
    fn read(&mut self, samples: &[usize], inputs: &mut [f32], targets: &mut [f32]) -> Result<()>;
}

/// Samples to train with and samples to test with.
pub struct Data {
    /// For training.
    pub train: Box<dyn Dataset>,
    /// For testing, if there are any.
    pub test: Option<Box<dyn Dataset>>,
}
