//! The forward pass, and the gradient of the inputs.

use pulp::{Simd, WithSimd};

use super::super::forward::Forward;
use super::super::padding::ConvolutionScratch;
use super::image::{Images, OutputTile};
use super::products::{Coefficients, TileColumn, add_products, columns, squares};
use super::transform::{IntoOutputs, OfInputs, OfKernel, Transform as _, VectorSink, VectorSource};
use super::{COEFFICIENTS, KERNEL, SIDE, TILE, Tiles};
use crate::device::cpu::transpose::transpose;

/// Tiles of a group, which are transformed and multiplied together, so that their coefficients stay in the
/// first caches.
const TILES_TOGETHER: usize = 16;

/// Vectors of outputs whose products are formed together, so that a coefficient of the inputs is read once.
const VECTORS_TOGETHER: usize = 2;

/// The vectors of a tile whose columns are transformed, and whose rows are not yet.
const TRANSFORMED: usize = SIDE * TILE;

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
        let taps = packed.elements(shape.weight_len());
        pack(pass.weight, outputs, pass.is_transposed, taps);
        let [weights_len, inputs_len] = [outputs, TILES_TOGETHER].map(|len| COEFFICIENTS * channels * len);
        let room = coefficients.elements(
            weights_len + inputs_len + VECTORS_TOGETHER * TRANSFORMED * S::F32_LANES * TILES_TOGETHER,
        );
        let (weights, room) = room.split_at_mut(weights_len);
        let (inputs, transformed) = room.split_at_mut(inputs_len);
        transform_weights(simd, S::as_simd_f32s(taps).0, channels, pass.is_transposed, weights);

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
                    let into = &mut squares::<S>(inputs)[vector * TILES_TOGETHER + at];
                    square.transform::<OfInputs, SIDE, SIDE>(simd, vector, &mut Coefficients(into));
                }
            }
            let transformed =
                S::as_mut_simd_f32s(transformed).0.as_chunks_mut::<TILE>().0.as_chunks_mut::<SIDE>().0;
            for vector in 0..output_vectors {
                let at = vector % VECTORS_TOGETHER;
                if at == 0 {
                    let weights = &weights[vector * COEFFICIENTS * channels * S::F32_LANES..];
                    let product = GroupProduct { channels, weights, inputs };
                    match (S::REGISTER_COUNT >= 32, vector + 1 < output_vectors) {
                        (true, true) => {
                            product.columns::<S, 2, VECTORS_TOGETHER>(simd, transformed, group.len())
                        }
                        (true, false) => product.columns::<S, 4, 1>(simd, transformed, group.len()),
                        // 16 outputs are a whole number of pairs of shorter vectors
                        (false, _) => {
                            product.columns::<S, 1, VECTORS_TOGETHER>(simd, transformed, group.len())
                        }
                    }
                }
                let zero = simd.splat_f32s(0.0);
                let bias = pass.bias.map_or(zero, |bias| S::as_simd_f32s(bias).0[vector]);
                for (tile, transformed) in group.clone().zip(&transformed[at * TILES_TOGETHER..]) {
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
                    for row in 0..TILE {
                        IntoOutputs::row(simd, row, transformed, &mut into);
                    }
                }
            }
        }
    }
}

/// The products of the coefficients of a group of tiles with the weights of some vectors of outputs.
struct GroupProduct<'a> {
    channels: usize,
    /// `[vector of outputs, column, channel, row, output]`.
    weights: &'a [f32],
    /// `[vector of channels, tile, column, row, channel]`.
    inputs: &'a [f32],
}

