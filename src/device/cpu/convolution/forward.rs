//! Convolution, forward: direct, with the bias, 2 × 2 max-pooling and ReLU before anything is
//! written.
//!
//! Images are channels last, so the `kernel` inputs that a row of the kernel covers, all channels,
//! are consecutive in memory. Lanes of a vector are output channels. A tile of `ROWS × COLUMNS`
//! neighbouring outputs (two rows where they are pooled) stays in registers while the loop runs
//! over the taps of the kernel: each step loads `GROUP` vectors of weights and multiplies them by
//! one broadcast input for each output of the tile.

use pulp::{Simd, WithSimd};

use super::padding::{ConvolutionScratch, pad};
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

/// Stands for a number of channels that is not a compile-time constant, unlike those of grey and
/// colour images and of common residual networks, or for a stride above 1.
const ANY: usize = 0;

/// The first place of a tile and its output channels.
#[derive(Clone, Copy)]
struct Tile {
    /// Row and column in the convolution's output, before pooling.
    row: usize,
    column: usize,
    /// The first vector of output channels.
    group: usize,
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

        let (image_len, output_len) = (shape.image_len(), shape.output_len());
        let images = self.input.chunks_exact(image_len);
        let mut argmax = self.argmax;
        for (image, output) in images.zip(self.output.chunks_exact_mut(output_len)) {
            let argmax = argmax.split_off_mut(..shape.argmax_len()).unwrap_or_default();
            let image = if shape.padding > 0 {
                pad(&shape, image, padded);
                &padded[..]
            } else {
                image
            };
            let mut work = ImageForward { simd, shape: &shape, image, taps, biases, vectors, output, argmax };
            let rows = shape.output_height() * shape.window();
            let mut row = 0;
            while row < rows {
                // a single vector of outputs has too few sums in one row
                let height = if shape.pool || vectors == 1 && rows - row >= 2 { 2 } else { 1 };
                let mut group = 0;
                while group < vectors {
                    let size = if vectors - group >= 2 { 2 } else { 1 };
                    let at = Tile { row, column: 0, group };
                    // the distance between neighbouring inputs is then known too
                    let channels = if shape.stride == 1 { shape.channels } else { ANY };
                    match (shape.pool, channels) {
                        (true, 1) => work.pooled_row::<1>(row, group, size),
                        (true, 3) => work.pooled_row::<3>(row, group, size),
                        (true, _) => work.pooled_row::<ANY>(row, group, size),
                        (false, 3) => work.plain_rows::<3>(at, size, height),
                        (false, 16) => work.plain_rows::<16>(at, size, height),
                        (false, 32) => work.plain_rows::<32>(at, size, height),
                        (false, 64) => work.plain_rows::<64>(at, size, height),
                        (false, _) => work.plain_rows::<ANY>(at, size, height),
                    }
                    group += size;
                }
                row += height;
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
        for output in 0..outputs {
            for channel in 0..channels {
                let num_places = kernel * kernel;
                for place in 0..num_places {
                    let from = match self.is_transposed {
                        false => (output * channels + channel) * num_places + place,
                        true => (channel * outputs + output) * num_places + (num_places - 1 - place),
                    };
                    packed[(place * channels + channel) * padded + output] = self.weight[from];
                }
            }
            packed[taps * padded + output] = self.bias.map_or(0.0, |bias| bias[output]);
        }
    }
}

/// One image, with the weights in vectors.
struct ImageForward<'a, S: Simd> {
    simd: S,
    shape: &'a ConvolutionShape,
    image: &'a [f32],
    taps: &'a [S::f32s],
    biases: &'a [S::f32s],
    /// Vectors that hold all output channels.
    vectors: usize,
    output: &'a mut [f32],
    argmax: &'a mut [f32],
}

