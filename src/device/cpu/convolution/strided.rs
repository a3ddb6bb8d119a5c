//! The gradient of the inputs of a convolution with a stride.
//!
//! With a stride of s, input place s·a + r − padding, for r from 0 to s − 1, is what the places r, r + s, …
//! of the kernel cover, for the outputs a, a − 1, …. For each r of the rows and of the columns, the gradient
//! is therefore a convolution of the gradients of the outputs by some of the weights, without a stride. The
//! windows take the outputs in their order, as a loop over these would that added each to its inputs.

use pulp::{Simd, WithSimd};

use super::padding::ConvolutionScratch;
use super::windows::Windows;
use crate::device::ConvolutionShape;

/// The gradient of the inputs of some images.
pub(super) struct StridedInputGradient<'a> {
    pub(super) shape: &'a ConvolutionShape,
    pub(super) weight: &'a [f32],
    pub(super) gradient: &'a [f32],
    pub(super) input_gradient: &'a mut [f32],
    pub(super) scratch: &'a mut ConvolutionScratch,
}

/// The input rows, or columns, with one remainder by the stride.
#[derive(Clone, Copy)]
struct Phase {
    /// The places of the kernel.
    taps: usize,
    /// The output under the first place of the kernel, for the first of the inputs.
    output: usize,
    /// The first of the inputs.
    first: usize,
    /// The number of inputs.
    len: usize,
}

impl Phase {
    /// Returns the phases of `len` rows or columns that the kernel covers.
    fn all(shape: &ConvolutionShape, len: usize) -> impl Iterator<Item = Phase> {
        let ConvolutionShape { kernel, stride, padding, .. } = *shape;
        (0..stride.min(kernel)).map(move |remainder| {
            let taps = (kernel - remainder).div_ceil(stride);
            let output = padding.saturating_sub(remainder).div_ceil(stride);
            let first = stride * output + remainder - padding;
            Phase { taps, output, first, len: len.saturating_sub(first).div_ceil(stride) }
        })
    }
}

impl WithSimd for StridedInputGradient<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let StridedInputGradient { shape, weight, gradient, input_gradient, scratch } = self;
        let ConvolutionShape { height, width, channels, outputs, kernel, stride, padding, .. } = *shape;
        let vectors = channels.div_ceil(S::F32_LANES);
        // the outputs before the first and after the last are zeros
        let before = kernel.div_ceil(stride) - 1;
        let padded = |len: usize| before + (padding + len - 1) / stride + 1;
        let [padded_height, padded_width] = [height, width].map(padded);
        let ConvolutionScratch { packed, image, .. } = scratch;
        let packed = packed.elements((kernel * kernel * outputs + 1) * vectors * S::F32_LANES);
        let image = image.elements(padded_height * padded_width * outputs);
        image.fill(0.0);
        pack(shape, weight, vectors * S::F32_LANES, packed);
        let (start, taps) = S::as_simd_f32s(packed).0.split_at(vectors);

        let row_len = shape.output_width() * outputs;
        let images = gradient.chunks_exact(shape.output_len());
        for (gradient, into) in images.zip(input_gradient.chunks_exact_mut(shape.image_len())) {
            let rows = image.chunks_exact_mut(padded_width * outputs).skip(before);
            for (padded, row) in rows.zip(gradient.chunks_exact(row_len)) {
                padded[before * outputs..][..row_len].copy_from_slice(row);
            }
            if stride > kernel {
                // the kernel leaves some inputs out
                into.fill(0.0);
            }
            let mut taps = taps;
            for rows in Phase::all(shape, height) {
                for columns in Phase::all(shape, width) {
                    let len = rows.taps * columns.taps * outputs * vectors;
                    let own = taps.split_off(..len).expect("there are weights for all phases");
                    if rows.len == 0 || columns.len == 0 {
                        continue;
                    }
                    let [row, column] = [rows, columns].map(|phase| phase.output + before + 1 - phase.taps);
                    let windows = Windows {
                        simd,
                        image: &image[(row * padded_width + column) * outputs..],
                        width: padded_width,
                        channels: outputs,
                        kernel: [rows.taps, columns.taps],
                        stride: 1,
                        taps: own,
                        vectors,
                        start,
                    };
                    windows.form(
                        [rows.len, columns.len],
                        #[inline(always)]
                        |[row, column], vector, sum| {
                            let [row, column] = [rows.first + row * stride, columns.first + column * stride];
                            let first = vector * S::F32_LANES;
                            let place = (row * width + column) * channels + first;
                            let len = S::F32_LANES.min(channels - first);
                            simd.partial_store_f32s(&mut into[place..place + len], sum);
                        },
                    );
                }
            }
        }
    }
}

/// Packs a vector of zeros and the weights, phase by phase as `[kernel row, kernel column, output, channel]`,
/// with the last row and column first and channels padded with zeros to `padded`.
fn pack(shape: &ConvolutionShape, weight: &[f32], padded: usize, packed: &mut [f32]) {
    let ConvolutionShape { channels, kernel, stride, .. } = *shape;
    let places = |remainder: usize| (remainder..kernel).step_by(stride).rev();
    packed.fill(0.0);
    let mut vectors = packed[padded..].chunks_exact_mut(padded);
    let num_phases = stride.min(kernel);
    for phase in 0..num_phases * num_phases {
        for row in places(phase / num_phases) {
            for place in places(phase % num_phases).map(|column| row * kernel + column) {
                for (weights, packed) in weight.chunks_exact(channels * kernel * kernel).zip(&mut vectors) {
                    let weights = weights[place..].iter().step_by(kernel * kernel);
                    packed.iter_mut().zip(weights).for_each(|(packed, weight)| *packed = *weight);
                }
            }
        }
    }
}
