//! Convolution, forward: direct, with the bias, 2 × 2 max-pooling and ReLU before anything is written.

use pulp::{Simd, WithSimd};

use super::padding::{ConvolutionScratch, pad};
use super::windows::{ANY, Tile, Windows};
use crate::device::ConvolutionShape;

/// The arrays of one call. `scratch` has the weights as `[kernel row, tap, output channel]`, padded to
/// whole vectors, and an image with zeros around it.
pub(super) struct Forward<'a> {
    pub(super) shape: &'a ConvolutionShape,
    pub(super) input: &'a [f32],
    pub(super) weight: &'a [f32],
    pub(super) bias: Option<&'a [f32]>,
    pub(super) argmax: &'a mut [f32],
    pub(super) output: &'a mut [f32],
    pub(super) scratch: &'a mut ConvolutionScratch,
    /// True if `weight` is that of the convolution of which this one is the backward pass: inputs and
    /// outputs take turns, and the kernel is turned by half a turn.
    pub(super) is_transposed: bool,
}

impl WithSimd for Forward<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let shape = *self.shape;
        let vectors = shape.outputs.div_ceil(S::F32_LANES);
        self.pack(vectors * S::F32_LANES);
        let ConvolutionScratch { packed, image: padded, .. } = &mut *self.scratch;
        let packed = packed.elements(packed_len(&shape, vectors * S::F32_LANES));
        let padded = padded.elements(if shape.padding > 0 { shape.padded_len() } else { 0 });
        padded.fill(0.0);
        let (weights, _) = S::as_simd_f32s(packed);
        let (taps, biases) = weights.split_at(shape.kernel * shape.kernel * shape.channels * vectors);

        let images = self.input.chunks_exact(shape.image_len());
        let mut argmax = self.argmax;
        for (image, output) in images.zip(self.output.chunks_exact_mut(shape.output_len())) {
            let argmax = argmax.split_off_mut(..shape.argmax_len()).unwrap_or_default();
            let image = if shape.padding > 0 {
                pad(&shape, image, padded);
                &padded[..]
            } else {
                image
            };
            let windows = Windows {
                simd,
                image,
                width: shape.padded_width(),
                channels: shape.channels,
                kernel: [shape.kernel; 2],
                stride: shape.stride,
                taps,
                vectors,
                start: biases,
            };
            let mut outputs = ImageOutputs { simd, shape: &shape, output, argmax };
            let (rows, columns) = (shape.output_height(), shape.output_width());
            if !shape.pool {
                windows.form(
                    [rows, columns],
                    #[inline(always)]
                    |[row, column], vector, sum| outputs.store(row, column, vector, sum, None),
                );
                continue;
            }
            for row in 0..rows {
                for group in (0..vectors).step_by(2) {
                    let size = (vectors - group).min(2);
                    match windows.known_channels() {
                        1 => outputs.pooled_row::<1>(&windows, 2 * row, group, size),
                        3 => outputs.pooled_row::<3>(&windows, 2 * row, group, size),
                        _ => outputs.pooled_row::<ANY>(&windows, 2 * row, group, size),
                    }
                }
            }
        }
    }
}

/// Returns the number of packed weights and biases, for `padded` outputs.
fn packed_len(shape: &ConvolutionShape, padded: usize) -> usize {
    (shape.kernel * shape.kernel * shape.channels + 1) * padded
}

impl Forward<'_> {
    /// Packs the weights as `[kernel row, kernel column, channel, output]`, then the bias, with
    /// outputs padded with zeros to `padded`.
    fn pack(&mut self, padded: usize) {
        let ConvolutionShape { channels, outputs, kernel, .. } = *self.shape;
        let taps = kernel * kernel * channels;
        let packed = self.scratch.packed.elements(packed_len(self.shape, padded));
        packed.fill(0.0);
        let num_places = kernel * kernel;
        for (tap, packed) in packed.chunks_exact_mut(padded).take(taps).enumerate() {
            let (place, channel) = (tap / channels, tap % channels);
            let (first, step) = match self.is_transposed {
                false => (channel * num_places + place, channels * num_places),
                true => ((channel * outputs + 1) * num_places - 1 - place, num_places),
            };
            let weights = self.weight[first..].iter().step_by(step);
            packed[..outputs].iter_mut().zip(weights).for_each(|(packed, weight)| *packed = *weight);
        }
        if let Some(bias) = self.bias {
            packed[taps * padded..][..outputs].copy_from_slice(bias);
        }
    }
}

