//! Convolution, backward: the gradients of the weights and of the inputs.
//!
//! Max-pooling passes a gradient to one of four outputs and ReLU to about half of those, so seven
//! in eight of the products of the textbook formula are with zero. Both functions here go through
//! the *pooled* gradients that are not zero and look up in `argmax` which output each belongs to:
//! an eighth of the work of the dense form.
//!
//! Both use one loop, [`add_blocks`]: a block of the result stays in registers while blocks of
//! another array, each times one gradient, are added to it. For the weights of one output channel
//! the other array is the image, at the places that the gradients belong to; for the patch of the
//! image under one pooled output it is the weights of each channel, shifted as `argmax` says. Rows
//! of a block are runs of consecutive elements, channels last, rounded up to whole vectors; the
//! excess is multiplied by zero or not read back.

use std::mem::take;
use std::ops::Range;

use pulp::{Simd, WithSimd};

use super::padding::{ConvolutionScratch, SparseGradient, pad, rows_inside};
use crate::device::ConvolutionShape;
use crate::sums::Section;

/// Returns `start` for each of the four places in a window, or for the only one without pooling.
#[inline(always)]
fn starts(shape: &ConvolutionShape, start: impl Fn(usize, usize) -> usize) -> [u32; 4] {
    std::array::from_fn(
        |place| if shape.pool { start(place / 2, place % 2) as u32 } else { start(0, 0) as u32 },
    )
}

/// The gradient of the weights of some outputs, added up in canonical order.
pub(super) struct WeightGradient<'a, 'b> {
    pub(super) shape: &'a ConvolutionShape,
    pub(super) input: &'a [f32],
    pub(super) argmax: &'a [f32],
    pub(super) gradient: &'a [f32],
    pub(super) outputs: Range<usize>,
    /// The images among those of the batch.
    pub(super) rows: Section,
    /// The values on the stack, `[outputs, channels, kernel, kernel]` each.
    pub(super) sums: &'a mut [&'b mut [f32]],
    pub(super) scratch: &'a mut ConvolutionScratch,
}

impl WithSimd for WeightGradient<'_, '_> {
    type Output = ();

    /// Keeps sums as `[output, kernel row, run of the row]`, in the order of the weights before and
    /// after.
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let ConvolutionShape { channels, kernel, .. } = *self.shape;
        let (image_len, output_len) = (self.shape.image_len(), self.shape.output_len());
        let width = self.shape.padded_width();
        let vectors = (kernel * channels).div_ceil(S::F32_LANES);
        let stride = vectors * S::F32_LANES;
        let ConvolutionScratch { first: mut sums, second: mut image, mut nonzero, mut lengths } =
            take(self.scratch);
        let len = self.outputs.len() * kernel * stride;
        let mut depth = self.rows.depth_before();
        sums.clear();
        sums.resize(depth * len, 0.0);
        for (sums, weights) in sums.chunks_exact_mut(len).zip(&mut *self.sums) {
            for_each_weight(sums, weights, self.shape, stride, |sum, weight| *sum = *weight);
        }
        image.clear();
        image.resize(self.shape.padded_len() + stride, 0.0); // rows are read in whole vectors
        let positions = output_len / self.shape.outputs;
        nonzero.resize(self.outputs.len() * positions, SparseGradient::default());
        lengths.resize(self.outputs.len(), 0);
        for step in self.rows.steps() {
            if !step.continues {
                depth += 1;
                sums.resize(depth * len, 0.0);
            }
            let of = |values: usize| step.first * values..step.end * values;
            let (gradient, argmax) = (&self.gradient[of(output_len)], &self.argmax[of(output_len)]);
            let maps = gradient.chunks_exact(output_len).zip(argmax.chunks_exact(output_len));
            for (input, (gradient, argmax)) in self.input[of(image_len)].chunks_exact(image_len).zip(maps) {
                pad(self.shape, input, &mut image);
                self.gather(gradient, argmax, &mut nonzero, &mut lengths);
                let lists = nonzero.chunks_exact(positions).zip(&lengths);
                let outputs = sums[(depth - 1) * len..].chunks_exact_mut(kernel * stride);
                for (sums, (list, &length)) in outputs.zip(lists) {
                    let from = Blocks { values: &image, stride: width * channels };
                    let target = TargetBlock { values: sums, stride, rows: kernel, vectors };
                    add_blocks(simd, &list[..length], from, target);
                }
            }
            for _ in 0..step.num_merges {
                let (left, right) = sums[(depth - 2) * len..].split_at_mut(len);
                left.iter_mut().zip(right).for_each(|(left, right)| *left += *right);
                depth -= 1;
                sums.truncate(depth * len);
            }
        }
        for (sums, weights) in sums.chunks_exact_mut(len).zip(&mut *self.sums) {
            for_each_weight(sums, weights, self.shape, stride, |sum, weight| *weight = *sum);
        }
        *self.scratch = ConvolutionScratch { first: sums, second: image, nonzero, lengths };
    }
}

