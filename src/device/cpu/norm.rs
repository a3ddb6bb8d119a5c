//! Normalisations: vectors and images are split among the threads.

use std::cell::RefCell;

use super::Cpu;
use super::group_norm::{group_forward, group_input_gradient, group_weight_gradient};
use super::leaf_sums::{LeafSums, add_up};
use super::loops::sum_of;
use crate::device::{GroupNormShape, NormOperations, NormShape, RowSums};

thread_local! {
    static LEAF_SUMS: RefCell<LeafSums> = RefCell::default();
    /// Values of each channel.
    static CHANNELS: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Runs `work` with memory for `len` values, which operations of this thread reuse.
fn with_channels(len: usize, work: impl FnOnce(&mut [f32])) {
    CHANNELS.with_borrow_mut(|memory| {
        memory.resize(len, 0.0);
        work(memory);
    });
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
        let NormShape { rows, columns, epsilon, is_centred } = *shape;
        let part = self.rows_per_thread(rows);
        let parts = input.chunks(part * columns).zip(output.chunks_mut(part * columns));
        self.for_each(parts.zip(saved.chunks_mut(NormShape::SAVED * part)), |((input, output), saved)| {
            self.vectorised(
                #[inline(always)]
                || {
                    let rows = input.chunks_exact(columns).zip(output.chunks_exact_mut(columns));
                    for ((x, y), saved) in rows.zip(saved.chunks_exact_mut(NormShape::SAVED)) {
                        let mean = if is_centred { sum_of([x], |[x]| x) / columns as f32 } else { 0.0 };
                        let variance = sum_of([x], |[x]| (x - mean) * (x - mean)) / columns as f32;
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
        self.add_products(
            shape.columns,
            [input, gradient],
            weight_gradient,
            #[inline(always)]
            |row| (saved[row * NormShape::SAVED], saved[row * NormShape::SAVED + 1]),
        );
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
        let NormShape { rows, columns, is_centred, .. } = *shape;
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
                        let mean_g = sum_of([dy, weight], |[dy, w]| dy * w) / columns as f32;
                        let mean_g = if is_centred { mean_g } else { 0.0 };
                        let mean_gx = sum_of([dy, weight, x], |[dy, w, x]| dy * w * ((x - mean) * scale))
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

    fn group_norm_forward(
        &self,
        shape: &GroupNormShape,
        input: &[f32],
        weight: &[f32],
        bias: Option<&[f32]>,
        saved: &mut [f32],
        output: &mut [f32],
    ) {
        let part = self.rows_per_thread(shape.rows) * shape.image_len();
        let images = input.chunks(part).zip(output.chunks_mut(part));
        let saved = saved.chunks_mut(self.rows_per_thread(shape.rows) * shape.saved_len());
        self.for_each(images.zip(saved), |((input, output), saved)| {
            with_channels(2 * shape.channels, |channels| {
                self.vectorised(
                    #[inline(always)]
                    || {
                        let images = input.chunks_exact(shape.image_len());
                        let images = images.zip(output.chunks_exact_mut(shape.image_len()));
                        for ((x, y), saved) in images.zip(saved.chunks_exact_mut(shape.saved_len())) {
                            group_forward(shape, weight, bias, [channels, saved], x, y);
                        }
                    },
                );
            });
        });
    }

    fn group_norm_backward_weight(
        &self,
        shape: &GroupNormShape,
        input: &[f32],
        saved: &[f32],
        gradient: &[f32],
        weight_gradient: RowSums<&mut [f32]>,
    ) {
        let columns = shape.channels;
        let (section, mut arrays) = (weight_gradient.rows, weight_gradient.arrays(columns));
        LEAF_SUMS.with_borrow_mut(|stack| {
            add_up(section, stack, &mut arrays, |images, sums| {
                with_channels(3 * columns, |channels| {
                    self.vectorised(
                        #[inline(always)]
                        || {
                            for image in images.clone() {
                                let of = image * shape.image_len()..(image + 1) * shape.image_len();
                                let saved = &saved[image * shape.saved_len()..][..shape.saved_len()];
                                let [x, dy] = [&input[of.clone()], &gradient[of]];
                                group_weight_gradient(shape, saved, channels, [x, dy], sums);
                            }
                        },
                    );
                });
            });
        });
    }

    fn group_norm_backward_input(
        &self,
        shape: &GroupNormShape,
        input: &[f32],
        weight: &[f32],
        saved: &[f32],
        gradient: &[f32],
        input_gradient: &mut [f32],
    ) {
        let part = self.rows_per_thread(shape.rows) * shape.image_len();
        let images = input.chunks(part).zip(gradient.chunks(part)).zip(input_gradient.chunks_mut(part));
        let saved = saved.chunks(self.rows_per_thread(shape.rows) * shape.saved_len());
        self.for_each(images.zip(saved), |(((input, gradient), input_gradient), saved)| {
            with_channels(4 * shape.channels, |channels| {
                self.vectorised(
                    #[inline(always)]
                    || {
                        let images = input.chunks_exact(shape.image_len());
                        let images = images.zip(gradient.chunks_exact(shape.image_len()));
                        let images = images.zip(input_gradient.chunks_exact_mut(shape.image_len()));
                        for (((x, dy), dx), saved) in images.zip(saved.chunks_exact(shape.saved_len())) {
                            group_input_gradient(shape, weight, saved, channels, [x, dy], dx);
                        }
                    },
                );
            });
        });
    }

    fn scale_columns(&self, input: &[f32], weight: &[f32], output: &mut [f32]) {
        let columns = weight.len();
        let part = self.rows_per_thread(input.len() / columns) * columns;
        self.for_each(input.chunks(part).zip(output.chunks_mut(part)), |(input, output)| {
            self.vectorised(
                #[inline(always)]
                || {
                    for (x, y) in input.chunks_exact(columns).zip(output.chunks_exact_mut(columns)) {
                        y.iter_mut().zip(x).zip(weight).for_each(|((y, x), w)| *y = x * w);
                    }
                },
            );
        });
    }

    fn scale_columns_backward_weight(
        &self,
        columns: usize,
        input: &[f32],
        gradient: &[f32],
        weight_gradient: RowSums<&mut [f32]>,
    ) {
        self.add_products(columns, [input, gradient], weight_gradient, |_| (0.0, 1.0));
    }
}

impl Cpu {
    /// Adds up (x − mean) · scale · gradient over the vectors x of `columns` inputs, where `statistics`
    /// returns the mean and the scale of a vector by its number.
    fn add_products(
        &self,
        columns: usize,
        [input, gradient]: [&[f32]; 2],
        weight_gradient: RowSums<&mut [f32]>,
        statistics: impl Fn(usize) -> (f32, f32),
    ) {
        let (section, mut arrays) = (weight_gradient.rows, weight_gradient.arrays(columns));
        LEAF_SUMS.with_borrow_mut(|stack| {
            add_up(section, stack, &mut arrays, |rows, sums| {
                self.vectorised(
                    #[inline(always)]
                    || {
                        for row in rows.clone() {
                            let (x, g) = (&input[row * columns..][..columns], &gradient[row * columns..]);
                            let (mean, scale) = statistics(row);
                            for ((sum, x), g) in sums.iter_mut().zip(x).zip(g) {
                                *sum = ((x - mean) * scale).mul_add(*g, *sum);
                            }
                        }
                    },
                );
            });
        });
    }
}
