//! Normalisations: vectors are split among the threads, and columns where a sum over vectors is formed.

use std::cell::RefCell;

use super::Cpu;
use super::leaf_sums::{LeafSums, add_up};
use super::loops::sum;
use crate::device::{NormOperations, NormShape, RowSums};

thread_local! {
    static LEAF_SUMS: RefCell<LeafSums> = RefCell::default();
}

impl NormOperations for Cpu {
    fn layer_norm_forward(
        &self,
        shape: &NormShape,
        input: &[f32],
        weight: &[f32],
        bias: Option<&[f32]>,
        saved: &mut [f32],
        output: &mut [f32],
    ) {
        let NormShape { rows, columns, epsilon } = *shape;
        let part = self.rows_per_thread(rows);
        let parts = input.chunks(part * columns).zip(output.chunks_mut(part * columns));
        self.for_each(parts.zip(saved.chunks_mut(NormShape::SAVED * part)), |((input, output), saved)| {
            self.vectorised(
                #[inline(always)]
                || {
                    let rows = input.chunks_exact(columns).zip(output.chunks_exact_mut(columns));
                    for ((x, y), saved) in rows.zip(saved.chunks_exact_mut(NormShape::SAVED)) {
                        let mean = sum(columns, |at| x[at]) / columns as f32;
                        let variance = sum(columns, |at| (x[at] - mean) * (x[at] - mean)) / columns as f32;
                        let scale = 1.0 / (variance + epsilon).sqrt();
                        saved.copy_from_slice(&[mean, scale]);
                        for ((y, x), w) in y.iter_mut().zip(x).zip(weight) {
                            *y = (x - mean) * scale * w;
                        }
                        if let Some(bias) = bias {
                            y.iter_mut().zip(bias).for_each(|(y, bias)| *y += bias);
                        }
                    }
                },
            );
        });
    }

    fn layer_norm_backward_weight(
        &self,
        shape: &NormShape,
        input: &[f32],
        saved: &[f32],
        gradient: &[f32],
        weight_gradient: RowSums<&mut [f32]>,
    ) {
        let columns = shape.columns;
        let (section, mut arrays) = (weight_gradient.rows, weight_gradient.arrays(columns));
        LEAF_SUMS.with_borrow_mut(|stack| {
            add_up(section, stack, &mut arrays, |rows, sums| {
                self.vectorised(
                    #[inline(always)]
                    || {
                        for row in rows.clone() {
                            let (x, g) = (&input[row * columns..][..columns], &gradient[row * columns..]);
                            let saved = &saved[row * NormShape::SAVED..][..NormShape::SAVED];
                            let (mean, scale) = (saved[0], saved[1]);
                            for ((sum, x), g) in sums.iter_mut().zip(x).zip(g) {
                                *sum = ((x - mean) * scale).mul_add(*g, *sum);
                            }
                        }
                    },
                );
            });
        });
    }

    fn layer_norm_backward_input(
        &self,
        shape: &NormShape,
        input: &[f32],
        weight: &[f32],
        saved: &[f32],
        gradient: &[f32],
        input_gradient: &mut [f32],
    ) {
        let NormShape { rows, columns, .. } = *shape;
        let part = self.rows_per_thread(rows);
        let parts = input.chunks(part * columns).zip(gradient.chunks(part * columns));
        let parts = parts.zip(input_gradient.chunks_mut(part * columns));
        let parts = parts.zip(saved.chunks(NormShape::SAVED * part));
        self.for_each(parts, |(((input, gradient), input_gradient), saved)| {
            self.vectorised(
                #[inline(always)]
                || {
                    let rows = input.chunks_exact(columns).zip(gradient.chunks_exact(columns));
                    let rows = rows.zip(input_gradient.chunks_exact_mut(columns));
                    for (((x, dy), dx), saved) in rows.zip(saved.chunks_exact(NormShape::SAVED)) {
                        let (mean, scale) = (saved[0], saved[1]);
                        let (dy, weight) = (&dy[..columns], &weight[..columns]);
                        let mean_g = sum(columns, |at| dy[at] * weight[at]) / columns as f32;
                        let mean_gx = sum(columns, |at| dy[at] * weight[at] * ((x[at] - mean) * scale))
                            / columns as f32;
                        for (((dx, x), dy), w) in dx.iter_mut().zip(x).zip(dy).zip(weight) {
                            let normalised = (x - mean) * scale;
                            *dx = (dy * w - mean_g - normalised * mean_gx) * scale;
                        }
                    }
                },
            );
        });
    }
}
