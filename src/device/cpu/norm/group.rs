//! Normalisation of groups of channels, an image at a time. The lanes of a vector are channels: blocks of
//! them go along the positions, and groups are formed of the results.

use pulp::{Simd, WithSimd};

use super::block::Block;
use crate::device::{GroupNormShape, NormShape};

/// The places of a group's mean and of its 1/σ in the saved values.
const MEAN: usize = 0;
const SCALE: usize = 1;

/// Writes a statistic of each group, which stands at `place` of its saved values, to all of its channels.
#[inline(always)]
fn spread(shape: &GroupNormShape, saved: &[f32], place: usize, channels: &mut [f32]) {
    let groups = channels.chunks_exact_mut(shape.group_len()).zip(saved.chunks_exact(NormShape::SAVED));
    groups.for_each(|(channels, saved)| channels.fill(saved[place]));
}

/// Images before their normalisation.
#[derive(Clone, Copy)]
pub(super) struct NormInput<'a> {
    pub(super) shape: &'a GroupNormShape,
    pub(super) input: &'a [f32],
    /// The mean and 1/σ of each group.
    pub(super) saved: &'a [f32],
}

impl<'a> NormInput<'a> {
    /// Returns runs of `rows` images, of which the last may be shorter.
    pub(super) fn parts(self, rows: usize) -> impl Iterator<Item = NormInput<'a>> {
        let inputs = self.input.chunks(rows * self.shape.image_len());
        let parts = inputs.zip(self.saved.chunks(rows * self.shape.saved_len()));
        parts.map(move |(input, saved)| NormInput { input, saved, ..self })
    }

    /// Returns the statistics of each image.
    #[inline(always)]
    fn statistics(self) -> impl Iterator<Item = &'a [f32]> {
        self.saved.chunks_exact(self.shape.saved_len())
    }
}

/// The terms of images in the gradients of the weight and of the bias, `[images, channels]` each.
pub(super) struct GroupSums<'a> {
    weight: &'a mut [f32],
    bias: &'a mut [f32],
}

impl<'a> GroupSums<'a> {
    /// Returns the terms of runs of `rows` images, of which the last may be shorter, in the array of all.
    pub(super) fn parts(
        shape: &GroupNormShape,
        rows: usize,
        sums: &'a mut [f32],
    ) -> impl Iterator<Item = GroupSums<'a>> {
        let len = rows * shape.channels;
        let (weight, bias) = sums.split_at_mut(shape.rows * shape.channels);
        let parts = weight.chunks_mut(len).zip(bias.chunks_mut(len));
        parts.map(|(weight, bias)| GroupSums { weight, bias })
    }
}

/// The arrays that make the outputs of normalised values.
#[derive(Clone, Copy)]
pub(super) struct GroupAffine<'a> {
    pub(super) weight: &'a [f32],
    pub(super) bias: &'a [f32],
    /// The images that are added, before the ReLU.
    pub(super) added: Option<&'a [f32]>,
}

/// Normalises images.
pub(super) struct GroupForward<'a> {
    pub(super) shape: &'a GroupNormShape,
    pub(super) input: &'a [f32],
    pub(super) affine: GroupAffine<'a>,
    pub(super) saved: &'a mut [f32],
    pub(super) output: &'a mut [f32],
    /// Memory for two values of each channel.
    pub(super) channels: &'a mut [f32],
}

impl WithSimd for GroupForward<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let GroupForward { shape, input, affine, saved, output, channels } = self;
        let (num, len) = (shape.channels, (shape.positions * shape.group_len()) as f32);
        let (means, sums) = channels.split_at_mut(num);
        let images = input.chunks_exact(shape.image_len()).zip(output.chunks_exact_mut(shape.image_len()));
        for (image, ((x, y), saved)) in images.zip(saved.chunks_exact_mut(shape.saved_len())).enumerate() {
            for block in Block::all(simd, num) {
                block.sum(
                    [x],
                    &mut [&mut *sums],
                    #[inline(always)]
                    |[x]| [x],
                );
            }
            let groups = saved.chunks_exact_mut(NormShape::SAVED);
            for (saved, sums) in groups.zip(sums.chunks_exact(shape.group_len())) {
                saved[MEAN] = sums.iter().sum::<f32>() / len;
            }
            spread(shape, saved, MEAN, means);
            for block in Block::all(simd, num) {
                let [mean] = block.load([means], 0);
                block.sum(
                    [x],
                    &mut [&mut *sums],
                    #[inline(always)]
                    |[x]| {
                        let deviation = simd.sub_f32s(x, mean);
                        [simd.mul_f32s(deviation, deviation)]
                    },
                );
            }
            let groups = saved.chunks_exact_mut(NormShape::SAVED);
            for (saved, sums) in groups.zip(sums.chunks_exact(shape.group_len())) {
                saved[SCALE] = 1.0 / (sums.iter().sum::<f32>() / len + shape.epsilon).sqrt();
            }
            let scales = &mut *sums;
            spread(shape, saved, SCALE, scales);
            let statistics = [&*means, scales];
            match affine.added {
                None => affine.apply(simd, shape, statistics, [x], y),
                Some(added) => {
                    let [added] = image_of([added], image, shape);
                    affine.apply(simd, shape, statistics, [x, added], y);
                }
            }
        }
    }
}

