//! Activations with bias and bias gradient, in loops that the compiler vectorises.

use std::cell::RefCell;
use std::ops::Range;

use super::leaf_sums::add_up;
use super::philox::{NUM_LANES, philox};
use super::{Cpu, math};
use crate::device::{Activation, ActivationOperations, BiasShape, DropoutMask, DropoutShape, Gate, RowSums};

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
        if activation == Activation::Relu {
            // a copy would take as long as the function
            return self.zip(output, input, |_, x| relu(x));
        }
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
            Activation::Gelu | Activation::GeluTanh | Activation::Silu => {
                self.zip(gradient, saved, |g, derivative| g * derivative);
            }
        }
        if let Some(sums) = bias_gradient {
            self.add_rows(shape, gradient, sums);
        }
    }

    fn gated_forward(&self, gate: Gate, columns: usize, input: &[f32], output: &mut [f32]) {
        match gate {
            Gate::Sigmoid => self.gated(columns, input, output, math::sigmoid),
            Gate::Silu => self.gated(columns, input, output, math::silu),
            Gate::Gelu => self.gated(columns, input, output, math::gelu),
        }
    }

    fn gated_backward(
        &self,
        gate: Gate,
        columns: usize,
        input: &[f32],
        gradient: &[f32],
        input_gradient: &mut [f32],
    ) {
        let arrays = [input, gradient];
        match gate {
            Gate::Sigmoid => self.gated_gradient(columns, arrays, input_gradient, math::sigmoid),
            Gate::Silu => self.gated_gradient(columns, arrays, input_gradient, math::silu),
            Gate::Gelu => self.gated_gradient(columns, arrays, input_gradient, math::gelu),
        }
    }

    fn dropout(&self, dropout: &DropoutShape, from: Option<&[f32]>, values: &mut [f32]) {
        let DropoutShape { mask, first, row_len, row_stride } = *dropout;
        if row_len != row_stride {
            let part = self.rows_per_thread(values.len().div_ceil(row_len as usize));
            let parts = values.chunks_mut(part * row_len as usize).enumerate();
            return self.for_each(parts, |(number, values)| {
                copy_part(from, number * part * row_len as usize, values);
                self.vectorised(
                    #[inline(always)]
                    || {
                        for (row, values) in values.chunks_mut(row_len as usize).enumerate() {
                            let row = (number * part + row) as u64;
                            drop_out(&mask, first + row * row_stride, values);
                        }
                    },
                );
            });
        }
        let part = self.part_len(values.len());
        let parts = values.chunks_mut(part).enumerate();
        self.for_each(parts, |(number, values)| {
            copy_part(from, number * part, values);
            self.vectorised(
                #[inline(always)]
                || drop_out(&mask, first + (number * part) as u64, values),
            );
        });
    }
}

impl Cpu {
    /// Adds up the rows of `values`, `[samples, positions, columns]`.
    pub(super) fn add_rows(&self, shape: BiasShape, values: &[f32], sums: RowSums<&mut [f32]>) {
        let BiasShape { columns, positions } = shape;
        let len = columns * positions;
        let (rows, mut arrays) = (sums.rows, sums.arrays(columns));
        if positions == 1 {
            return self.by_columns(columns, rows.len() * columns, arrays, |own, mut arrays| {
                add_up(rows, &mut arrays, |rows, sums| {
                    self.add_vectors(columns, values, rows, own.start, sums)
                });
            });
        }
        add_up(rows, &mut arrays, |samples, sums| {
            self.add_samples(shape, &values[samples.start * len..samples.end * len], sums);
        });
    }

    /// Adds columns of the vectors `rows`, from `first` on, to `sums`.
    pub(super) fn add_vectors(
        &self,
        columns: usize,
        values: &[f32],
        rows: Range<usize>,
        first: usize,
        sums: &mut [f32],
    ) {
        self.vectorised(
            #[inline(always)]
            || {
                for row in values[rows.start * columns..rows.end * columns].chunks_exact(columns) {
                    add_row(&row[first..], sums);
                }
            },
        );
    }

