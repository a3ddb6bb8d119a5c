//! Convolution, backward: the gradients of the weights and of the inputs.
//!
//! Max-pooling passes a gradient to one of four outputs and ReLU to about half of those, so seven
//! in eight of the products of the textbook formula are with zero. Both functions here go through
//! the *pooled* gradients that are not zero and look up in `argmax` which output each belongs to:
//! an eighth of the work of the dense form.
//!
//! Without pooling and ReLU all gradients count, and the gradient of the weights here makes no lists of them.
//! The gradient of the inputs is then the work of `forward.rs`, `strided.rs` or `winograd/`.
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

use super::blocks::{Blocks, DenseGradients, MOST_SUMS, SparseGradient, TargetBlock, add_blocks};
use super::padding::{ConvolutionScratch, pad, rows_inside};
use crate::device::ConvolutionShape;

/// Returns `start` for each of the four places in a window, or for the only one without pooling.
#[inline(always)]
fn starts(shape: &ConvolutionShape, start: impl Fn(usize, usize) -> usize) -> [u32; 4] {
    std::array::from_fn(
        |place| if shape.pool { start(place / 2, place % 2) as u32 } else { start(0, 0) as u32 },
    )
}

/// The gradient of the weights of some outputs, from some images.
pub(super) struct WeightGradient<'a> {
    pub(super) shape: &'a ConvolutionShape,
    pub(super) input: &'a [f32],
    pub(super) argmax: &'a [f32],
    pub(super) gradient: &'a [f32],
    pub(super) outputs: Range<usize>,
    /// `[outputs, channels, kernel, kernel]`, to which the images are added one after the other.
    pub(super) sums: &'a mut [f32],
    pub(super) scratch: &'a mut ConvolutionScratch,
}

impl WithSimd for WeightGradient<'_> {
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
        let WeightGradient { sums: weights, scratch, .. } = self;
        let ConvolutionScratch { packed, image, nonzero, lengths, .. } = scratch;
        let sums = packed.elements(self.outputs.len() * kernel * stride);
        sums.fill(0.0);
        for_each_weight(sums, weights, self.shape, stride, |sum, weight| *sum = *weight);
        // rows are read in whole vectors
        let image = image.elements(self.shape.padded_len() + stride);
        image.fill(0.0);
        let positions = output_len / self.shape.outputs;
        let is_dense = is_dense(self.shape);
        nonzero.resize(if is_dense { 0 } else { self.outputs.len() * positions }, SparseGradient::default());
        lengths.resize(self.outputs.len(), 0);
        let maps = self.gradient.chunks_exact(output_len).zip(self.argmax.chunks_exact(output_len));
        for (input, (gradient, argmax)) in self.input.chunks_exact(image_len).zip(maps) {
            pad(self.shape, input, image);
            if is_dense {
                add_dense(simd, self.shape, self.outputs.clone(), gradient, image, sums);
                continue;
            }
            gather(self.shape, self.outputs.clone(), gradient, argmax, nonzero, lengths);
            let lists = nonzero.chunks_exact(positions).zip(&*lengths);
            for (sums, (list, &length)) in sums.chunks_exact_mut(kernel * stride).zip(lists) {
                let from = Blocks { values: image, stride: width * channels };
                let target = TargetBlock { values: sums, stride, distance: 0, rows: kernel, vectors };
                add_blocks::<S, _, 1>(simd, &list[..length], from, target);
            }
        }
        for_each_weight(sums, weights, self.shape, stride, |sum, weight| *weight = *sum);
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

/// Outputs whose small blocks are added together.
const MANY_OUTPUTS: usize = 8;

/// Elements of an image that stay in the L1 cache beside gradients.
const CACHED_IMAGE: usize = 24 << 8;

/// Returns true for a convolution whose gradients are not zero as a rule.
pub(super) fn is_dense(shape: &ConvolutionShape) -> bool {
    !shape.pool && !shape.relu
}

