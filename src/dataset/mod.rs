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
pub use statistics::Statistics;
pub use synthetic::Synthetic;

use crate::Result;
use crate::nn::Features;

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
