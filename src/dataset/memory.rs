//! Datasets that fit in memory, and subsets of a dataset.

use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

use xxhash_rust::xxh3::Xxh3;

use super::{Dataset, SampleBlocks, Targets};
use crate::nn::Features;
use crate::{Error, Result};

/// Images of bytes, channels last, with labels.
pub struct ByteImages {
    /// The name of the images in messages.
    pub source: String,
    /// The name of the labels in messages.
    pub label_source: String,
    /// Height, width and channels of an image.
    pub features: Features,
    /// All images, one after the other.
    pub pixels: Vec<u8>,
    /// One label per image.
    pub labels: Vec<u8>,
    /// The number of classes; labels are below it.
    pub num_classes: usize,
    /// Mean and deviation of each channel, for pixels from 0 to 1.
    pub preset: Vec<[f32; 2]>,
}

impl ByteImages {
    /// Returns the images if there are any, each has a label, and all labels are below the number
    /// of classes.
    ///
    /// # Errors
    /// One of these does not hold; the message says what was found, with the numbers.
    pub fn checked(self) -> Result<ByteImages> {
        let doing = format!("reading {}", self.source);
        let num_images = self.pixels.len() / self.features.len().max(1);
        if num_images == 0 {
            return Err(Error::input(doing, "there are no images in it"));
        }
        if num_images != self.labels.len() {
            let why = format!(
                "{} labels for the {num_images} images of {}; each needs one",
                self.labels.len(),
                self.source
            );
            return Err(Error::input(format!("reading {}", self.label_source), why));
        }
        let bad = self.labels.iter().position(|&label| usize::from(label) >= self.num_classes);
        if let Some(at) = bad {
            let (label, last) = (self.labels[at], self.num_classes - 1);
            let why = format!("label {at} is {label}, expected 0 to {last}");
            return Err(Error::input(format!("reading {}", self.label_source), why));
        }
        Ok(self)
    }
}

impl Dataset for ByteImages {
    fn source(&self) -> String {
        self.source.clone()
    }

    fn num_samples(&self) -> usize {
        self.labels.len()
    }

    fn features(&self) -> Features {
        self.features
    }

    fn targets(&self) -> Targets {
        Targets::Classes(self.num_classes)
    }

    fn preset(&self) -> Option<Vec<[f32; 2]>> {
        Some(self.preset.clone())
    }

    fn fingerprint(&mut self) -> Result<u128> {
        let mut hash = Xxh3::new();
        hash.update(&self.pixels);
        hash.update(&self.labels);
        Ok(hash.digest128())
    }

    fn read(&mut self, samples: &[usize], inputs: &mut [f32], targets: &mut [f32]) -> Result<()> {
        let len = self.features.len();
        for (&sample, input) in samples.iter().zip(inputs.chunks_exact_mut(len)) {
            let pixels = &self.pixels[sample * len..][..len];
            input.iter_mut().zip(pixels).for_each(|(value, byte)| *value = f32::from(*byte) / 255.0);
        }
        for (&sample, target) in samples.iter().zip(targets) {
            *target = f32::from(self.labels[sample]);
        }
        Ok(())
    }
}

/// Inputs and targets as plain values, for tests and for programs that compute their own.
pub struct Table {
    /// The name of the table in messages.
    pub source: String,
    /// The shape of one input.
    pub features: Features,
    /// The kind of targets.
    pub targets: Targets,
    /// All inputs, one after the other.
    pub inputs: Vec<f32>,
    /// All targets, one after the other.
    pub target_values: Vec<f32>,
}

impl Dataset for Table {
    fn source(&self) -> String {
        self.source.clone()
    }

    fn num_samples(&self) -> usize {
        self.inputs.len() / self.features.len()
    }

    fn features(&self) -> Features {
        self.features
    }

    fn targets(&self) -> Targets {
        self.targets
    }

    fn read(&mut self, samples: &[usize], inputs: &mut [f32], targets: &mut [f32]) -> Result<()> {
        let copy = |from: &[f32], to: &mut [f32], len: usize| {
            for (to, sample) in to.chunks_exact_mut(len.max(1)).zip(samples) {
                to.copy_from_slice(&from[sample * len..][..len]);
            }
        };
        copy(&self.inputs, inputs, self.features.len());
        copy(&self.target_values, targets, self.targets.len());
        Ok(())
    }
}

/// Consecutive samples of another dataset, which several subsets may share.
pub struct Subset<S> {
    whole: Rc<RefCell<S>>,
    range: Range<usize>,
    shifted: Vec<usize>,
}

impl<S: Dataset> Subset<S> {
    /// Creates the subset of the samples `range` of `whole`.
    pub fn new(whole: Rc<RefCell<S>>, range: Range<usize>) -> Subset<S> {
        Subset { whole, range, shifted: Vec::new() }
    }
}

impl<S: Dataset> Dataset for Subset<S> {
    fn source(&self) -> String {
        self.whole.borrow().source()
    }

    fn num_samples(&self) -> usize {
        self.range.len()
    }

    fn features(&self) -> Features {
        self.whole.borrow().features()
    }

    fn targets(&self) -> Targets {
        self.whole.borrow().targets()
    }

    fn preset(&self) -> Option<Vec<[f32; 2]>> {
        self.whole.borrow().preset()
    }

    fn blocks(&self) -> SampleBlocks {
        self.whole.borrow().blocks().within(&self.range)
    }

    fn waited(&self) -> Duration {
        self.whole.borrow().waited()
    }

    fn read(&mut self, samples: &[usize], inputs: &mut [f32], targets: &mut [f32]) -> Result<()> {
        self.shifted.clear();
        self.shifted.extend(samples.iter().map(|sample| sample + self.range.start));
        self.whole.borrow_mut().read(&self.shifted, inputs, targets)
    }
}