impl GroupAffine<'_> {
    /// Computes an image of outputs from x and, if there is one, the image that is added.
    #[inline(always)]
    fn apply<S: Simd, const N: usize>(
        self,
        simd: S,
        shape: &GroupNormShape,
        [means, scales]: [&[f32]; 2],
        images: [&[f32]; N],
        output: &mut [f32],
    ) {
        // no value is below −∞
        let least = simd.splat_f32s(if shape.relu { 0.0 } else { f32::NEG_INFINITY });
        for block in Block::all(simd, shape.channels) {
            let [mean, scale, weight, bias] = block.load([means, scales, self.weight, self.bias], 0);
            block.map(
                images,
                output,
                #[inline(always)]
                |values| {
                    let mut value = simd.add_f32s(normalise(simd, values[0], [mean, scale, weight]), bias);
                    if let Some(added) = values.get(1) {
                        value = simd.add_f32s(value, *added);
                    }
                    // NaN stays
                    simd.select_f32s(simd.less_than_or_equal_f32s(value, least), least, value)
                },
            );
        }
    }
}

/// Returns (x − mean) · scale · factor.
#[inline(always)]
fn normalise<S: Simd>(simd: S, x: S::f32s, [mean, scale, factor]: [S::f32s; 3]) -> S::f32s {
    simd.mul_f32s(simd.mul_f32s(simd.sub_f32s(x, mean), scale), factor)
}

/// Writes the terms of images in the gradients of the weight and the bias.
pub(super) struct GroupPositionSums<'a> {
    pub(super) norm_input: NormInput<'a>,
    pub(super) gradient: &'a [f32],
    /// Memory for two values of each channel.
    pub(super) channels: &'a mut [f32],
    pub(super) sums: GroupSums<'a>,
}

impl WithSimd for GroupPositionSums<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let GroupPositionSums { norm_input, gradient, channels, sums } = self;
        let shape = norm_input.shape;
        let (means, scales) = channels.split_at_mut(shape.channels);
        let images = norm_input.statistics().enumerate();
        let sums =
            sums.weight.chunks_exact_mut(shape.channels).zip(sums.bias.chunks_exact_mut(shape.channels));
        for ((image, saved), (products, sums)) in images.zip(sums) {
            let values = image_of([norm_input.input, gradient], image, shape);
            spread(shape, saved, MEAN, means);
            spread(shape, saved, SCALE, scales);
            for block in Block::all(simd, shape.channels) {
                sum_gradients(block, values, [means, scales], [&mut *sums, &mut *products]);
            }
        }
    }
}

/// Returns an image of each of the `arrays`.
#[inline(always)]
fn image_of<'a, const N: usize>(
    arrays: [&'a [f32]; N],
    image: usize,
    shape: &GroupNormShape,
) -> [&'a [f32]; N] {
    let len = shape.image_len();
    arrays.map(|array| &array[image * len..(image + 1) * len])
}

/// Returns the input x and the gradient before the ReLU, from x, the gradient after it, and the outputs if
/// there is a ReLU.
#[inline(always)]
fn before_relu<S: Simd, const N: usize>(simd: S, values: [S::f32s; N]) -> [S::f32s; 2] {
    let (x, gradient) = (values[0], values[1]);
    match values.get(2) {
        None => [x, gradient],
        Some(output) => {
            let zero = simd.splat_f32s(0.0);
            [x, simd.select_f32s(simd.less_than_f32s(zero, *output), gradient, zero)]
        }
    }
}

