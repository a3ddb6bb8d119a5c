//! Activations with bias and bias gradient, in loops that the compiler vectorises.

use std::cell::RefCell;

use super::{Cpu, math};
use crate::device::{Activation, ActivationOperations};

thread_local! {
    /// Partial sums of several rows.
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
        columns: usize,
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
            self.add_rows(columns, gradient, sums);
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

    /// Computes `sums += Σ rows`. Short rows are added several at a time, so that vectors are long.
    fn add_rows(&self, columns: usize, rows: &[f32], sums: &mut [f32]) {
        WIDE_ROW.with_borrow_mut(|wide| {
            wide.clear();
            wide.resize(columns * (256 / columns).max(1), 0.0);
            self.vectorised(
                #[inline(always)]
                || {
                    for several in rows.chunks(wide.len()) {
                        wide.iter_mut().zip(several).for_each(|(sum, g)| *sum += g);
                    }
                    for row in wide.chunks_exact(columns) {
                        sums.iter_mut().zip(row).for_each(|(sum, g)| *sum += g);
                    }
                },
            );
        });
    }
}
