//! From numbers of samples to the arrays that a model takes.

use std::ops::Range;

use super::{Dataset, Sampler};
use crate::Result;

/// `(value − mean) / deviation`, with one pair for each channel or feature, or one for all.
#[derive(Debug, Clone, PartialEq)]
pub struct Standardise {
    pairs: Vec<[f32; 2]>,
}

impl Standardise {
    /// With these means and deviations; deviations are not 0.
    pub fn new(pairs: Vec<[f32; 2]>) -> Standardise {
        Standardise { pairs }
    }

    fn apply(&self, values: &mut [f32]) {
        match self.pairs.as_slice() {
            [] => {}
            [[mean, deviation]] => {
                let (factor, shift) = (1.0 / deviation, -mean / deviation);
                values.iter_mut().for_each(|value| *value = *value * factor + shift);
            }
            pairs => {
                for row in values.chunks_exact_mut(pairs.len()) {
                    let columns = row.iter_mut().zip(pairs);
                    columns.for_each(|(value, [mean, deviation])| *value = (*value - mean) / deviation);
                }
            }
        }
    }
}

/// A set in the order of a sampler, standardised: what a training loop draws from.
pub struct Batches {
    dataset: Box<dyn Dataset>,
    sampler: Sampler,
    standardise: Option<Standardise>,
    samples: Vec<usize>,
}

impl Batches {
    /// Batches of `dataset` in the order of `sampler`.
    pub fn new(dataset: Box<dyn Dataset>, sampler: Sampler, standardise: Option<Standardise>) -> Batches {
        Batches { dataset, sampler, standardise, samples: Vec::new() }
    }

    /// The order.
    pub fn sampler(&self) -> &Sampler {
        &self.sampler
    }

    /// The set.
    pub fn dataset(&self) -> &dyn Dataset {
        &*self.dataset
    }

    /// Reads the samples at `positions` of the global batch of `step`; inputs or targets are left out where they are empty.
    ///
    /// # Errors
    /// A sample cannot be read.
    pub fn read(
        &mut self,
        step: u64,
        positions: Range<usize>,
        inputs: &mut [f32],
        targets: &mut [f32],
    ) -> Result<()> {
        self.samples(step, positions);
        self.read_into(inputs, targets)
    }

    /// The numbers of the samples at `positions` of the global batch of `step`.
    pub fn samples(&mut self, step: u64, positions: Range<usize>) -> &[usize] {
        self.sampler.samples(step, positions, &mut self.samples);
        &self.samples
    }

    /// Reads the samples with the numbers `samples`; inputs or targets are left out where they are empty.
    ///
    /// # Errors
    /// A sample cannot be read.
    pub fn read_samples(&mut self, samples: Range<usize>, inputs: &mut [f32], targets: &mut [f32]) -> Result<()> {
        self.samples.clear();
        self.samples.extend(samples);
        self.read_into(inputs, targets)
    }

    fn read_into(&mut self, inputs: &mut [f32], targets: &mut [f32]) -> Result<()> {
        self.dataset.read(&self.samples, inputs, targets)?;
        if let Some(standardise) = &self.standardise {
            standardise.apply(inputs);
        }
        Ok(())
    }
}
