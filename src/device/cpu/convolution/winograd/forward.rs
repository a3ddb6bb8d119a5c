//! The forward pass, and the gradient of the inputs.

use pulp::{Simd, WithSimd};

use super::super::forward::Forward;
use super::super::padding::ConvolutionScratch;
use super::image::{Images, OutputTile};
use super::products::{CoefficientSquare, Coefficients, Formed, add_products, squares};
use super::transform::{IntoOutputs, OfInputs, OfKernel, Transform as _, VectorSource};
use super::{CHANNEL_MULTIPLE, COEFFICIENTS, KERNEL, PLACES, SIDE, Tiles};
use crate::device::cpu::transpose::transpose;

/// Tiles of a group, which are transformed and multiplied together, so that the coefficients of the weights
/// are read from memory once for all of them. A multiple of the tiles of every block of sums.
const TILES_TOGETHER: usize = 12;

/// Vectors of outputs whose products are formed together, at most.
const VECTORS_TOGETHER: usize = 4;

/// Returns how many of `left` vectors of outputs are formed together.
#[inline(always)]
fn vectors_together<S: Simd>(left: usize) -> usize {
    match (S::REGISTER_COUNT >= 32, left) {
        (true, 4..) => VECTORS_TOGETHER,
        // 16 outputs are a whole number of pairs of shorter vectors
        (true, 2..) | (false, _) => 2,
        (true, _) => 1,
    }
}

/// A forward pass.
pub(in super::super) struct WinogradForward<'a>(pub(in super::super) Forward<'a>);

impl WithSimd for WinogradForward<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let WinogradForward(pass) = self;
        let shape = pass.shape;
        let (channels, outputs) = (shape.channels, shape.outputs);
        let (input_vectors, output_vectors) = (channels / S::F32_LANES, outputs / S::F32_LANES);
        let ConvolutionScratch { packed, coefficients, .. } = pass.scratch;
        let taps = packed.elements(CHANNELS_TOGETHER * PLACES * S::F32_LANES);
        let weights_len = output_vectors * weights_of_vector(channels) * S::F32_LANES;
        let [inputs_len, results_len] =
            [channels, VECTORS_TOGETHER * S::F32_LANES].map(|len| COEFFICIENTS * TILES_TOGETHER * len);
        let room = coefficients.elements(weights_len + inputs_len + results_len);
        let (weights, room) = room.split_at_mut(weights_len);
        let (inputs, results) = room.split_at_mut(inputs_len);
        let kernels = Kernels { weight: pass.weight, channels, outputs, is_transposed: pass.is_transposed };
        kernels.transform(simd, taps, weights);

        let tiles = Tiles::of(shape);
        let [height, width] = [shape.output_height(), shape.output_width()];
        let images = Images::inputs(shape, pass.input);
        let num_tiles = pass.input.len() / shape.image_len() * tiles.of_image();
        for first in (0..num_tiles).step_by(TILES_TOGETHER) {
            let group = first..num_tiles.min(first + TILES_TOGETHER);
            for (at, tile) in group.clone().enumerate() {
                if tile + TILES_TOGETHER < num_tiles {
                    images.fetch(tile + TILES_TOGETHER);
                }
                Images::outputs(shape, pass.output).fetch(tile);
                let square = images.square::<S>(tile, shape.padding);
                for vector in 0..input_vectors {
                    let values = &mut squares::<S>(inputs)[vector * TILES_TOGETHER + at];
                    square.transform::<OfInputs, SIDE, SIDE>(
                        simd,
                        vector,
                        &mut Coefficients { values, stride: 1 },
                    );
                }
            }
            let results = squares::<S>(results);
            let mut vector = 0;
            while vector < output_vectors {
                let size = vectors_together::<S>(output_vectors - vector);
                let first_weight = vector * weights_of_vector(channels);
                let weights = &S::as_simd_f32s(weights).0[first_weight..];
                let product = GroupProduct::<S> { channels, weights, inputs };
                match (S::REGISTER_COUNT >= 32, size) {
                    (true, 4) => product.form::<6, 4>(simd, results, group.len()),
                    (true, 2) => product.form::<12, 2>(simd, results, group.len()),
                    (true, _) => product.form::<12, 1>(simd, results, group.len()),
                    (false, _) => product.form::<6, 2>(simd, results, group.len()),
                }
                for (vector, results) in (vector..vector + size).zip(results.chunks_exact(TILES_TOGETHER)) {
                    let zero = simd.splat_f32s(0.0);
                    let bias = pass.bias.map_or(zero, |bias| S::as_simd_f32s(bias).0[vector]);
                    for (tile, result) in group.clone().zip(results) {
                        let (image, [row, column]) = tiles.place(tile);
                        let mut into = OutputTile {
                            simd,
                            values: S::as_mut_simd_f32s(pass.output).0,
                            start: ((image * height + row) * width + column) * output_vectors + vector,
                            row_stride: width * output_vectors,
                            column_stride: output_vectors,
                            rows: height - row,
                            columns: width - column,
                            bias,
                        };
                        IntoOutputs::square(simd, &Formed(result), &mut into);
                    }
                }
                vector += size;
            }
        }
    }
}

/// The products of the coefficients of a group of tiles with the weights of some vectors of outputs.
struct GroupProduct<'a, S: Simd> {
    channels: usize,
    /// `[coefficient, channel, vector of outputs, output]`.
    weights: &'a [S::f32s],
    /// `[vector of channels, tile, coefficient, channel]`.
    inputs: &'a [f32],
}