impl GroupProduct<'_> {
    /// Forms the products of the first `VECTORS` vectors of outputs, and transforms their columns into
    /// `transformed`, `[vector, tile]`. `TILES` tiles go together.
    #[inline(always)]
    fn columns<S: Simd, const TILES: usize, const VECTORS: usize>(
        &self,
        simd: S,
        transformed: &mut [[[S::f32s; TILE]; SIDE]],
        num_tiles: usize,
    ) {
        let tiles_of_channels = self.inputs.chunks_exact(TILES_TOGETHER * COEFFICIENTS * S::F32_LANES);
        let strides = [S::F32_LANES, COEFFICIENTS * S::F32_LANES];
        let columns_of_channels = columns::<S>(self.weights);
        for column in 0..SIDE {
            for tile in (0..num_tiles).step_by(TILES) {
                let first = (tile * COEFFICIENTS + column * SIDE) * S::F32_LANES;
                let mut sums = [[[simd.splat_f32s(0.0); SIDE]; TILES]; VECTORS];
                for (channel_vector, inputs) in tiles_of_channels.clone().enumerate() {
                    let inputs = &inputs[first..][..(TILES - 1) * strides[1] + SIDE * strides[0]];
                    let mut weights: [&[TileColumn<S>]; VECTORS] = [&[]; VECTORS];
                    for (vector, weights) in weights.iter_mut().enumerate() {
                        let first = (vector * SIDE + column) * self.channels + channel_vector * S::F32_LANES;
                        *weights = &columns_of_channels[first..][..S::F32_LANES];
                    }
                    for channel in 0..S::F32_LANES {
                        let weights = weights.map(|weights| &weights[channel]);
                        add_products(simd, &mut sums, inputs, channel, strides, weights);
                    }
                }
                for (vector, sums) in sums.into_iter().enumerate() {
                    let transformed = &mut transformed[vector * TILES_TOGETHER + tile..][..TILES];
                    for (transformed, sums) in transformed.iter_mut().zip(sums) {
                        transformed[column] = IntoOutputs::line(simd, sums);
                    }
                }
            }
        }
    }
}

/// Packs weights as `[channel, place of the kernel, output]`; they are `[output, channel, place]`, or
/// `[channel, output, place]` if they are transposed.
#[inline(always)]
fn pack(weight: &[f32], outputs: usize, is_transposed: bool, taps: &mut [f32]) {
    const PLACES: usize = KERNEL * KERNEL;
    let (rows, columns) = if is_transposed { (outputs, PLACES) } else { (outputs, weight.len() / outputs) };
    for (from, into) in weight.chunks_exact(rows * columns).zip(taps.chunks_exact_mut(rows * columns)) {
        transpose([rows, columns], from, columns, into, rows);
    }
}

/// Transforms the vectors of `taps`, `[channel, place of the kernel, output]`, with the kernels turned by
/// half a turn if they are transposed.
#[inline(always)]
fn transform_weights<S: Simd>(
    simd: S,
    taps: &[S::f32s],
    channels: usize,
    is_transposed: bool,
    weights: &mut [f32],
) {
    let space = taps.len() / (channels * KERNEL * KERNEL);
    let of_vectors = weights.chunks_exact_mut(COEFFICIENTS * channels * S::F32_LANES);
    for (vector, weights) in of_vectors.enumerate() {
        for (channel, taps) in taps.chunks_exact(KERNEL * KERNEL * space).enumerate() {
            let kernel = TurnableKernel { taps: &taps[vector..], space, is_turned: is_transposed };
            let values = S::as_mut_simd_f32s(weights).0.as_chunks_mut().0;
            OfKernel::square(simd, &kernel, &mut WeightCoefficients::<S> { values, channels, channel });
        }
    }
}

/// A vector of each place of a kernel.
struct TurnableKernel<'a, S: Simd> {
    taps: &'a [S::f32s],
    /// Vectors from a place to the next.
    space: usize,
    is_turned: bool,
}

impl<S: Simd> VectorSource<S> for TurnableKernel<'_, S> {
    #[inline(always)]
    fn get(&self, row: usize, column: usize) -> S::f32s {
        let place = row * KERNEL + column;
        self.taps[self.space * if self.is_turned { KERNEL * KERNEL - 1 - place } else { place }]
    }
}

/// The coefficients of a channel's kernels for a vector of outputs.
struct WeightCoefficients<'a, S: Simd> {
    /// `[column, channel]`.
    values: &'a mut [TileColumn<S>],
    channels: usize,
    channel: usize,
}

impl<S: Simd> VectorSink<S> for WeightCoefficients<'_, S> {
    #[inline(always)]
    fn put(&mut self, row: usize, column: usize, vector: S::f32s) {
        self.values[column * self.channels + self.channel][row] = vector;
    }
}