/// Calls `visit` with each weight's sum, in `[output, kernel row, run of the row]` with rows of
/// `stride`, and the weight's gradient.
#[inline(always)]
fn for_each_weight(
    sums: &mut [f32],
    weight_gradient: &mut [f32],
    shape: &ConvolutionShape,
    stride: usize,
    visit: impl Fn(&mut f32, &mut f32),
) {
    let ConvolutionShape { channels, kernel, .. } = *shape;
    for (filter, weights) in weight_gradient.chunks_exact_mut(kernel * kernel).enumerate() {
        let (output, channel) = (filter / channels, filter % channels);
        for (row, weights) in weights.chunks_exact_mut(kernel).enumerate() {
            let from = (output * kernel + row) * stride + channel;
            let run = sums[from..].iter_mut().step_by(channels);
            run.zip(weights).for_each(|(sum, weight)| visit(sum, weight));
        }
    }
}

impl WeightGradient<'_, '_> {
    /// Lists, for each of the output channels, the gradients that are not zero with their places in the
    /// image. No branch depends on a gradient: half of them are zero, at random.
    #[inline(always)]
    fn gather(
        &self,
        gradient: &[f32],
        argmax: &[f32],
        nonzero: &mut [SparseGradient],
        lengths: &mut [usize],
    ) {
        let ConvolutionShape { channels, stride, outputs, .. } = *self.shape;
        let width = self.shape.padded_width();
        let (window, columns) = (self.shape.window(), self.shape.output_width());
        let starts = starts(self.shape, |y, x| (y * width + x) * channels);
        let positions = columns * self.shape.output_height();
        lengths.fill(0);
        let values = gradient.chunks_exact(outputs).zip(argmax.chunks_exact(outputs));
        for (position, (gradient, argmax)) in values.enumerate() {
            let (row, column) = (position / columns * window, position % columns * window);
            let origin = (row * width + column) * stride * channels;
            let lists = nonzero.chunks_exact_mut(positions).zip(lengths.iter_mut());
            let (gradient, argmax) = (&gradient[self.outputs.clone()], &argmax[self.outputs.clone()]);
            for ((list, length), (&gradient, argmax)) in lists.zip(gradient.iter().zip(argmax)) {
                let start = origin as u32 + starts[argmax.to_bits() as usize % 4];
                list[*length] = SparseGradient { gradient, start };
                *length += usize::from(gradient != 0.0);
            }
        }
    }
}

/// The gradient of the inputs.
pub(super) struct InputGradient<'a> {
    pub(super) shape: &'a ConvolutionShape,
    pub(super) weight: &'a [f32],
    pub(super) argmax: &'a [f32],
    pub(super) gradient: &'a [f32],
    pub(super) input_gradient: &'a mut [f32],
    pub(super) scratch: &'a mut ConvolutionScratch,
}

impl WithSimd for InputGradient<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let ConvolutionShape { channels, stride: step, outputs, kernel, .. } = *self.shape;
        let width = self.shape.padded_width();
        let (image_len, output_len) = (self.shape.image_len(), self.shape.output_len());
        let (window, columns) = (self.shape.window(), self.shape.output_width());
        // the patch under a window of outputs, and the weights with zeros around them for shifts
        let shift = window - 1;
        let vectors = ((kernel + shift) * channels).div_ceil(S::F32_LANES);
        let stride = vectors * S::F32_LANES + shift * channels;
        let padded_rows = kernel + 2 * shift;
        let starts = starts(self.shape, |y, x| (shift - y) * stride + (shift - x) * channels);
        let ConvolutionScratch { first: mut packed, second: mut image, mut nonzero, lengths } =
            take(self.scratch);
        self.pack(&mut packed, padded_rows, stride, shift);
        // rows are written in whole vectors
        image.resize(self.shape.padded_len() + vectors * S::F32_LANES, 0.0);
        nonzero.resize(outputs, SparseGradient::default());
        let maps = self.gradient.chunks_exact(output_len).zip(self.argmax.chunks_exact(output_len));
        for (input_gradient, (gradient, argmax)) in self.input_gradient.chunks_exact_mut(image_len).zip(maps)
        {
            image.fill(0.0);
            let positions = gradient.chunks_exact(outputs).zip(argmax.chunks_exact(outputs));
            for (position, (gradient, argmax)) in positions.enumerate() {
                let mut num = 0;
                for (output, (&gradient, argmax)) in gradient.iter().zip(argmax).enumerate() {
                    let start =
                        (output * padded_rows * stride) as u32 + starts[argmax.to_bits() as usize % 4];
                    nonzero[num] = SparseGradient { gradient, start };
                    num += usize::from(gradient != 0.0);
                }
                let (row, column) = (position / columns * window, position % columns * window);
                let from = Blocks { values: &packed, stride };
                let values = &mut image[(row * width + column) * step * channels..];
                let rows = kernel + shift;
                let target = TargetBlock { values, stride: width * channels, rows, vectors };
                add_blocks(simd, &nonzero[..num], from, target);
            }
            let rows = input_gradient.chunks_exact_mut(self.shape.width * channels);
            let inside = rows_inside(self.shape, &mut image).zip(rows);
            inside.for_each(|(from, into)| into.copy_from_slice(from));
        }
        *self.scratch = ConvolutionScratch { first: packed, second: image, nonzero, lengths };
    }
}

