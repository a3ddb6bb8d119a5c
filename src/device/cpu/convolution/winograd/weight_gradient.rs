//! The gradient of the weights.

use std::ops::Range;

use pulp::{Simd, WithSimd};

use super::super::padding::ConvolutionScratch;
use super::image::Images;
use super::products::{CoefficientSquare, Coefficients, Formed, add_products, squares};
use super::transform::{IntoKernel, OfInputs, OfOutputs, Transform as _, VectorSink};
use super::{CHANNEL_MULTIPLE, COEFFICIENTS, KERNEL, PLACES, SIDE, TILE, Tiles};
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
        // one tile more than there are, so that the coefficients of a tile are in several sets of the cache
        let stride = tiles.of_image() + 1;
        let len = stride * COEFFICIENTS;
        let together = vectors_together::<S>();
        let results_len = COEFFICIENTS * S::F32_LANES * together * S::F32_LANES;
        let room = coefficients.elements(len * (channels + num_outputs) + results_len);
        let (inputs, room) = room.split_at_mut(len * channels);
        let (gradients, results) = room.split_at_mut(len * num_outputs);
        // `[channel, place of the kernel, output]`
        let sums_of_output = channels * PLACES;
        let packed = packed.elements(sums_of_output * num_outputs);
        transpose([num_outputs, sums_of_output], sums, sums_of_output, packed, num_outputs);
        let (images, gradient_images) = (Images::inputs(shape, input), Images::outputs(shape, gradient));
        let results = squares::<S>(results);
        let space = num_outputs / S::F32_LANES;
        let num_images = input.len() / shape.image_len();
        for image in 0..num_images {
            for at in 0..tiles.of_image() {
                let tile = image * tiles.of_image() + at;
                if image + 1 < num_images {
                    images.fetch(tile + tiles.of_image());
                    gradient_images.fetch(tile + tiles.of_image());
                }
                let square = images.square::<S>(tile, shape.padding);
                let inputs = S::as_mut_simd_f32s(inputs).0;
                for vector in 0..channels / S::F32_LANES {
                    let values = &mut inputs[vector * len + at..];
                    square.transform::<OfInputs, SIDE, SIDE>(
                        simd,
                        vector,
                        &mut Coefficients { values, stride },
                    );
                }
                let square = gradient_images.square::<S>(tile, 0);
                let gradients = S::as_mut_simd_f32s(gradients).0;
                for vector in 0..space {
                    // the vectors that go together alternate
                    let first = vector / together * together;
                    let values = &mut gradients[first * len + at * together + vector - first..];
                    let into = &mut Coefficients { values, stride: stride * together };
                    let vector = outputs.start / S::F32_LANES + vector;
                    square.transform::<OfOutputs, TILE, SIDE>(simd, vector, into);
                }
            }
            let packed = S::as_mut_simd_f32s(packed).0;
            let gradients = S::as_simd_f32s(gradients).0;
            for (channel_vector, inputs) in inputs.chunks_exact(len * S::F32_LANES).enumerate() {
                for vector in (0..space).step_by(together) {
                    let product = ImageProduct::<S> { inputs, gradients: &gradients[vector * len..], stride };
                    match S::F32_LANES {
                        16.. => product.form::<16, 1>(simd, results),
                        4.. => product.form::<4, 2>(simd, results),
                        _ => product.form::<1, 2>(simd, results),
                    }
                    for (at, result) in results.iter().enumerate() {
                        let channel = channel_vector * S::F32_LANES + at / together;
                        let first = channel * PLACES * space + vector + at % together;
                        let values = &mut packed[first..];
                        IntoKernel::square(simd, &Formed(result), &mut AddedKernel { simd, values, space });
                    }
                }
            }
        }
        transpose([sums_of_output, num_outputs], packed, num_outputs, sums, sums_of_output);
    }
}

/// Returns the vectors of outputs whose products are formed together, of which there is a multiple: few, so
/// that the products of a whole vector of channels with them stay in an L1 cache of 48 KiB.
#[inline(always)]
fn vectors_together<S: Simd>() -> usize {
    if S::F32_LANES < CHANNEL_MULTIPLE { 2 } else { 1 }
}

/// The products of the coefficients of a vector of channels and of some vectors of outputs, over the tiles
/// of an image.
struct ImageProduct<'a, S: Simd> {
    /// `[coefficient, tile, channel]`.
    inputs: &'a [f32],
    /// `[coefficient, tile, vector of outputs, output]`.
    gradients: &'a [S::f32s],
    /// Tiles from a coefficient to the next.
    stride: usize,
}

impl<S: Simd> ImageProduct<'_, S> {
    /// Forms the products of `VECTORS` vectors of outputs into `results`, `[channel, vector]`. `CHANNELS`
    /// channels go together.
    #[inline(always)]
    fn form<const CHANNELS: usize, const VECTORS: usize>(
        &self,
        simd: S,
        results: &mut [CoefficientSquare<S>],
    ) {
        let of_coefficients = self.inputs.chunks_exact(self.stride * S::F32_LANES);
        let gradients = self.gradients.as_chunks::<VECTORS>().0.chunks_exact(self.stride);
        for (coefficient, (inputs, gradients)) in of_coefficients.zip(gradients).enumerate() {
            let gradients = &gradients[..self.stride - 1];
            for (group, results) in results.chunks_exact_mut(CHANNELS * VECTORS).enumerate() {
                let mut sums = [[simd.splat_f32s(0.0); VECTORS]; CHANNELS];
                add_products(simd, &mut sums, &inputs[group * CHANNELS..], [S::F32_LANES, 1], gradients);
                results
                    .iter_mut()
                    .zip(sums.as_flattened())
                    .for_each(|(result, sum)| result[coefficient] = *sum);
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
