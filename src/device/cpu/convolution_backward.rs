//! Convolution, backward: the gradients of the weights and of the inputs.
//!
//! Max-pooling hands a gradient to one of four outputs and ReLU to about half of those, so seven in eight of the products
//! of the textbook formula are with zero. Both functions here go through the *pooled* gradients that are not zero and
//! follow `route` to the place that each came from: an eighth of the work of the dense form.
//!
//! Both come down to one loop, [`add_blocks`]: a block of the result stays in registers while blocks of another array,
//! each times one gradient, are added to it. For the weights of one output channel the other array is the image, at the
//! places that its gradients came from; for the patch of the image under one pooled output it is the weights of each
//! channel, shifted as `route` says. Rows of a block are runs of consecutive elements, channels last, rounded up to whole
//! vectors; what is beyond is multiplied by zero or not read back.

use std::mem::take;

use pulp::{Simd, WithSimd};

use super::{Cpu, Scratch, with_scratch};
use crate::device::ConvolutionShape;

/// A gradient that is not zero, and where its block begins.
#[derive(Clone, Copy, Default)]
pub(super) struct Entry {
    gradient: f32,
    start: u32,
}

impl Cpu {
    /// See [`crate::device::Device::convolution_backward_weight`].
    pub(super) fn convolve_backward_weight(
        &self,
        shape: &ConvolutionShape,
        input: &[f32],
        [route, gradient]: [&[f32]; 2],
        weight_gradient: &mut [f32],
        accumulate: bool,
    ) {
        if !accumulate {
            weight_gradient.fill(0.0);
        }
        let part = self.rows_per_thread(shape.rows);
        let maps = gradient.chunks(shape.output_len() * part).zip(route.chunks(shape.output_len() * part));
        let parts = input.chunks(shape.image_len() * part).zip(maps);
        if self.threads == 1 {
            for (input, (gradient, route)) in parts {
                let weight_gradient = &mut *weight_gradient;
                with_scratch(|scratch| {
                    self.arch.dispatch(WeightGradient {
                        shape,
                        input,
                        route,
                        gradient,
                        weight_gradient,
                        scratch,
                    });
                });
            }
            return;
        }
        // one sum for each thread, added in order
        let mut sums: Vec<Vec<f32>> = parts.clone().map(|_| vec![0.0; weight_gradient.len()]).collect();
        self.for_each(parts.zip(&mut sums), |((input, (gradient, route)), weight_gradient)| {
            with_scratch(|scratch| {
                self.arch.dispatch(WeightGradient {
                    shape,
                    input,
                    route,
                    gradient,
                    weight_gradient,
                    scratch,
                });
            });
        });
        for sum in sums {
            weight_gradient.iter_mut().zip(sum).for_each(|(total, part)| *total += part);
        }
    }

    /// See [`crate::device::Device::convolution_backward_input`].
    pub(super) fn convolve_backward_input(
        &self,
        shape: &ConvolutionShape,
        weight: &[f32],
        [route, gradient]: [&[f32]; 2],
        input_gradient: &mut [f32],
    ) {
        let part = self.rows_per_thread(shape.rows);
        let maps = gradient.chunks(shape.output_len() * part).zip(route.chunks(shape.output_len() * part));
        let parts = input_gradient.chunks_mut(shape.image_len() * part).zip(maps);
        self.for_each(parts, |(input_gradient, (gradient, route))| {
            with_scratch(|scratch| {
                self.arch.dispatch(InputGradient { shape, weight, route, gradient, input_gradient, scratch });
            });
        });
    }
}

/// `start` for each of the four places in a window that `route` can name, or for the only one without pooling.
#[inline(always)]
fn starts(shape: &ConvolutionShape, start: impl Fn(usize, usize) -> usize) -> [u32; 4] {
    std::array::from_fn(
        |place| if shape.pool { start(place / 2, place % 2) as u32 } else { start(0, 0) as u32 },
    )
}

struct WeightGradient<'a> {
    shape: &'a ConvolutionShape,
    input: &'a [f32],
    route: &'a [f32],
    gradient: &'a [f32],
    weight_gradient: &'a mut [f32],
    scratch: &'a mut Scratch,
}

