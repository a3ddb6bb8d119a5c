//! The forward pass, and the gradient of the inputs.

use pulp::{Simd, WithSimd};

use super::super::forward::Forward;
use super::super::padding::ConvolutionScratch;
use super::coefficients::{Matrices, Turned, VectorSquare};
use super::image::{Image, OutputTile, load};
use super::transform::{IntoOutputs, OfInputs, OfKernel, Transform as _};
use super::{COEFFICIENTS, KERNEL, SIDE, TILE, tile_grid};
use crate::device::ConvolutionShape;
use crate::device::cpu::small_product::{Left, MatrixRows, MatrixRowsMut, SmallProduct};
use crate::device::cpu::transpose::transpose;

/// Tiles that are transformed and multiplied together: their coefficients stay in the second cache.
const BLOCK: usize = 16;

/// A forward pass, of which the scratch memory's rooms hold coefficients.
pub(in super::super) struct WinogradForward<'a>(pub(in super::super) Forward<'a>);

impl WithSimd for WinogradForward<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let WinogradForward(pass) = self;
        let shape = pass.shape;
        let (channels, outputs) = (shape.channels, shape.outputs);
        let ConvolutionScratch { packed, image: border, coefficients, .. } = pass.scratch;
        let taps = packed.elements(shape.weight_len());
        pack(pass.weight, outputs, pass.is_transposed, taps);
        let lens = [channels * outputs, BLOCK * channels, BLOCK * outputs];
        let mut room = coefficients.elements(lens.iter().map(|len| Matrices::<SIDE>::len(*len)).sum());
        let [mut weights, mut inputs, mut products] = lens.map(|len| Matrices::split_off(&mut room, len));
        transform_weights(simd, taps, outputs, pass.is_transposed, &mut weights);

        let border = border.elements(SIDE * SIDE * channels);
        let images = Images { shape, input: pass.input, grid: tile_grid(shape) };
        let num_tiles = pass.input.len() / shape.image_len() * images.grid[0] * images.grid[1];
        for first in (0..num_tiles).step_by(BLOCK) {
            let tiles = first..num_tiles.min(first + BLOCK);
            for (at, tile) in tiles.clone().enumerate() {
                let padding = shape.padding as isize;
                let (image, place) = images.input(tile);
                let place = place.map(|place| place as isize - padding);
                let patch = image.patch::<SIDE>(place, border);
                if tile + BLOCK < num_tiles {
                    let (image, place) = images.input(tile + BLOCK);
                    image.fetch(place, TILE);
                }
                images.output_image(tile, pass.output).fetch(images.place(tile).1, TILE);
                for channel in (0..channels).step_by(S::F32_LANES) {
                    let mut into = inputs.from(at * channels + channel);
                    OfInputs::square(simd, &patch.channel(channel), &mut into);
                }
            }
            for k in 0..COEFFICIENTS {
                let product = SmallProduct {
                    rows: tiles.len(),
                    columns: outputs,
                    terms: channels,
                    left: Left::Rows(MatrixRows { values: inputs.matrix(k), stride: channels }),
                    right: MatrixRows { values: weights.matrix(k), stride: outputs },
                    target: MatrixRowsMut { values: products.matrix_mut(k), stride: outputs },
                    continues: false,
                };
                product.with_simd(simd);
            }
            for (at, tile) in tiles.enumerate() {
                let (start, rows, columns) = images.output(tile);
                for channel in (0..outputs).step_by(S::F32_LANES) {
                    let zero = simd.splat_f32s(0.0);
                    let bias = pass.bias.map_or(zero, |bias| load::<S>(&bias[channel..]));
                    let mut into = OutputTile {
                        simd,
                        values: &mut pass.output[start + channel..],
                        row_stride: shape.output_width() * outputs,
                        channels: outputs,
                        rows,
                        columns,
                        bias,
                    };
                    IntoOutputs::square(simd, &products.from(at * outputs + channel), &mut into);
                }
            }
        }
    }
}

/// The images of a pass, in tiles.
struct Images<'a> {
    shape: &'a ConvolutionShape,
    input: &'a [f32],
    /// The rows and columns of tiles of an image.
    grid: [usize; 2],
}

impl Images<'_> {
    /// Returns the number of a tile's image, and the row and column of its first output.
    #[inline(always)]
    fn place(&self, tile: usize) -> (usize, [usize; 2]) {
        let [rows, columns] = self.grid;
        let (image, tile) = (tile / (rows * columns), tile % (rows * columns));
        (image, [tile / columns * TILE, tile % columns * TILE])
    }

    /// Returns a tile's image and place.
    #[inline(always)]
    fn input(&self, tile: usize) -> (Image<'_>, [usize; 2]) {
        let ConvolutionShape { height, width, channels, .. } = *self.shape;
        let (image, place) = self.place(tile);
        (Image::of(self.input, image, [height, width, channels]), place)
    }

    /// Returns a tile's image of outputs.
    #[inline(always)]
    fn output_image<'a>(&self, tile: usize, output: &'a [f32]) -> Image<'a> {
        let (height, width) = (self.shape.output_height(), self.shape.output_width());
        Image::of(output, self.place(tile).0, [height, width, self.shape.outputs])
    }

    /// Returns a tile's first element of the outputs, and its rows and columns that are inside the image.
    #[inline(always)]
    fn output(&self, tile: usize) -> (usize, usize, usize) {
        let (image, [row, column]) = self.place(tile);
        let (height, width) = (self.shape.output_height(), self.shape.output_width());
        let start = image * self.shape.output_len() + (row * width + column) * self.shape.outputs;
        (start, height - row, width - column)
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

/// Transforms `taps` into `weights`, `[channel, output]` each, with the kernels turned by half a turn if they
/// are transposed.
#[inline(always)]
fn transform_weights<S: Simd>(
    simd: S,
    taps: &mut [f32],
    outputs: usize,
    is_transposed: bool,
    weights: &mut Matrices<'_, SIDE>,
) {
    for (channel, taps) in taps.chunks_exact_mut(KERNEL * KERNEL * outputs).enumerate() {
        for output in (0..outputs).step_by(S::F32_LANES) {
            let kernel = VectorSquare::<KERNEL> { values: &mut taps[output..], space: outputs };
            let mut into = weights.from(channel * outputs + output);
            if is_transposed {
                OfKernel::square(simd, &Turned(kernel), &mut into);
            } else {
                OfKernel::square(simd, &kernel, &mut into);
            }
        }
    }
}