impl<S: Simd> GroupProduct<'_, S> {
    /// Forms the products of `VECTORS` vectors of outputs into `results`, `[vector, tile]`. `TILES` tiles go
    /// together; those after `num_tiles` get arbitrary values.
    #[inline(always)]
    fn form<const TILES: usize, const VECTORS: usize>(
        &self,
        simd: S,
        results: &mut [CoefficientSquare<S>],
        num_tiles: usize,
    ) {
        let tiles_of_channels = self.inputs.chunks_exact(TILES_TOGETHER * COEFFICIENTS * S::F32_LANES);
        let stride = COEFFICIENTS * S::F32_LANES;
        let of_coefficients = self.weights.chunks_exact(weights_stride(self.channels, VECTORS));
        for (coefficient, weights) in of_coefficients.take(COEFFICIENTS).enumerate() {
            let weights = &weights.as_chunks::<VECTORS>().0[..self.channels];
            for tile in (0..num_tiles).step_by(TILES) {
                let first = tile * stride + coefficient * S::F32_LANES;
                let mut sums = [[simd.splat_f32s(0.0); VECTORS]; TILES];
                let weights = weights.chunks_exact(S::F32_LANES);
                for (inputs, weights) in tiles_of_channels.clone().zip(weights) {
                    let inputs = &inputs[first..][..(TILES - 1) * stride + S::F32_LANES];
                    add_products(simd, &mut sums, inputs, [1, stride], weights);
                }
                for (tile, sums) in sums.into_iter().enumerate().map(|(at, sums)| (tile + at, sums)) {
                    for (vector, sum) in sums.into_iter().enumerate() {
                        results[vector * TILES_TOGETHER + tile][coefficient] = sum;
                    }
                }
            }
        }
    }
}

/// Returns the vectors from a coefficient of `vectors` vectors of weights to the next: one more than there
/// are, so that the coefficients of a channel are in several sets of the cache.
fn weights_stride(channels: usize, vectors: usize) -> usize {
    channels * vectors + 1
}

/// Returns the vectors that a vector of outputs takes at most.
fn weights_of_vector(channels: usize) -> usize {
    COEFFICIENTS * weights_stride(channels, 1)
}

/// Channels whose weights are packed together: those of one vector of outputs fit the L1 cache.
const CHANNELS_TOGETHER: usize = CHANNEL_MULTIPLE;

/// Weights as they come: `[output, channel, place of the kernel]`, or, if they are transposed,
/// `[channel, output, place]`, of kernels that are turned by half a turn.
struct Kernels<'a> {
    weight: &'a [f32],
    channels: usize,
    outputs: usize,
    is_transposed: bool,
}

impl Kernels<'_> {
    /// Transforms the weights into `[coefficient, channel, vector of outputs, output]`, those of the vectors
    /// that go together as one array. `taps` is memory for `CHANNELS_TOGETHER` kernels of vectors.
    #[inline(always)]
    fn transform<S: Simd>(&self, simd: S, taps: &mut [f32], weights: &mut [f32]) {
        let weights = S::as_mut_simd_f32s(weights).0;
        let space = self.outputs / S::F32_LANES;
        let mut first = 0;
        while first < space {
            let size = vectors_together::<S>(space - first);
            let stride = weights_stride(self.channels, size);
            for first_channel in (0..self.channels).step_by(CHANNELS_TOGETHER) {
                for vector in 0..size {
                    self.pack::<S>(first_channel, first + vector, taps);
                    let kernels = S::as_simd_f32s(taps).0.as_chunks::<PLACES>().0;
                    for (channel, taps) in (first_channel..).zip(kernels) {
                        let kernel = TurnableKernel::<S> { taps, is_turned: self.is_transposed };
                        let start = first * weights_of_vector(self.channels) + channel * size + vector;
                        let values = &mut weights[start..];
                        OfKernel::square(simd, &kernel, &mut Coefficients { values, stride });
                    }
                }
            }
            first += size;
        }
    }

    /// Packs the weights of some channels, from `first` on, for a vector of outputs as
    /// `[channel, place, output]`.
    #[inline(always)]
    fn pack<S: Simd>(&self, first: usize, vector: usize, taps: &mut [f32]) {
        let (channels, output) = (self.channels, vector * S::F32_LANES);
        if self.is_transposed {
            for (channel, taps) in (first..).zip(taps.chunks_exact_mut(PLACES * S::F32_LANES)) {
                let from = &self.weight[(channel * self.outputs + output) * PLACES..];
                transpose([S::F32_LANES, PLACES], from, PLACES, taps, S::F32_LANES);
            }
        } else {
            let from = &self.weight[(output * channels + first) * PLACES..];
            let columns = CHANNELS_TOGETHER * PLACES;
            transpose([S::F32_LANES, columns], from, channels * PLACES, taps, S::F32_LANES);
        }
    }
}

/// A vector of each place of a kernel.
struct TurnableKernel<'a, S: Simd> {
    taps: &'a [S::f32s; PLACES],
    is_turned: bool,
}

impl<S: Simd> VectorSource<S> for TurnableKernel<'_, S> {
    #[inline(always)]
    fn get(&self, row: usize, column: usize) -> S::f32s {
        let place = row * KERNEL + column;
        self.taps[if self.is_turned { PLACES - 1 - place } else { place }]
    }
}