impl WithSimd for WeightGradient<'_> {
    type Output = ();

    /// Sums are kept as `[output, kernel row, run of the row]` and brought into the weights' order at the end.
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let ConvolutionShape { channels, width, outputs, kernel, .. } = *self.shape;
        let (image_len, output_len) = (self.shape.image_len(), self.shape.output_len());
        let vectors = (kernel * channels).div_ceil(S::F32_LANES);
        let stride = vectors * S::F32_LANES;
        let Scratch { first: mut sums, second: mut image, mut entries, mut lengths } = take(self.scratch);
        sums.clear();
        sums.resize(outputs * kernel * stride, 0.0);
        image.clear();
        image.resize(image_len + stride, 0.0); // rows are read in whole vectors
        let positions = output_len / outputs;
        entries.resize(output_len, Entry::default());
        lengths.resize(outputs, 0);
        let maps = self.gradient.chunks_exact(output_len).zip(self.route.chunks_exact(output_len));
        for (input, (gradient, route)) in self.input.chunks_exact(image_len).zip(maps) {
            image[..image_len].copy_from_slice(input);
            self.gather(gradient, route, &mut entries, &mut lengths);
            let lists = entries.chunks_exact(positions).zip(&lengths);
            for (sums, (list, &length)) in sums.chunks_exact_mut(kernel * stride).zip(lists) {
                let from = Blocks { values: &image, stride: width * channels };
                add_blocks(simd, &list[..length], from, (sums, stride), (kernel, vectors));
            }
        }
        for output in 0..outputs {
            for channel in 0..channels {
                for place in 0..kernel * kernel {
                    let (row, column) = (place / kernel, place % kernel);
                    let from = (output * kernel + row) * stride + column * channels + channel;
                    self.weight_gradient[(output * channels + channel) * kernel * kernel + place] +=
                        sums[from];
                }
            }
        }
        *self.scratch = Scratch { first: sums, second: image, entries, lengths };
    }
}

impl WeightGradient<'_> {
    /// For each output channel, the list of its gradients that are not zero, with the places in the image that they came
    /// from. No branch depends on a gradient: half of them are zero, at random.
    #[inline(always)]
    fn gather(&self, gradient: &[f32], route: &[f32], entries: &mut [Entry], lengths: &mut [usize]) {
        let ConvolutionShape { channels, width, outputs, .. } = *self.shape;
        let (window, columns) = (self.shape.window(), self.shape.output_width());
        let starts = starts(self.shape, |y, x| (y * width + x) * channels);
        let positions = columns * self.shape.output_height();
        lengths.fill(0);
        let values = gradient.chunks_exact(outputs).zip(route.chunks_exact(outputs));
        for (position, (gradient, route)) in values.enumerate() {
            let origin = (position / columns * window * width + position % columns * window) * channels;
            let lists = entries.chunks_exact_mut(positions).zip(lengths.iter_mut());
            for ((list, length), (&gradient, route)) in lists.zip(gradient.iter().zip(route)) {
                let start = origin as u32 + starts[route.to_bits() as usize % 4];
                list[*length] = Entry { gradient, start };
                *length += usize::from(gradient != 0.0);
            }
        }
    }
}

struct InputGradient<'a> {
    shape: &'a ConvolutionShape,
    weight: &'a [f32],
    route: &'a [f32],
    gradient: &'a [f32],
    input_gradient: &'a mut [f32],
    scratch: &'a mut Scratch,
}

impl WithSimd for InputGradient<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let ConvolutionShape { channels, width, outputs, kernel, .. } = *self.shape;
        let (image_len, output_len) = (self.shape.image_len(), self.shape.output_len());
        let (window, columns) = (self.shape.window(), self.shape.output_width());
        // the patch under a window of outputs, and the weights with as many zeros around them as it can shift
        let shift = window - 1;
        let vectors = ((kernel + shift) * channels).div_ceil(S::F32_LANES);
        let stride = vectors * S::F32_LANES + shift * channels;
        let padded_rows = kernel + 2 * shift;
        let starts = starts(self.shape, |y, x| (shift - y) * stride + (shift - x) * channels);
        let Scratch { first: mut packed, second: mut image, mut entries, lengths } = take(self.scratch);
        self.pack(&mut packed, (padded_rows, stride), shift);
        image.resize(image_len + vectors * S::F32_LANES, 0.0); // rows are written in whole vectors
        entries.resize(outputs, Entry::default());
        let maps = self.gradient.chunks_exact(output_len).zip(self.route.chunks_exact(output_len));
        for (input_gradient, (gradient, route)) in self.input_gradient.chunks_exact_mut(image_len).zip(maps) {
            image.fill(0.0);
            let positions = gradient.chunks_exact(outputs).zip(route.chunks_exact(outputs));
            for (position, (gradient, route)) in positions.enumerate() {
                let mut num = 0;
                for (output, (&gradient, route)) in gradient.iter().zip(route).enumerate() {
                    let start = (output * padded_rows * stride) as u32 + starts[route.to_bits() as usize % 4];
                    entries[num] = Entry { gradient, start };
                    num += usize::from(gradient != 0.0);
                }
                let (row, column) = (position / columns * window, position % columns * window);
                let patch = &mut image[(row * width + column) * channels..];
                let from = Blocks { values: &packed, stride };
                add_blocks(simd, &entries[..num], from, (patch, width * channels), (kernel + shift, vectors));
            }
            input_gradient.copy_from_slice(&image[..image_len]);
        }
        *self.scratch = Scratch { first: packed, second: image, entries, lengths };
    }
}

