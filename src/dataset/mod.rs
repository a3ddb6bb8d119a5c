//! Datasets and the order of their samples. Independent of ranks: callers ask for samples by
//! number.

mod batch;
mod block_order;
mod blocks;
mod cifar;
mod digits;
mod files;
mod hdf5;
mod idx;
mod memory;
mod permutation;
mod sampler;
mod statistics;
mod stored;
mod synthetic;
mod text;
mod tokeniser;

#[cfg(test)]
mod tests;

pub use batch::{Batches, Standardise};
pub use block_order::{BlockOrder, EpochOrder};
pub use blocks::SampleBlocks;
pub use cifar::{is_cifar, open as open_cifar};
pub use digits::open as open_digits;
pub use files::{is_hdf5_name, is_pattern, is_published_name, matching_paths};
pub use hdf5::{FileVersion, Hdf5Names, Hdf5Set, RowBuffer, has_token_rows, token_files};
pub use idx::{is_idx, open as open_idx};
pub use memory::{ByteImages, Subset, Table};
pub use sampler::{Order, Sampler};
pub use statistics::{MomentTree, Statistics, WantedStatistics, leaves, num_channels};
pub use stored::{ColumnFormat, RowFormat, StoredType};
pub use synthetic::Synthetic;
pub use text::{
    TextSettings, TextTokens, TokenText, has_characters, is_text_name, open_shakespeare, open_text,
};
pub use tokeniser::Tokeniser;

use std::fmt;
use std::ops::Range;
use std::time::Duration;

use xxhash_rust::xxh3::Xxh3;

use crate::nn::{Features, Loss, hash_values};
use crate::{Error, Result};

pub use crate::nn::LARGEST_SIZE;

/// The kind of values that a sample is mapped to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Targets {
    /// A class number below this.
    Classes(usize),
    /// A token for each position of a sequence, the one after it.
    Tokens {
        /// The number of positions.
        len: usize,
        /// The number of tokens that there are; numbers are below it.
        vocabulary: usize,
    },
    /// This many real values.
    Values(usize),
    /// None: the loss depends on the outputs only.
    Nothing,
}

impl Targets {
    /// Returns the number of target values per sample.
    pub fn len(self) -> usize {
        match self {
            Targets::Classes(_) => 1,
            Targets::Tokens { len, .. } => len,
            Targets::Values(len) => len,
            Targets::Nothing => 0,
        }
    }

    /// Returns true if samples have no target.
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// Returns true if `loss` can compare a network's outputs, of shape `output`, with these targets.
    pub fn suit(self, loss: Loss, output: Features) -> bool {
        match (loss, self, output) {
            (Loss::CrossEntropy, Targets::Classes(classes), Features::Flat(outputs)) => outputs >= classes,
            (
                Loss::CrossEntropy,
                Targets::Tokens { len, vocabulary },
                Features::Sequence { len: own, width },
            ) => own == len && width >= vocabulary,
            (Loss::MeanSquaredError, Targets::Values(values), output) => {
                // files have the values of a target in the order of channels first, outputs are channels last
                let has_one_order = match output {
                    Features::Image { height, width, channels } => channels == 1 || height * width == 1,
                    _ => true,
                };
                output.len() == values && has_one_order
            }
            (Loss::MeanOfSquares, Targets::Nothing, _) => true,
            _ => false,
        }
    }
}

impl fmt::Display for Targets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            // a file tells their number only to who reads all of it
            Targets::Classes(0) => write!(f, "class numbers"),
            Targets::Classes(classes) => write!(f, "{classes} classes"),
            Targets::Tokens { len, vocabulary } => write!(f, "{len} tokens of {vocabulary} a sample"),
            Targets::Values(1) => write!(f, "one real value a sample"),
            Targets::Values(values) => write!(f, "{values} real values a sample"),
            Targets::Nothing => write!(f, "missing"),
        }
    }
}

/// A function of the length of a batch and the number of a replica, which returns the rows of the batch that
/// the replica reads.
pub type ReplicaRows<'a> = dyn Fn(usize, usize) -> Vec<Range<usize>> + 'a;

/// The most samples in the fingerprint of a dataset whose samples are not all hashed: each may cost a
/// packed chunk.
const SEEN_SAMPLES: usize = 8;

/// The most values of samples that are read together where any number would do.
const BLOCK_VALUES: usize = 1 << 20;

/// The most samples that are read together where any number would do.
const BLOCK_SAMPLES: usize = 4096;

/// Allocates `len` zeros on the heap.
///
/// # Errors
/// The system does not have enough memory.
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

/// A set of numbered samples.
pub trait Dataset {
    /// Returns the origin of the samples for messages: a file, a directory, a name.
    fn source(&self) -> String;

    /// Returns the number of samples.
    fn num_samples(&self) -> usize;

    /// Returns the shape of one sample's input; images are channels last.
    fn features(&self) -> Features;

    /// Returns the kind of targets.
    fn targets(&self) -> Targets;

    /// Returns the means and deviations by which a set is usually standardised, published or a convention,
    /// one pair for each channel of an image or one for all; `None` to leave values unchanged.
    fn preset(&self) -> Option<Vec<[f32; 2]>> {
        None
    }

    /// Returns the tokeniser of a text.
    fn tokeniser(&self) -> Option<&Tokeniser> {
        None
    }

    /// Returns the blocks of samples that are cheapest to read together.
    fn blocks(&self) -> SampleBlocks {
        let len = self.features().len().saturating_add(self.targets().len());
        SampleBlocks::every((BLOCK_VALUES / len.max(1)).clamp(1, BLOCK_SAMPLES), self.num_samples())
    }

    /// Prepares for [`Dataset::read`] of the samples that `sampler` has for step `step`, of which replicas
    /// read those in `rows`, and begins to prepare for step `next`, if there is one. Collective over the
    /// ranks that share a data store, which are all; other datasets do nothing.
    ///
    /// # Errors
    /// A sample cannot be read (this rank alone).
    fn begin_step(
        &mut self,
        _sampler: &Sampler,
        _rows: &ReplicaRows<'_>,
        _step: u64,
        _next: Option<u64>,
    ) -> Result<()> {
        Ok(())
    }

    /// Returns the time for which this rank has waited for samples, until now.
    fn waited(&self) -> Duration {
        Duration::ZERO
    }

    /// Ends what [`Dataset::begin_step`] has begun. Collective like that.
    fn finish(&mut self) {}

    /// Returns a hash by which ranks detect different data: of all bytes of images and all tokens of texts,
    /// else of a few samples that are spread over the dataset. It is 0 for samples that are generated when
    /// they are read: the options determine them. Not collective.
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

    /// Writes the inputs and targets of `samples`, in that order, one sample after the other. An
    /// empty `inputs` or `targets` is skipped. Bytes of images are scaled to 0..1. Not collective.
    ///
    /// # Errors
    /// The file cannot be read (any more), or a value is NaN or infinite.
    fn read(&mut self, samples: &[usize], inputs: &mut [f32], targets: &mut [f32]) -> Result<()>;
}

/// Datasets for training and for testing.
pub struct Data {
    /// The training samples.
    pub train: Box<dyn Dataset>,
    /// The test samples, if there are any.
    pub test: Option<Box<dyn Dataset>>,
}