/// Adds the gradients of an image to `sums`, a few rows of the output at a time, so that the rows of the
/// image that they belong to stay in the L1 cache while all outputs are added.
#[inline(always)]
fn add_dense<S: Simd>(
    simd: S,
    shape: &ConvolutionShape,
    own: Range<usize>,
    gradient: &[f32],
    image: &[f32],
    sums: &mut [f32],
) {
    let ConvolutionShape { channels, stride: step, outputs, kernel, .. } = *shape;
    let row_len = shape.padded_width() * channels;
    let vectors = (kernel * channels).div_ceil(S::F32_LANES);
    let stride = vectors * S::F32_LANES;
    let (columns, line_step) = (shape.output_width(), step * row_len);
    let num_rows = (CACHED_IMAGE / line_step).max(1);
    // outputs that go together read a block once; small blocks leave registers for more of them
    let is_small = MANY_OUTPUTS * kernel.min(3) * vectors <= MOST_SUMS;
    let together = if S::REGISTER_COUNT >= 32 && is_small { MANY_OUTPUTS } else { 2 };
    let bands = gradient.chunks(num_rows * columns * outputs);
    for (gradient, image) in bands.zip((0..).step_by(num_rows).map(|row| &image[row * line_step..])) {
        let from = Blocks { values: image, stride: row_len };
        let mut at = 0;
        while at < own.len() {
            let num = if own.len() - at >= together { together } else { (own.len() - at).min(2) };
            let gradients = DenseGradients {
                values: &gradient[own.start + at..],
                stride: outputs,
                num_lines: gradient.len() / (columns * outputs),
                line_len: columns,
                step: step * channels,
                line_step,
            };
            let (values, distance) = (&mut sums[at * kernel * stride..], kernel * stride);
            let target = TargetBlock { values, stride, distance, rows: kernel, vectors };
            match num {
                MANY_OUTPUTS => add_blocks::<S, _, MANY_OUTPUTS>(simd, gradients, from, target),
                2 => add_blocks::<S, _, 2>(simd, gradients, from, target),
                _ => add_blocks::<S, _, 1>(simd, gradients, from, target),
            }
            at += num;
        }
    }
}

/// Lists, for each of the output channels, the gradients that are not zero with their places in the
/// image. No branch depends on a gradient: half of them are zero, at random.
#[inline(always)]
fn gather(
    shape: &ConvolutionShape,
    own: Range<usize>,
    gradient: &[f32],
    argmax: &[f32],
    nonzero: &mut [SparseGradient],
    lengths: &mut [usize],
) {
    let ConvolutionShape { channels, stride, outputs, .. } = *shape;
    let width = shape.padded_width();
    let (window, columns) = (shape.window(), shape.output_width());
    let starts = starts(shape, |y, x| (y * width + x) * channels);
    let positions = columns * shape.output_height();
    lengths.fill(0);
    let values = gradient.chunks_exact(outputs).zip(argmax.chunks_exact(outputs));
    for (position, (gradient, argmax)) in values.enumerate() {
        let (row, column) = (position / columns * window, position % columns * window);
        let origin = (row * width + column) * stride * channels;
        let lists = nonzero.chunks_exact_mut(positions).zip(lengths.iter_mut());
        let (gradient, argmax) = (&gradient[own.clone()], &argmax[own.clone()]);
        for ((list, length), (&gradient, argmax)) in lists.zip(gradient.iter().zip(argmax)) {
            let start = origin as u32 + starts[argmax.to_bits() as usize % 4];
            list[*length] = SparseGradient { gradient, start };
            *length += usize::from(gradient != 0.0);
        }
    }
}

/// The gradient of the inputs of a convolution with ReLU or pooling.
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
        let mut scratch = take(self.scratch);
        let ConvolutionScratch { packed, image, nonzero, .. } = &mut scratch;
        let packed = packed.elements(outputs * padded_rows * stride);
        self.pack(packed, padded_rows, stride, shift);
        // rows are written in whole vectors
        let image = image.elements(self.shape.padded_len() + vectors * S::F32_LANES);
        nonzero.resize(outputs, SparseGradient::default());
        let maps = self.gradient.chunks_exact(output_len).zip(self.argmax.chunks_exact(output_len));
        for (input_gradient, (gradient, argmax)) in self.input_gradient.chunks_exact_mut(image_len).zip(maps)
        {
            image.fill(0.0);
            let positions = gradient.chunks_exact(outputs).zip(argmax.chunks_exact(outputs));
            for (position, (gradient, argmax)) in positions.enumerate() {
                let (row, column) = (position / columns * window, position % columns * window);
                let from = Blocks { values: packed, stride };
                let values = &mut image[(row * width + column) * step * channels..];
                let rows = kernel + shift;
                let target = TargetBlock { values, stride: width * channels, distance: 0, rows, vectors };
                let mut num = 0;
                for (output, (&gradient, argmax)) in gradient.iter().zip(argmax).enumerate() {
                    let start =
                        (output * padded_rows * stride) as u32 + starts[argmax.to_bits() as usize % 4];
                    nonzero[num] = SparseGradient { gradient, start };
                    num += usize::from(gradient != 0.0);
                }
                add_blocks::<S, _, 1>(simd, &nonzero[..num], from, target);
            }
            let rows = input_gradient.chunks_exact_mut(self.shape.width * channels);
            let inside = rows_inside(self.shape, image).zip(rows);
            inside.for_each(|(from, into)| into.copy_from_slice(from));
        }
        *self.scratch = scratch;
    }
}

impl InputGradient<'_> {
    /// Packs the weights as `[output, kernel row, run of the row]`, with `shift` rows of zeros
    /// above and below, `shift` columns of zeros before, and zeros up to `stride` after.
    fn pack(&self, packed: &mut [f32], padded_rows: usize, stride: usize, shift: usize) {
        let ConvolutionShape { channels, outputs, kernel, .. } = *self.shape;
        packed.fill(0.0);
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
