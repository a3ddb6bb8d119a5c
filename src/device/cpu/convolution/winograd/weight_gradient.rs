//! The gradient of the weights.

use std::ops::Range;

use pulp::{Simd, WithSimd};

use super::super::padding::ConvolutionScratch;
use super::image::Images;
use super::products::{Coefficients, add_products, columns, squares};
use super::transform::{IntoKernel, OfInputs, OfOutputs, Transform as _, VectorSink};
use super::{COEFFICIENTS, KERNEL, SIDE, TILE, Tiles};
use crate::device::ConvolutionShape;
use crate::device::cpu::transpose::transpose;

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
        let (channels, num_outputs) = (shape.channels, outputs.len());
        let tiles = Tiles::of(shape);
        let ConvolutionScratch { packed, coefficients, .. } = scratch;
        let len = tiles.of_image() * COEFFICIENTS;
        let half_len = SIDE * KERNEL * S::F32_LANES * S::F32_LANES;
        let room = coefficients.elements(len * (channels + num_outputs) + half_len);
        let (inputs, room) = room.split_at_mut(len * channels);
        let (gradients, transformed) = room.split_at_mut(len * num_outputs);
        // `[channel, place of the kernel, output]`
        let sums_of_output = channels * KERNEL * KERNEL;
        let packed = packed.elements(sums_of_output * num_outputs);
        transpose([num_outputs, sums_of_output], sums, sums_of_output, packed, num_outputs);
        let (images, results) = (Images::inputs(shape, input), Images::outputs(shape, gradient));
        let transformed =
            S::as_mut_simd_f32s(transformed).0.as_chunks_mut::<KERNEL>().0.as_chunks_mut::<SIDE>().0;
        // of a vector of channels or outputs
        let (vector_len, space) = (len * S::F32_LANES, num_outputs / S::F32_LANES);
        let num_images = input.len() / shape.image_len();
        for image in 0..num_images {
            for at in 0..tiles.of_image() {
                let tile = image * tiles.of_image() + at;
                if image + 1 < num_images {
                    images.fetch(tile + tiles.of_image());
                    results.fetch(tile + tiles.of_image());
                }
                let square = images.square::<S>(tile, shape.padding);
                for vector in 0..channels / S::F32_LANES {
                    let into = &mut squares::<S>(inputs)[vector * tiles.of_image() + at];
                    square.transform::<OfInputs, SIDE, SIDE>(simd, vector, &mut Coefficients(into));
                }
                let square = results.square::<S>(tile, 0);
                for vector in 0..space {
                    let into = &mut squares::<S>(gradients)[vector * tiles.of_image() + at];
                    let vector = outputs.start / S::F32_LANES + vector;
                    square.transform::<OfOutputs, TILE, SIDE>(simd, vector, &mut Coefficients(into));
                }
            }
            let packed = S::as_mut_simd_f32s(packed).0;
            for (channel_vector, inputs) in inputs.chunks_exact(vector_len).enumerate() {
                for (vector, gradients) in gradients.chunks_exact(vector_len).enumerate() {
                    if S::REGISTER_COUNT >= 32 {
                        transform_products::<S, 4>(simd, inputs, gradients, transformed);
                    } else if S::F32_LANES > 1 {
                        transform_products::<S, 2>(simd, inputs, gradients, transformed);
                    } else {
                        transform_products::<S, 1>(simd, inputs, gradients, transformed);
                    }
                    for (lane, transformed) in transformed.iter().enumerate() {
                        let channel = channel_vector * S::F32_LANES + lane;
                        let values = &mut packed[channel * KERNEL * KERNEL * space + vector..];
                        let mut into = AddedKernel { simd, values, space };
                        for row in 0..KERNEL {
                            IntoKernel::row(simd, row, transformed, &mut into);
                        }
                    }
                }
            }
        }
        transpose([sums_of_output, num_outputs], packed, num_outputs, sums, sums_of_output);
    }
}

/// Forms the products of the coefficients of a vector of channels and a vector of outputs, both
/// `[tile, column, row]`, over the tiles, and transforms their columns into the square of each
/// channel in `transformed`. `TOGETHER` channels go together.
#[inline(always)]
fn transform_products<S: Simd, const TOGETHER: usize>(
    simd: S,
    inputs: &[f32],
    gradients: &[f32],
    transformed: &mut [[[S::f32s; KERNEL]; SIDE]],
) {
    for column in 0..SIDE {
        for (group, transformed) in transformed.chunks_exact_mut(TOGETHER).enumerate() {
            let mut sums = [[[simd.splat_f32s(0.0); SIDE]; TOGETHER]];
            let inputs = inputs.chunks_exact(COEFFICIENTS * S::F32_LANES);
            for (inputs, gradients) in inputs.zip(columns::<S>(gradients).chunks_exact(SIDE)) {
                let inputs = &inputs[column * SIDE * S::F32_LANES + group * TOGETHER..];
                let inputs = &inputs[..(SIDE - 1) * S::F32_LANES + TOGETHER];
                add_products(simd, &mut sums, inputs, 0, [S::F32_LANES, 1], [&gradients[column]]);
            }
            for (transformed, sums) in transformed.iter_mut().zip(sums[0]) {
                transformed[column] = IntoKernel::line(simd, sums);
            }
        }
    }
}

/// A vector of each place of a kernel, to which vectors are added.
struct AddedKernel<'a, S: Simd> {
    simd: S,
    values: &'a mut [S::f32s],
    /// Vectors from a place to the next.
    space: usize,
}

impl<S: Simd> VectorSink<S> for AddedKernel<'_, S> {
    #[inline(always)]
    fn put(&mut self, row: usize, column: usize, vector: S::f32s) {
        let value = &mut self.values[(row * KERNEL + column) * self.space];
        *value = self.simd.add_f32s(*value, vector);
    }
}
