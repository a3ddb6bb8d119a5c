//! Pooling on its own, in plain loops: images are split among the threads.

use super::Cpu;
use crate::device::{PoolOperations, PoolShape};

impl PoolOperations for Cpu {
    /// `argmax` holds the place in the window as the bits of the `f32`.
    fn max_pool_forward(&self, shape: &PoolShape, input: &[f32], argmax: &mut [f32], output: &mut [f32]) {
        let mut at = 0;
        for_each_window(shape, shape.rows, |origin| {
            let (mut best, mut place) = (input[origin], 0);
            for candidate in 1..shape.window_len() {
                let value = input[origin + offset(shape, candidate)];
                // NaN propagates, as in PyTorch
                if value > best || value.is_nan() {
                    (best, place) = (value, candidate);
                }
            }
            output[at] = best;
            argmax[at] = f32::from_bits(place as u32);
            at += 1;
        });
    }

    fn max_pool_backward(
        &self,
        shape: &PoolShape,
        argmax: &[f32],
        gradient: &[f32],
        input_gradient: &mut [f32],
    ) {
        input_gradient.fill(0.0);
        let mut at = 0;
        for_each_window(shape, shape.rows, |origin| {
            input_gradient[origin + offset(shape, argmax[at].to_bits() as usize)] = gradient[at];
            at += 1;
        });
    }

    fn average_pool_forward(&self, shape: &PoolShape, input: &[f32], output: &mut [f32]) {
        let part = self.rows_per_thread(shape.rows);
        let parts = input.chunks(part * shape.image_len()).zip(output.chunks_mut(part * shape.output_len()));
        self.for_each(parts, |(input, output)| {
            self.vectorised(
                #[inline(always)]
                || {
                    output.fill(0.0);
                    for_each_pixel(shape, input.len() / shape.image_len(), |from, into| {
                        let pixel = &input[from..from + shape.channels];
                        output[into..].iter_mut().zip(pixel).for_each(|(sum, value)| *sum += value);
                    });
                    output.iter_mut().for_each(|sum| *sum /= shape.window_len() as f32);
                },
            );
        });
    }

    fn average_pool_backward(&self, shape: &PoolShape, gradient: &[f32], input_gradient: &mut [f32]) {
        let part = self.rows_per_thread(shape.rows);
        let parts = gradient.chunks(part * shape.output_len());
        let parts = parts.zip(input_gradient.chunks_mut(part * shape.image_len()));
        self.for_each(parts, |(gradient, input_gradient)| {
            self.vectorised(
                #[inline(always)]
                || {
                    input_gradient.fill(0.0);
                    for_each_pixel(shape, gradient.len() / shape.output_len(), |into, from| {
                        let pixel = &mut input_gradient[into..into + shape.channels];
                        let window = &gradient[from..from + shape.channels];
                        pixel
                            .iter_mut()
                            .zip(window)
                            .for_each(|(pixel, g)| *pixel = g / shape.window_len() as f32);
                    });
                },
            );
        });
    }
}

/// Returns the distance from a window's first element to its element `place`, in reading order.
fn offset(shape: &PoolShape, place: usize) -> usize {
    (place / shape.window_width * shape.width + place % shape.window_width) * shape.channels
}

/// Calls `visit` with the index of the first element of every window of `rows` images, in the order of
/// the outputs.
#[inline(always)]
fn for_each_window(shape: &PoolShape, rows: usize, mut visit: impl FnMut(usize)) {
    let PoolShape { height, width, channels, window_height, window_width, .. } = *shape;
    for image in 0..rows {
        for row in 0..shape.output_height() {
            for column in 0..shape.output_width() {
                let origin =
                    ((image * height + row * window_height) * width + column * window_width) * channels;
                (origin..origin + channels).for_each(&mut visit);
            }
        }
    }
}

/// Calls `visit` with the index of the first channel of every pixel in a window, and that of the first
/// channel of the window's output.
#[inline(always)]
fn for_each_pixel(shape: &PoolShape, rows: usize, mut visit: impl FnMut(usize, usize)) {
    let PoolShape { height, width, channels, window_height, window_width, .. } = *shape;
    let (output_height, output_width) = (shape.output_height(), shape.output_width());
    for image in 0..rows {
        for row in 0..output_height * window_height {
            for column in 0..output_width * window_width {
                let window =
                    (image * output_height + row / window_height) * output_width + column / window_width;
                visit(((image * height + row) * width + column) * channels, window * channels);
            }
        }
    }
}