    /// Computes `output = a · function(b).0` of the halves a and b of rows.
    fn gated(
        &self,
        columns: usize,
        input: &[f32],
        output: &mut [f32],
        function: impl Fn(f32) -> (f32, f32) + Sync,
    ) {
        let part = self.rows_per_thread(output.len() / columns) * columns;
        self.for_each(output.chunks_mut(part).zip(input.chunks(2 * part)), |(output, input)| {
            self.vectorised(
                #[inline(always)]
                || {
                    for (y, ab) in output.chunks_exact_mut(columns).zip(input.chunks_exact(2 * columns)) {
                        let (a, b) = ab.split_at(columns);
                        y.iter_mut().zip(a).zip(b).for_each(|((y, a), b)| *y = a * function(*b).0);
                    }
                },
            );
        });
    }

    /// Computes the gradient of both halves of rows.
    fn gated_gradient(
        &self,
        columns: usize,
        [input, gradient]: [&[f32]; 2],
        input_gradient: &mut [f32],
        function: impl Fn(f32) -> (f32, f32) + Sync,
    ) {
        let part = self.rows_per_thread(gradient.len() / columns) * columns;
        let parts = input_gradient.chunks_mut(2 * part).zip(input.chunks(2 * part));
        self.for_each(parts.zip(gradient.chunks(part)), |((input_gradient, input), gradient)| {
            self.vectorised(
                #[inline(always)]
                || {
                    let rows = input_gradient.chunks_exact_mut(2 * columns);
                    let rows = rows.zip(input.chunks_exact(2 * columns)).zip(gradient.chunks_exact(columns));
                    for ((into, ab), gradient) in rows {
                        let ((a, b), (da, db)) = (ab.split_at(columns), into.split_at_mut(columns));
                        let values = a.iter().zip(b).zip(gradient);
                        for ((da, db), ((a, b), g)) in da.iter_mut().zip(db).zip(values) {
                            let (value, derivative) = function(*b);
                            (*da, *db) = (g * value, g * a * derivative);
                        }
                    }
                },
            );
        });
    }

    /// Computes `values = activation(values)` in place, with the derivative in `saved` if the activation
    /// saves it.
    pub(super) fn activate(&self, activation: Activation, values: &mut [f32], saved: &mut [f32]) {
        match activation {
            Activation::Identity => {}
            Activation::Relu => self.map(values, relu),
            Activation::Tanh => self.map(values, math::tanh),
            Activation::Gelu => self.with_derivative(values, saved, math::gelu),
            Activation::GeluTanh => self.with_derivative(values, saved, math::gelu_tanh),
            Activation::Silu => self.with_derivative(values, saved, math::silu),
        }
    }

    /// Computes `values = function(values)` in place, with the derivatives in `saved`. `function` returns
    /// both.
    fn with_derivative(
        &self,
        values: &mut [f32],
        saved: &mut [f32],
        function: impl Fn(f32) -> (f32, f32) + Sync,
    ) {
        let part = self.part_len(values.len());
        self.for_each(values.chunks_mut(part).zip(saved.chunks_mut(part)), |(values, saved)| {
            self.vectorised(
                #[inline(always)]
                || {
                    for (value, saved) in values.iter_mut().zip(saved.iter_mut()) {
                        (*value, *saved) = function(*value);
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

/// Copies the elements of `from`, if there are any, from number `first` on.
fn copy_part(from: Option<&[f32]>, first: usize, into: &mut [f32]) {
    if let Some(from) = from {
        into.copy_from_slice(&from[first..][..into.len()]);
    }
}

/// Returns x or 0, whichever is greater, or NaN.
#[inline(always)]
pub(super) fn relu(x: f32) -> f32 {
    if x > 0.0 || x.is_nan() { x } else { 0.0 }
}

/// Computes a dropout of `values`, of which the first has number `first`.
#[inline(always)]
pub(super) fn drop_out(mask: &DropoutMask, first: u64, values: &mut [f32]) {
    let (threshold, scale) = (mask.threshold(), mask.scale());
    let mut number = first;
    let mut rest = values;
    while !rest.is_empty() {
        let (block, skipped) = (number / 4, (number % 4) as usize);
        let bits = philox(block, [mask.step, mask.module], mask.seed);
        let len = rest.len().min(4 * NUM_LANES - skipped);
        let (now, later) = rest.split_at_mut(len);
        for (value, bits) in now.iter_mut().zip(&bits[skipped..]) {
            *value = if *bits >= threshold { *value * scale } else { 0.0 };
        }
        number += len as u64;
        rest = later;
    }
}

#[inline(always)]
fn add_row(row: &[f32], sums: &mut [f32]) {
    sums.iter_mut().zip(row).for_each(|(sum, value)| *sum += value);
}