/// The outputs of one image.
struct ImageOutputs<'a, S: Simd> {
    simd: S,
    shape: &'a ConvolutionShape,
    output: &'a mut [f32],
    argmax: &'a mut [f32],
}

impl<S: Simd> ImageOutputs<'_, S> {
    /// Forms the two rows from `row` on, and pools them.
    #[inline(always)]
    fn pooled_row<const CHANNELS: usize>(
        &mut self,
        windows: &Windows<'_, S>,
        row: usize,
        group: usize,
        size: usize,
    ) {
        let width = self.shape.output_width() * 2;
        let few_registers = S::REGISTER_COUNT < 32;
        let mut column = 0;
        while column < width {
            let at = Tile { row, column, group };
            let left = width - column;
            column += match (size, left) {
                (1, 6..) if left != 8 => self.pooled::<6, 1, CHANNELS>(windows, at),
                (1, 4..) => self.pooled::<4, 1, CHANNELS>(windows, at),
                (1, _) => self.pooled::<2, 1, CHANNELS>(windows, at),
                (_, 6..) if left != 8 && !few_registers => self.pooled::<6, 2, CHANNELS>(windows, at),
                (_, 4..) if !few_registers => self.pooled::<4, 2, CHANNELS>(windows, at),
                _ => self.pooled::<2, 2, CHANNELS>(windows, at),
            };
        }
    }

    /// Forms two rows of `COLUMNS` outputs and pools them. Returns `COLUMNS`.
    #[inline(always)]
    fn pooled<const COLUMNS: usize, const GROUP: usize, const CHANNELS: usize>(
        &mut self,
        windows: &Windows<'_, S>,
        at: Tile,
    ) -> usize {
        let sums = windows.tile::<2, COLUMNS, GROUP, CHANNELS>(at);
        let simd = self.simd;
        for pair in 0..COLUMNS / 2 {
            for (g, first) in sums[0][2 * pair].iter().enumerate() {
                let mut best = *first;
                let mut argmax = simd.splat_f32s(f32::from_bits(0));
                for place in 1..4 {
                    let next = sums[place / 2][2 * pair + place % 2][g];
                    // NaN propagates, as in PyTorch
                    let not_a_number = simd.not_m32s(simd.equal_f32s(next, next));
                    let greater = simd.or_m32s(simd.greater_than_f32s(next, best), not_a_number);
                    best = simd.select_f32s(greater, next, best);
                    argmax = simd.select_f32s(greater, simd.splat_f32s(f32::from_bits(place as u32)), argmax);
                }
                self.store(at.row / 2, at.column / 2 + pair, at.group + g, best, Some(argmax));
            }
        }
        COLUMNS
    }

    #[inline(always)]
    fn store(&mut self, row: usize, column: usize, vector: usize, value: S::f32s, argmax: Option<S::f32s>) {
        let ConvolutionShape { outputs, relu, .. } = *self.shape;
        let first = vector * S::F32_LANES;
        let start = (row * self.shape.output_width() + column) * outputs + first;
        let range = start..start + S::F32_LANES.min(outputs - first);
        let zero = self.simd.splat_f32s(0.0);
        // NaN stays NaN: it is not less than zero
        let negative = self.simd.less_than_f32s(value, zero);
        let value = if relu { self.simd.select_f32s(negative, zero, value) } else { value };
        self.simd.partial_store_f32s(&mut self.output[range.clone()], value);
        if let Some(argmax) = argmax {
            self.simd.partial_store_f32s(&mut self.argmax[range], argmax);
        }
    }
}
