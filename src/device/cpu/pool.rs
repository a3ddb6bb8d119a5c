//! Pooling on its own, in plain loops: images are split among the threads.

use std::ops::Range;

use super::Cpu;
use crate::device::{PoolOperations, PoolShape};

/// The channels whose sums are formed together.
const LANES: usize = 32;

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

    /// Adds in `f64`: over an image of 2048 × 2048 of one colour, a chain of `f32` errs by 4 %, and sums of
    /// rows by up to 4e-5.
    fn average_pool_forward(&self, shape: &PoolShape, input: &[f32], output: &mut [f32]) {
        let part = self.rows_per_thread(shape.rows);
        let parts = input.chunks(part * shape.image_len()).zip(output.chunks_mut(part * shape.output_len()));
        self.for_each(parts, |(input, output)| {
            self.vectorised(
                #[inline(always)]
                || {
                    for_each_window(shape, input.len() / shape.image_len(), |into, window| {
                        for first in (0..shape.channels).step_by(LANES) {
                            let channels = first..shape.channels.min(first + LANES);
                            let mut sums = [0.0_f64; LANES];
                            for (_, from) in window.elements() {
                                let pixel = &input[from..][channels.clone()];
                                sums.iter_mut().zip(pixel).for_each(|(sum, value)| *sum += f64::from(*value));
                            }
                            let means = output[into..][channels].iter_mut().zip(sums);
                            means.for_each(|(mean, sum)| *mean = (sum / shape.window_len() as f64) as f32);
                        }
                    });
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::device::cpu::tests::{assert_close, poison, random};

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(60))]

        #[test]
        fn pools_agree_with_the_formula(
            rows in 1..6_usize,
            channels in 1..70_usize,
            window in (1..5_usize, 1..5_usize),
            stride in (1..4_usize, 1..4_usize),
            more in (0..8_usize, 0..8_usize),
            padding in 0..3_usize,
        ) {
            check_pools(PoolShape {
                rows,
                window_height: window.0,
                window_width: window.1,
                stride_height: stride.0,
                stride_width: stride.1,
                padding: padding.min(window.0 / 2).min(window.1 / 2),
                ..PoolShape::whole(window.0 + more.0, window.1 + more.1, channels)
            });
        }
    }

    /// Returns the indices in the input of the elements of the window of output `at`, in reading order.
    fn window_of(shape: &PoolShape, at: usize) -> Vec<usize> {
        let PoolShape { height, width, channels, padding, .. } = *shape;
        let (place, channel) = (at / channels, at % channels);
        let (row, column) =
            (place / shape.output_width() % shape.output_height(), place % shape.output_width());
        let image = at / shape.output_len() * height;
        let mut found = Vec::new();
        for down in 0..shape.window_height {
            for right in 0..shape.window_width {
                // counted with the padding
                let (y, x) = (row * shape.stride_height + down, column * shape.stride_width + right);
                if (padding..padding + height).contains(&y) && (padding..padding + width).contains(&x) {
                    found.push(((image + y - padding) * width + x - padding) * channels + channel);
                }
            }
        }
        found
    }

    fn check_pools(shape: PoolShape) {
        let (len, pooled) = (shape.rows * shape.image_len(), shape.rows * shape.output_len());
        let (input, gradient) = (random(len, 1), random(pooled, 2));
        let [mut maxima, mut means] = [(); 2].map(|()| vec![0.0_f64; pooled]);
        let [mut maxima_back, mut means_back] = [(); 2].map(|()| vec![0.0_f64; len]);
        for (at, gradient) in gradient.iter().enumerate() {
            let (window, gradient) = (window_of(&shape, at), f64::from(*gradient));
            let larger = |best: usize, from: usize| if input[from] > input[best] { from } else { best };
            let best = window.iter().copied().reduce(larger).unwrap();
            maxima[at] = f64::from(input[best]);
            maxima_back[best] += gradient;
            for from in window {
                means[at] += f64::from(input[from]) / shape.window_len() as f64;
                means_back[from] += gradient / shape.window_len() as f64;
            }
        }
        for cpu in [1, 2, 3].map(|threads| Cpu::new(threads).unwrap()) {
            let (mut output, mut argmax, mut back) = (poison(pooled), poison(pooled), poison(len));
            cpu.max_pool_forward(&shape, &input, &mut argmax, &mut output);
            assert_close(&output, &maxima, 0.0);
            cpu.max_pool_backward(&shape, &argmax, &gradient, &mut back);
            assert_close(&back, &maxima_back, 1e-5);
            let (mut output, mut back) = (poison(pooled), poison(len));
            cpu.average_pool_forward(&shape, &input, &mut output);
            assert_close(&output, &means, 1e-6);
            cpu.average_pool_backward(&shape, &gradient, &mut back);
            assert_close(&back, &means_back, 1e-5);
        }
    }

    #[test]
    fn the_mean_of_a_large_image_is_close() {
        let shape = PoolShape { rows: 1, ..PoolShape::whole(2048, 2048, 1) };
        for value in [0.3_f32, 0.7] {
            let (image, mut mean) = (vec![value; shape.image_len()], poison(1));
            Cpu::new(1).unwrap().average_pool_forward(&shape, &image, &mut mean);
            assert_close(&mean, &[f64::from(value)], 1e-6);
        }
    }

    /// Returns the shape of a pooling of an image with one channel, by square windows.
    fn windows(height: usize, width: usize, size: usize, stride: usize, padding: usize) -> PoolShape {
        PoolShape {
            rows: 1,
            window_height: size,
            window_width: size,
            stride_height: stride,
            stride_width: stride,
            padding,
            ..PoolShape::whole(height, width, 1)
        }
    }

    /// The figures are PyTorch's: `MaxPool2d(3, 2, 1)` and `AvgPool2d(3, 2, 1)`.
    #[test]
    fn windows_that_overlap_give_pytorchs_figures() {
        let (shape, cpu) = (windows(5, 4, 3, 2, 1), Cpu::new(1).unwrap());
        let input: Vec<f32> = (0..20).map(|at| (at * 7 % 11) as f32).collect();
        let gradient = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        let (mut output, mut argmax, mut back) = (poison(6), poison(6), poison(20));
        cpu.max_pool_forward(&shape, &input, &mut argmax, &mut output);
        assert_eq!(output, [7.0, 10.0, 8.0, 10.0, 9.0, 10.0]);
        cpu.max_pool_backward(&shape, &argmax, &gradient, &mut back);
        let mut expected = [0.0; 20];
        for (at, gradient) in [(1, 1.0), (3, 2.0), (9, 3.0), (14, 10.0), (17, 5.0)] {
            expected[at] = gradient;
        }
        assert_eq!(back, expected);
        cpu.average_pool_forward(&shape, &input, &mut output);
        let ninths = |values: &[f32]| values.iter().map(|value| (value * 9.0).round()).collect::<Vec<f32>>();
        assert_eq!(ninths(&output), [15.0, 36.0, 27.0, 47.0, 21.0, 34.0]);
        cpu.average_pool_backward(&shape, &gradient, &mut back);
        let expected =
            [1, 3, 2, 2, 4, 10, 6, 6, 3, 7, 4, 4, 8, 18, 10, 10, 5, 11, 6, 6].map(|ninths| ninths as f32);
        assert_eq!(ninths(&back), expected);
    }

    #[test]
    fn pooling_takes_the_first_maximum_and_hands_the_gradient_back_to_it() {
        let shape = windows(3, 5, 2, 2, 0);
        let input = [1.0, 5.0, 2.0, 2.0, 9.0, 5.0, 0.0, 2.0, 2.0, 9.0, 9.0, 9.0, 9.0, 9.0, 9.0];
        let (mut output, mut argmax, mut back) = (poison(2), poison(2), poison(15));
        let cpu = Cpu::new(1).unwrap();
        cpu.max_pool_forward(&shape, &input, &mut argmax, &mut output);
        assert_eq!(output, [5.0, 2.0]);
        cpu.max_pool_backward(&shape, &argmax, &[0.5, 0.25], &mut back);
        let mut expected = [0.0; 15];
        (expected[1], expected[2]) = (0.5, 0.25);
        assert_eq!(back, expected);
    }
}
