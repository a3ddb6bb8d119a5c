//! The gradient of the weights.

use std::ops::Range;

use pulp::{Simd, WithSimd};

use super::super::padding::ConvolutionScratch;
use super::coefficients::{AddedSquare, Matrices, VectorSquare};
use super::image::Image;
use super::transform::{IntoKernel, OfInputs, OfOutputs, Transform as _};
use super::{COEFFICIENTS, KERNEL, SIDE, TILE, tile_grid, tiles_of_image};
use crate::device::ConvolutionShape;
use crate::device::cpu::small_product::{Left, MatrixRows, MatrixRowsMut, SmallProduct};
use crate::device::cpu::transpose::transpose;

/// Input channels whose products are formed, transformed and added together: these stay in the first
/// caches.
const BLOCK: usize = 8;

/// The gradient of the weights of some outputs, a whole number of vectors, from some images.
pub(in super::super) struct WinogradWeightGradient<'a> {
    pub(in super::super) shape: &'a ConvolutionShape,
    pub(in super::super) input: &'a [f32],
    pub(in super::super) gradient: &'a [f32],
    pub(in super::super) outputs: Range<usize>,
    /// `[outputs, channels, kernel, kernel]`, to which the images are added one after the other.
    pub(in super::super) sums: &'a mut [f32],
    pub(in super::super) scratch: &'a mut ConvolutionScratch,
}

impl WithSimd for WinogradWeightGradient<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let WinogradWeightGradient { shape, input, gradient, outputs, sums, scratch } = self;
        let (channels, num_outputs, num_tiles) = (shape.channels, outputs.len(), tiles_of_image(shape));
        let ConvolutionScratch { packed, image: border, coefficients, .. } = scratch;
        let border = border.elements(SIDE * SIDE * channels.max(shape.outputs));
        let lens = [num_tiles * channels, num_tiles * num_outputs, BLOCK * num_outputs];
        let mut room = coefficients.elements(lens.iter().map(|len| Matrices::<SIDE>::len(*len)).sum());
        let [mut inputs, mut gradients, mut products] =
            lens.map(|len| Matrices::<SIDE>::split_off(&mut room, len));
        // `[channel, place of the kernel, output]`
        let sums_of_output = channels * KERNEL * KERNEL;
        let packed = packed.elements(sums_of_output * num_outputs);
        transpose([num_outputs, sums_of_output], sums, sums_of_output, packed, num_outputs);
        let input_size = [shape.height, shape.width, channels];
        let output_size = [shape.output_height(), shape.output_width(), shape.outputs];
        let inputs_of = |image: usize| Image::of(input, image, input_size);
        let gradients_of = |image: usize| Image::of(gradient, image, output_size);
        let [rows, columns] = tile_grid(shape);
        let num_images = input.len() / shape.image_len();
        for image in 0..num_images {
            for tile in 0..rows * columns {
                let place = [tile / columns * TILE, tile % columns * TILE];
                if image + 1 < num_images {
                    inputs_of(image + 1).fetch(place, TILE);
                    gradients_of(image + 1).fetch(place, TILE);
                }
                let place = place.map(|place| place as isize);
                let first = place.map(|place| place - shape.padding as isize);
                let patch = inputs_of(image).patch::<SIDE>(first, border);
                for channel in (0..channels).step_by(S::F32_LANES) {
                    let mut into = inputs.from(tile * channels + channel);
                    OfInputs::square(simd, &patch.channel(channel), &mut into);
                }
                let patch = gradients_of(image).patch::<TILE>(place, border);
                for output in (0..num_outputs).step_by(S::F32_LANES) {
                    let mut into = gradients.from(tile * num_outputs + output);
                    OfOutputs::square(simd, &patch.channel(outputs.start + output), &mut into);
                }
            }
            for first in (0..channels).step_by(BLOCK) {
                for k in 0..COEFFICIENTS {
                    let left = MatrixRows { values: &inputs.matrix(k)[first..], stride: channels };
                    let product = SmallProduct {
                        rows: BLOCK,
                        columns: num_outputs,
                        terms: num_tiles,
                        left: Left::Terms(left),
                        right: MatrixRows { values: gradients.matrix(k), stride: num_outputs },
                        target: MatrixRowsMut { values: products.matrix_mut(k), stride: num_outputs },
                        continues: false,
                    };
                    product.with_simd(simd);
                }
                let packed = &mut packed[first * KERNEL * KERNEL * num_outputs..];
                for at in (0..BLOCK * num_outputs).step_by(S::F32_LANES) {
                    let (channel, output) = (at / num_outputs, at % num_outputs);
                    let values = &mut packed[channel * KERNEL * KERNEL * num_outputs + output..];
                    let vectors = VectorSquare::<KERNEL> { values, space: num_outputs };
                    IntoKernel::square(simd, &products.from(at), &mut AddedSquare { simd, vectors });
                }
            }
        }
        transpose([sums_of_output, num_outputs], packed, num_outputs, sums, sums_of_output);
    }
}
