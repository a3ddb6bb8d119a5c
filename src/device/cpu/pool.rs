//! Pooling on its own, in plain loops: images are split among the threads.

use std::ops::Range;

use super::Cpu;
use crate::device::{PoolOperations, PoolShape};

impl PoolOperations for Cpu {
    /// `argmax` holds the place in the window as the bits of the `f32`.
    fn max_pool_forward(&self, shape: &PoolShape, input: &[f32], argmax: &mut [f32], output: &mut [f32]) {
        let part = self.rows_per_thread(shape.rows);
        let pooled = part * shape.output_len();
        let parts = input.chunks(part * shape.image_len()).zip(argmax.chunks_mut(pooled));
        self.for_each(parts.zip(output.chunks_mut(pooled)), |((input, argmax), output)| {
            for_each_window(shape, input.len() / shape.image_len(), |into, window| {
                let own = into..into + shape.channels;
                for (number, (place, from)) in window.elements().enumerate() {
                    let pixel = &input[from..from + shape.channels];
                    let best = output[own.clone()].iter_mut().zip(&mut argmax[own.clone()]);
                    for (value, (best, chosen)) in pixel.iter().zip(best) {
                        // NaN propagates, as in PyTorch
                        if number == 0 || value > best || value.is_nan() {
                            (*best, *chosen) = (*value, f32::from_bits(place as u32));
                        }
                    }
                }
            });
        });
    }

    fn max_pool_backward(
        &self,
        shape: &PoolShape,
        argmax: &[f32],
        gradient: &[f32],
        input_gradient: &mut [f32],
    ) {
        let part = self.rows_per_thread(shape.rows);
        let pooled = part * shape.output_len();
        let parts = argmax.chunks(pooled).zip(gradient.chunks(pooled));
        let parts = parts.zip(input_gradient.chunks_mut(part * shape.image_len()));
        self.for_each(parts, |((argmax, gradient), input_gradient)| {
            input_gradient.fill(0.0);
            for_each_window(shape, gradient.len() / shape.output_len(), |from, window| {
                for channel in 0..shape.channels {
                    let into = window.index(argmax[from + channel].to_bits() as usize) + channel;
                    input_gradient[into] += gradient[from + channel];
                }
            });
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
                    for_each_window(shape, input.len() / shape.image_len(), |into, window| {
                        for (_, from) in window.elements() {
                            let pixel = &input[from..from + shape.channels];
                            output[into..].iter_mut().zip(pixel).for_each(|(sum, value)| *sum += value);
                        }
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
                    for_each_window(shape, gradient.len() / shape.output_len(), |from, window| {
                        let own = &gradient[from..from + shape.channels];
                        for (_, into) in window.elements() {
                            let pixel = &mut input_gradient[into..into + shape.channels];
                            let both = pixel.iter_mut().zip(own);
                            both.for_each(|(pixel, g)| *pixel += g / shape.window_len() as f32);
                        }
                    });
                },
            );
        });
    }
}

/// The place of a window in an image.
struct WindowPlace<'a> {
    shape: &'a PoolShape,
    /// The index of the first element of the image.
    image: usize,
    /// The row and the column of its first element, counted with the padding.
    start: [usize; 2],
}

impl WindowPlace<'_> {
    /// Returns the index of the first channel of element `place`, in reading order.
    #[inline(always)]
    fn index(&self, place: usize) -> usize {
        let PoolShape { width, channels, window_width, padding, .. } = *self.shape;
        let [row, column] = [place / window_width, place % window_width];
        let (row, column) = (self.start[0] + row - padding, self.start[1] + column - padding);
        self.image + (row * width + column) * channels
    }

    /// Returns the elements that are in the image: the place of each, and the index of its first channel.
    #[inline(always)]
    fn elements(&self) -> impl Iterator<Item = (usize, usize)> {
        let PoolShape { height, width, window_height, window_width, padding, .. } = *self.shape;
        let inside = |start: usize, len: usize, window: usize| -> Range<usize> {
            padding.saturating_sub(start)..window.min(len + padding - start)
        };
        let rows = inside(self.start[0], height, window_height);
        let columns = inside(self.start[1], width, window_width);
        let places = rows.flat_map(move |row| columns.clone().map(move |column| row * window_width + column));
        places.map(|place| (place, self.index(place)))
    }
}

/// Calls `visit` with the index of the first channel of every output of `rows` images, and its window.
#[inline(always)]
fn for_each_window(shape: &PoolShape, rows: usize, mut visit: impl FnMut(usize, WindowPlace<'_>)) {
    let mut at = 0;
    for image in 0..rows {
        for row in 0..shape.output_height() {
            for column in 0..shape.output_width() {
                let start = [row * shape.stride_height, column * shape.stride_width];
                visit(at, WindowPlace { shape, image: image * shape.image_len(), start });
                at += shape.channels;
            }
        }
    }
}