impl InputGradient<'_> {
    /// Weights as `[output, kernel row, run of the row]`, with `shift` rows of zeros above and below and `shift` columns
    /// before, and zeros up to `stride` after.
    fn pack(&self, packed: &mut Vec<f32>, (padded_rows, stride): (usize, usize), shift: usize) {
        let ConvolutionShape { channels, outputs, kernel, .. } = *self.shape;
        packed.clear();
        packed.resize(outputs * padded_rows * stride, 0.0);
        for output in 0..outputs {
            for channel in 0..channels {
                for place in 0..kernel * kernel {
                    let (row, column) = (place / kernel + shift, place % kernel + shift);
                    packed[(output * padded_rows + row) * stride + column * channels + channel] =
                        self.weight[(output * channels + channel) * kernel * kernel + place];
                }
            }
        }
    }
}

/// An array of which blocks are read, with the distance between rows of a block.
#[derive(Clone, Copy)]
struct Blocks<'a> {
    values: &'a [f32],
    stride: usize,
}

/// `target += Σ gradient · block` over `entries`, for blocks of `rows × vectors` vectors.
#[inline(always)]
fn add_blocks<S: Simd>(
    simd: S,
    entries: &[Entry],
    from: Blocks<'_>,
    (target, target_stride): (&mut [f32], usize),
    (rows, vectors): (usize, usize),
) {
    let few_registers = S::REGISTER_COUNT < 32;
    let mut row = 0;
    while row < rows {
        let height = match rows - row {
            _ if few_registers => 1,
            5 | 7.. => 5,
            3.. => 3,
            _ => 1,
        };
        let mut vector = 0;
        while vector < vectors {
            let width = (vectors - vector).min(4);
            let offset = vector * S::F32_LANES;
            let from = Blocks { values: &from.values[row * from.stride + offset..], ..from };
            let into = (&mut target[row * target_stride + offset..], target_stride);
            match (height, width) {
                (5, 1) => add_block::<S, 5, 1>(simd, entries, from, into),
                (5, 2) => add_block::<S, 5, 2>(simd, entries, from, into),
                (5, 3) => add_block::<S, 5, 3>(simd, entries, from, into),
                (5, _) => add_block::<S, 5, 4>(simd, entries, from, into),
                (3, 1) => add_block::<S, 3, 1>(simd, entries, from, into),
                (3, 2) => add_block::<S, 3, 2>(simd, entries, from, into),
                (3, 3) => add_block::<S, 3, 3>(simd, entries, from, into),
                (3, _) => add_block::<S, 3, 4>(simd, entries, from, into),
                (_, 1) => add_block::<S, 1, 1>(simd, entries, from, into),
                (_, 2) => add_block::<S, 1, 2>(simd, entries, from, into),
                (_, 3) => add_block::<S, 1, 3>(simd, entries, from, into),
                _ => add_block::<S, 1, 4>(simd, entries, from, into),
            }
            vector += width;
        }
        row += height;
    }
}

/// [`add_blocks`] for a block that fits the registers.
#[inline(always)]
fn add_block<S: Simd, const ROWS: usize, const VECTORS: usize>(
    simd: S,
    entries: &[Entry],
    from: Blocks<'_>,
    (target, target_stride): (&mut [f32], usize),
) {
    let length = VECTORS * S::F32_LANES;
    let mut sums: [[S::f32s; VECTORS]; ROWS] = std::array::from_fn(|r| {
        let (row, _) = S::as_simd_f32s(&target[r * target_stride..][..length]);
        std::array::from_fn(|v| row[v])
    });
    for entry in entries {
        let gradient = simd.splat_f32s(entry.gradient);
        let block = &from.values[entry.start as usize..][..(ROWS - 1) * from.stride + length];
        for (r, sums) in sums.iter_mut().enumerate() {
            let (row, _) = S::as_simd_f32s(&block[r * from.stride..][..length]);
            for (v, sum) in sums.iter_mut().enumerate() {
                *sum = simd.mul_add_e_f32s(gradient, row[v], *sum);
            }
        }
    }
    for (r, sums) in sums.iter().enumerate() {
        let (row, _) = S::as_mut_simd_f32s(&mut target[r * target_stride..][..length]);
        row.copy_from_slice(sums);
    }
}
