//! Activations with bias and bias gradient, in loops that the compiler vectorises.

use std::cell::RefCell;

use super::{Cpu, math};
use crate::device::{Activation, ActivationOperations, BiasShape};

thread_local! {
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
        bias_gradient: Option<&mut [f32]>,
        accumulate: bool,
    ) {
        match activation {
            Activation::Identity => {}
            Activation::Relu => self.zip(gradient, saved, |g, y| if y > 0.0 { g } else { 0.0 }),
            Activation::Tanh => self.zip(gradient, saved, |g, y| g * (1.0 - y * y)),
            Activation::Gelu => self.zip(gradient, saved, |g, derivative| g * derivative),
        }
        if let Some(sums) = bias_gradient {
            if !accumulate {
                sums.fill(0.0);
            }
            self.add_samples(shape, gradient, sums);
        }
    }
}

impl Cpu {
    /// Computes `values = activation(values + bias)` for every row, with the derivative in `saved`
    /// if the activation saves it.
    pub(super) fn bias_and_activation(
        &self,
        activation: Activation,
        bias: Option<&[f32]>,
        columns: usize,
        values: &mut [f32],
        saved: &mut [f32],
    ) {
        if let Some(bias) = bias {
            self.vectorised(
                #[inline(always)]
                || {
                    for row in values.chunks_exact_mut(columns) {
                        row.iter_mut().zip(bias).for_each(|(value, bias)| *value += bias);
                    }
                },
            );
        }
        self.activate(activation, values, saved);
    }

    /// Computes `values = activation(values)` in place.
    fn activate(&self, activation: Activation, values: &mut [f32], saved: &mut [f32]) {
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