impl<S: Simd> ImageForward<'_, S> {
    #[inline(always)]
    fn pooled_row<const CHANNELS: usize>(&mut self, row: usize, group: usize, size: usize) {
        let width = self.shape.output_width() * 2;
        let few_registers = S::REGISTER_COUNT < 32;
        let mut column = 0;
        while column < width {
            let at = Tile { row, column, group };
            let left = width - column;
            column += match (size, left) {
                (1, 6..) if left != 8 => self.pooled::<6, 1, CHANNELS>(at),
                (1, 4..) => self.pooled::<4, 1, CHANNELS>(at),
                (1, _) => self.pooled::<2, 1, CHANNELS>(at),
                (_, 6..) if left != 8 && !few_registers => self.pooled::<6, 2, CHANNELS>(at),
                (_, 4..) if !few_registers => self.pooled::<4, 2, CHANNELS>(at),
                _ => self.pooled::<2, 2, CHANNELS>(at),
            };
        }
    }

    /// Forms one row of outputs from `first` on, or two if that is the `height`.
    #[inline(always)]
    fn plain_rows<const CHANNELS: usize>(&mut self, first: Tile, size: usize, height: usize) {
        let width = self.shape.output_width();
        let few_registers = S::REGISTER_COUNT < 32;
        let mut column = 0;
        while column < width {
            let at = Tile { column, ..first };
            column += match (height, size, width - column) {
                (2, _, 8..) if !few_registers => self.plain::<2, 8, 1, CHANNELS>(at),
                (2, _, 4..) => self.plain::<2, 4, 1, CHANNELS>(at),
                (2, ..) => self.plain::<2, 1, 1, CHANNELS>(at),
                (_, 1, 4..) => self.plain::<1, 4, 1, CHANNELS>(at),
                (_, 1, _) => self.plain::<1, 1, 1, CHANNELS>(at),
                (.., 8..) if !few_registers => self.plain::<1, 8, 2, CHANNELS>(at),
                (.., 4..) => self.plain::<1, 4, 2, CHANNELS>(at),
                _ => self.plain::<1, 1, 2, CHANNELS>(at),
            };
        }
    }

    /// Returns the sums of a tile, `[row][column][vector of output channels]`, bias included.
    #[inline(always)]
    fn tile<const ROWS: usize, const COLUMNS: usize, const GROUP: usize, const CHANNELS: usize>(
        &self,
        at: Tile,
    ) -> [[[S::f32s; GROUP]; COLUMNS]; ROWS] {
        let ConvolutionShape { kernel, stride, .. } = *self.shape;
        let width = self.shape.padded_width();
        let channels = if CHANNELS == ANY { self.shape.channels } else { CHANNELS };
        let stride = if CHANNELS == ANY { stride } else { 1 };
        let (run, step) = (kernel * channels, stride * channels);
        let bias: [S::f32s; GROUP] = std::array::from_fn(|g| self.biases[at.group + g]);
        let mut sums = [[bias; COLUMNS]; ROWS];
        for kernel_row in 0..kernel {
            let inputs: [&[f32]; ROWS] = std::array::from_fn(|r| {
                let row = (at.row + r) * stride + kernel_row;
                &self.image[(row * width + at.column * stride) * channels..][..(COLUMNS - 1) * step + run]
            });
            let taps = &self.taps[kernel_row * run * self.vectors..][..run * self.vectors];
            for (tap, weights) in taps.chunks_exact(self.vectors).enumerate() {
                let weights = &weights[at.group..][..GROUP];
                for r in 0..ROWS {
                    let inputs = &inputs[r][tap..][..(COLUMNS - 1) * step + 1];
                    for c in 0..COLUMNS {
                        let input = self.simd.splat_f32s(inputs[c * step]);
                        for (sum, weight) in sums[r][c].iter_mut().zip(weights) {
                            *sum = self.simd.mul_add_f32s(input, *weight, *sum);
                        }
                    }
                }
            }
        }
        sums
    }

    /// Forms two rows of `COLUMNS` outputs and pools them. Returns `COLUMNS`.
    #[inline(always)]
    fn pooled<const COLUMNS: usize, const GROUP: usize, const CHANNELS: usize>(&mut self, at: Tile) -> usize {
        let sums = self.tile::<2, COLUMNS, GROUP, CHANNELS>(at);
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

    /// Forms rows of `COLUMNS` outputs. Returns `COLUMNS`.
    #[inline(always)]
    fn plain<const ROWS: usize, const COLUMNS: usize, const GROUP: usize, const CHANNELS: usize>(
        &mut self,
        at: Tile,
    ) -> usize {
        let sums = self.tile::<ROWS, COLUMNS, GROUP, CHANNELS>(at);
        for (r, sums) in sums.iter().enumerate() {
            for (c, sums) in sums.iter().enumerate() {
                for (g, sum) in sums.iter().enumerate() {
                    self.store(at.row + r, at.column + c, at.group + g, *sum, None);
                }
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
