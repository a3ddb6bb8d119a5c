//! Batches: the arrays that a model reads, from sample numbers.

use std::ops::Range;

use super::{Dataset, ReplicaRows, Sampler};
use crate::Result;

/// Standardisation, `(value − mean) / deviation`, with one pair for each channel or feature, or one
/// for all.
#[derive(Debug, Clone, PartialEq)]
pub struct Standardise {
    scales: Vec<Scale>,
}

/// A mean in two parts, of which the second is the rounding error of the first, and the inverse of
/// a deviation.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Scale {
    mean: f32,
    rest: f32,
    factor: f32,
}

impl Scale {
    /// Standardises `value` with no error beyond the rounding of the result, however far from zero
    /// the mean is: near the mean, the first difference is exact.
    fn apply(self, value: &mut f32) {
        *value = ((*value - self.mean) - self.rest) * self.factor;
    }
}

impl Standardise {
    /// Creates the standardisation with these means and deviations; deviations must not be 0.
    pub fn new(pairs: &[[f64; 2]]) -> Standardise {
        let scale = |[mean, deviation]: &[f64; 2]| {
            let rounded = *mean as f32;
            Scale {
                mean: rounded,
                rest: (mean - f64::from(rounded)) as f32,
                factor: (1.0 / deviation).min(f64::from(f32::MAX)) as f32,
            }
        };
        Standardise { scales: pairs.iter().map(scale).collect() }
    }

    /// Returns the numbers of this standardisation: for each channel or feature the mean, the mean's
    /// rounding error and the inverse of the deviation.
    pub fn numbers(&self) -> Vec<[f32; 3]> {
        self.scales.iter().map(|Scale { mean, rest, factor }| [*mean, *rest, *factor]).collect()
    }

    /// Creates the standardisation with these [`Standardise::numbers`].
    pub fn from_numbers(numbers: &[[f32; 3]]) -> Standardise {
        let scale = |&[mean, rest, factor]: &[f32; 3]| Scale { mean, rest, factor };
        Standardise { scales: numbers.iter().map(scale).collect() }
    }

    fn apply(&self, values: &mut [f32]) {
        match self.scales.as_slice() {
            [] => {}
            &[scale] => values.iter_mut().for_each(|value| scale.apply(value)),
            scales => {
                for row in values.chunks_mut(scales.len()) {
                    row.iter_mut().zip(scales).for_each(|(value, scale)| scale.apply(value));
                }
            }
        }
    }
}

/// The batches of a training loop: a dataset in the order of a sampler, standardised.
pub struct Batches {
    dataset: Box<dyn Dataset>,
    sampler: Sampler,
    standardise: Option<Standardise>,
    samples: Vec<usize>,
}

impl Batches {
    /// Creates batches of `dataset` in the order of `sampler`.
    pub fn new(dataset: Box<dyn Dataset>, sampler: Sampler, standardise: Option<Standardise>) -> Batches {
        Batches { dataset, sampler, standardise, samples: Vec::new() }
    }

    /// Returns the sampler.
    pub fn sampler(&self) -> &Sampler {
        &self.sampler
    }

    /// Returns the standardisation, if there is one.
    pub fn standardise(&self) -> Option<&Standardise> {
        self.standardise.as_ref()
    }

    /// Returns the dataset.
    pub fn dataset(&self) -> &dyn Dataset {
        &*self.dataset
    }

    /// Prepares for the samples of step `step`, of which replicas read those in `rows`, and begins to
    /// prepare for step `next`, if there is one. Collective.
    ///
    /// # Errors
    /// A sample cannot be read (this rank alone).
    pub fn begin_step(&mut self, rows: &ReplicaRows<'_>, step: u64, next: Option<u64>) -> Result<()> {
        self.dataset.begin_step(&self.sampler, rows, step, next)
    }

    /// Ends what [`Batches::begin_step`] has begun. Collective.
    pub fn finish(&mut self) {
        self.dataset.finish();
    }

    /// Reads the samples at `positions` of the global batch of `step`. An empty `inputs` or
    /// `targets` is skipped. Not collective.
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

    /// Returns the numbers of the samples at `positions` of the global batch of `step`.
    pub fn samples(&mut self, step: u64, positions: Range<usize>) -> &[usize] {
        self.sampler.samples(step, positions, &mut self.samples);
        &self.samples
    }

    /// Reads the samples with the numbers `samples`. An empty `inputs` or `targets` is skipped. Not
    /// collective.
    ///
    /// # Errors
    /// A sample cannot be read.
    pub fn read_samples(
        &mut self,
        samples: Range<usize>,
        inputs: &mut [f32],
        targets: &mut [f32],
    ) -> Result<()> {
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
