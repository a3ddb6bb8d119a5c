//! Activations with bias and bias gradient, in loops that the compiler vectorises.

use std::cell::RefCell;

use super::leaf_sums::{LeafSums, add_up};
use super::{Cpu, math};
use crate::device::{Activation, ActivationOperations, BiasShape, RowSums};

thread_local! {
    /// The sums of leaves that are not added to others yet.
    static LEAF_SUMS: RefCell<LeafSums> = RefCell::default();
    /// The sum of a sample, and partial sums of several rows.
    static WIDE_ROW: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

impl ActivationOperations for Cpu {
    fn activation_forward(
        &self,
        activation: Activation,
        input: &[f32],
        saved: &mut [f32],
        output: &mut [f32],
    ) {
        output.copy_from_slice(input);
        self.activate(activation, output, saved);
    }

    fn activation_backward(
        &self,
        activation: Activation,
        shape: BiasShape,
        saved: &[f32],
        gradient: &mut [f32],
        bias_gradient: Option<RowSums<&mut [f32]>>,
    ) {
        match activation {
            Activation::Identity => {}
            Activation::Relu => self.zip(gradient, saved, |g, y| if y > 0.0 { g } else { 0.0 }),
            Activation::Tanh => self.zip(gradient, saved, |g, y| g * (1.0 - y * y)),
            Activation::Gelu => self.zip(gradient, saved, |g, derivative| g * derivative),
        }
        if let Some(sums) = bias_gradient {
            let BiasShape { columns, positions } = shape;
            let len = columns * positions;
            let (rows, mut arrays) = (sums.rows, sums.arrays(columns));
            LEAF_SUMS.with_borrow_mut(|stack| {
                add_up(rows, stack, &mut arrays, |samples, sums| {
                    self.add_samples(shape, &gradient[samples.start * len..samples.end * len], sums);
                });
            });
        }
    }
}

impl Cpu {
    /// Computes `values = activation(values)` in place, with the derivative in `saved` if the activation
    /// saves it.
    pub(super) fn activate(&self, activation: Activation, values: &mut [f32], saved: &mut [f32]) {
        match activation {
            Activation::Identity => {}
            Activation::Relu => self.map(values, |x| if x > 0.0 || x.is_nan() { x } else { 0.0 }),
            Activation::Tanh => self.map(values, math::tanh),
            Activation::Gelu => self.gelu(values, saved),
        }
    }

    /// Computes `values = gelu(values)` in place, with the derivative in `saved`.
    fn gelu(&self, values: &mut [f32], saved: &mut [f32]) {
        let part = self.part_len(values.len());
        self.for_each(values.chunks_mut(part).zip(saved.chunks_mut(part)), |(values, saved)| {
            self.vectorised(
                #[inline(always)]
                || {
                    for (value, saved) in values.iter_mut().zip(saved.iter_mut()) {
                        (*value, *saved) = math::gelu(*value);
                    }
                },
            );
        });
    }

    /// Adds the rows of each sample to `sums`, a sample after the other. The short rows of an image
    /// are added several at a time first, so that vectors are long; the order within a sample depends
    /// on its shape alone.
    fn add_samples(&self, shape: BiasShape, samples: &[f32], sums: &mut [f32]) {
        let BiasShape { columns, positions } = shape;
        if positions == 1 {
            return self.vectorised(
                #[inline(always)]
                || samples.chunks_exact(columns).for_each(|row| add_row(row, sums)),
            );
        }
        WIDE_ROW.with_borrow_mut(|memory| {
            memory.resize(columns * (256 / columns).max(1) + columns, 0.0);
            let (sum, wide) = memory.split_at_mut(columns);
            self.vectorised(
                #[inline(always)]
                || {
                    for sample in samples.chunks_exact(columns * positions) {
                        wide.fill(0.0);
                        sample.chunks(wide.len()).for_each(|several| add_row(several, wide));
                        sum.fill(0.0);
                        wide.chunks_exact(columns).for_each(|row| add_row(row, sum));
                        add_row(sum, sums);
                    }
                },
            );
        });
    }
}

#[inline(always)]
fn add_row(row: &[f32], sums: &mut [f32]) {
    sums.iter_mut().zip(row).for_each(|(sum, value)| *sum += value);
}