/// Writes the sums over the positions of an image of the gradient, and of its products with x̂, from the
/// values of [`before_relu`].
#[inline(always)]
fn sum_gradients<S: Simd, const N: usize>(
    block: Block<S>,
    image: [&[f32]; N],
    [means, scales]: [&[f32]; 2],
    mut sums: [&mut [f32]; 2],
) {
    let simd = block.simd;
    let [mean, scale] = block.load([means, scales], 0);
    block.sum(
        image,
        &mut sums,
        #[inline(always)]
        |values| {
            let [x, dy] = before_relu(simd, values);
            [dy, normalise(simd, x, [mean, scale, dy])]
        },
    );
}

/// The arrays of a backward pass of images.
pub(super) struct BackwardArrays<'a> {
    pub(super) norm_input: NormInput<'a>,
    pub(super) weight: &'a [f32],
    pub(super) gradient: &'a [f32],
    /// Memory for four values of each channel.
    pub(super) channels: &'a mut [f32],
    pub(super) input_gradient: &'a mut [f32],
}

/// Computes the gradient of images, and their terms in those of the weight and the bias if they are wanted.
pub(super) struct GroupBackward<'a> {
    pub(super) arrays: BackwardArrays<'a>,
    /// The outputs, if the gradient goes through a ReLU first.
    pub(super) output: Option<&'a [f32]>,
    pub(super) sums: Option<GroupSums<'a>>,
}

impl WithSimd for GroupBackward<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let GroupBackward { arrays, output, sums } = self;
        let (input, gradient) = (arrays.norm_input.input, arrays.gradient);
        match output {
            Some(output) => arrays.backpropagate(simd, [input, gradient, output], sums),
            None => arrays.backpropagate(simd, [input, gradient], sums),
        }
    }
}

impl BackwardArrays<'_> {
    /// Runs the passes over the images in `arrays`: see [`before_relu`].
    #[inline(always)]
    fn backpropagate<S: Simd, const N: usize>(
        self,
        simd: S,
        arrays: [&[f32]; N],
        mut terms: Option<GroupSums<'_>>,
    ) {
        let BackwardArrays { norm_input, weight, channels, input_gradient, .. } = self;
        let shape = norm_input.shape;
        let (num, len) = (shape.channels, (shape.positions * shape.group_len()) as f32);
        let (statistics, sums) = channels.split_at_mut(2 * num);
        let (means, scales) = statistics.split_at_mut(num);
        let (sums, products) = sums.split_at_mut(num);
        let images = norm_input.statistics().zip(input_gradient.chunks_exact_mut(shape.image_len()));
        for (image, (saved, dx)) in images.enumerate() {
            let values = image_of(arrays, image, shape);
            spread(shape, saved, MEAN, means);
            spread(shape, saved, SCALE, scales);
            for block in Block::all(simd, num) {
                sum_gradients(block, values, [means, scales], [&mut *sums, &mut *products]);
            }
            if let Some(GroupSums { weight, bias }) = &mut terms {
                weight[image * num..(image + 1) * num].copy_from_slice(products);
                bias[image * num..(image + 1) * num].copy_from_slice(sums);
            }
            let groups = sums.chunks_exact_mut(shape.group_len());
            let groups = groups.zip(products.chunks_exact_mut(shape.group_len()));
            for ((sums, products), weight) in groups.zip(weight.chunks_exact(shape.group_len())) {
                let mean =
                    |values: &[f32]| values.iter().zip(weight).map(|(value, w)| value * w).sum::<f32>() / len;
                let (mean_g, mean_product) = (mean(sums), mean(products));
                sums.fill(mean_g);
                products.fill(mean_product);
            }
            for block in Block::all(simd, num) {
                let of_channels = block.load([means, scales, weight, sums, products], 0);
                let [mean, scale, weight, mean_g, mean_product] = of_channels;
                block.map(
                    values,
                    dx,
                    #[inline(always)]
                    |values| {
                        let [x, dy] = before_relu(simd, values);
                        let centred = simd.sub_f32s(simd.mul_f32s(dy, weight), mean_g);
                        let along = normalise(simd, x, [mean, scale, mean_product]);
                        simd.mul_f32s(simd.sub_f32s(centred, along), scale)
                    },
                );
            }
        }
    }
}