impl InputGradient<'_> {
    /// Packs the weights as `[output, kernel row, run of the row]`, with `shift` rows of zeros
    /// above and below, `shift` columns of zeros before, and zeros up to `stride` after.
    fn pack(&self, packed: &mut Vec<f32>, padded_rows: usize, stride: usize, shift: usize) {
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

/// A block to add to, with the distance between its rows.
struct TargetBlock<'a> {
    values: &'a mut [f32],
    stride: usize,
    /// Rows of the block.
    rows: usize,
    /// Vectors in a row of the block.
    vectors: usize,
}

/// Computes `target += Σ gradient · block` over `nonzero`.
#[inline(always)]
fn add_blocks<S: Simd>(simd: S, nonzero: &[SparseGradient], from: Blocks<'_>, target: TargetBlock<'_>) {
    let TargetBlock { values, stride, rows, vectors } = target;
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
            let into = &mut values[row * stride + offset..];
            match (height, width) {
                (5, 1) => add_block::<S, 5, 1>(simd, nonzero, from, into, stride),
                (5, 2) => add_block::<S, 5, 2>(simd, nonzero, from, into, stride),
                (5, 3) => add_block::<S, 5, 3>(simd, nonzero, from, into, stride),
                (5, _) => add_block::<S, 5, 4>(simd, nonzero, from, into, stride),
                (3, 1) => add_block::<S, 3, 1>(simd, nonzero, from, into, stride),
                (3, 2) => add_block::<S, 3, 2>(simd, nonzero, from, into, stride),
                (3, 3) => add_block::<S, 3, 3>(simd, nonzero, from, into, stride),
                (3, _) => add_block::<S, 3, 4>(simd, nonzero, from, into, stride),
                (_, 1) => add_block::<S, 1, 1>(simd, nonzero, from, into, stride),
                (_, 2) => add_block::<S, 1, 2>(simd, nonzero, from, into, stride),
                (_, 3) => add_block::<S, 1, 3>(simd, nonzero, from, into, stride),
                _ => add_block::<S, 1, 4>(simd, nonzero, from, into, stride),
            }
            vector += width;
        }
        row += height;
    }
}

/// Adds to a block that fits the registers: see [`add_blocks`].
#[inline(always)]
fn add_block<S: Simd, const ROWS: usize, const VECTORS: usize>(
    simd: S,
    nonzero: &[SparseGradient],
    from: Blocks<'_>,
    target: &mut [f32],
    target_stride: usize,
) {
    let length = VECTORS * S::F32_LANES;
    let mut sums: [[S::f32s; VECTORS]; ROWS] = std::array::from_fn(|r| {
        let (row, _) = S::as_simd_f32s(&target[r * target_stride..][..length]);
        std::array::from_fn(|v| row[v])
    });
    for SparseGradient { gradient, start } in nonzero {
        let gradient = simd.splat_f32s(*gradient);
        let block = &from.values[*start as usize..][..(ROWS - 1) * from.stride + length];
        for (r, sums) in sums.iter_mut().enumerate() {
            let (row, _) = S::as_simd_f32s(&block[r * from.stride..][..length]);
            for (v, sum) in sums.iter_mut().enumerate() {
                *sum = simd.mul_add_f32s(gradient, row[v], *sum);
            }
        }
    }
    for (r, sums) in sums.iter().enumerate() {
        let (row, _) = S::as_mut_simd_f32s(&mut target[r * target_stride..][..length]);
        row.copy_from_slice(sums);
    }
}
