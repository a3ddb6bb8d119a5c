//! Normalisation of groups of channels, an image at a time. The lanes of a vector are channels: blocks of
//! them go along the positions, and groups are formed of the results.

use std::ops::Range;

use pulp::{Simd, WithSimd};

use crate::device::{GroupNormShape, NormShape};

/// The chains of a sum over positions: position p is in chain p mod 4, because an addition waits for the one
/// before it in its chain.
const CHAINS: usize = 4;

/// The channels of a vector. Lanes past the last channel do not matter.
#[derive(Clone, Copy)]
struct Block<S> {
    simd: S,
    first: usize,
    len: usize,
    /// Elements from a position to the next.
    channels: usize,
}

impl<S: Simd> Block<S> {
    /// Returns the blocks of all channels.
    #[inline(always)]
    fn all(simd: S, channels: usize) -> impl Iterator<Item = Block<S>> {
        let firsts = (0..channels).step_by(S::F32_LANES);
        firsts.map(move |first| Block { simd, first, len: S::F32_LANES.min(channels - first), channels })
    }

    /// Loads the channels of a position from each of the `images`.
    #[inline(always)]
    fn load<const N: usize>(self, images: [&[f32]; N], position: usize) -> [S::f32s; N] {
        let at = position * self.channels + self.first;
        let mut vectors = [self.simd.splat_f32s(0.0); N];
        for (vector, image) in vectors.iter_mut().zip(images) {
            *vector = if self.len == S::F32_LANES {
                S::as_simd_f32s(&image[at..at + S::F32_LANES]).0[0]
            } else {
                self.simd.partial_load_f32s(&image[at..at + self.len])
            };
        }
        vectors
    }

    /// Writes the channels of a position.
    #[inline(always)]
    fn store(self, image: &mut [f32], position: usize, vector: S::f32s) {
        let at = position * self.channels + self.first;
        if self.len == S::F32_LANES {
            S::as_mut_simd_f32s(&mut image[at..at + S::F32_LANES]).0[0] = vector;
        } else {
            self.simd.partial_store_f32s(&mut image[at..at + self.len], vector);
        }
    }

    /// Adds a term to each sum.
    #[inline(always)]
    fn add<const M: usize>(self, terms: [S::f32s; M], sums: &mut [S::f32s; M]) {
        sums.iter_mut().zip(terms).for_each(|(sum, term)| *sum = self.simd.add_f32s(*sum, term));
    }

    /// Writes sums over the positions to the channels of `sums`. The chains of every `CHAINS`
    /// positions are in registers.
    #[inline(always)]
    fn sum<const N: usize, const M: usize>(
        self,
        images: [&[f32]; N],
        sums: &mut [&mut [f32]; M],
        term: impl Fn([S::f32s; N]) -> [S::f32s; M],
    ) {
        let mut chains = [[self.simd.splat_f32s(0.0); M]; CHAINS];
        let num_positions = images[0].len() / self.channels;
        let whole = num_positions - num_positions % CHAINS;
        for start in (0..whole).step_by(CHAINS) {
            for (at, chain) in chains.iter_mut().enumerate() {
                self.add(term(self.load(images, start + at)), chain);
            }
        }
        // a copy, because a loop of a length that is not known would keep the chains in memory
        let mut ends = chains;
        for (chain, position) in ends.iter_mut().zip(whole..num_positions) {
            self.add(term(self.load(images, position)), chain);
        }
        let [a, b, c, d] = ends;
        for (at, sums) in sums.iter_mut().enumerate() {
            let (first, second) = (self.simd.add_f32s(a[at], b[at]), self.simd.add_f32s(c[at], d[at]));
            self.store(sums, 0, self.simd.add_f32s(first, second));
        }
    }

    /// Computes each element of `output` with `function` from that of each of the `images`.
    #[inline(always)]
    fn map<const N: usize>(
        self,
        images: [&[f32]; N],
        output: &mut [f32],
        function: impl Fn([S::f32s; N]) -> S::f32s,
    ) {
        for position in 0..output.len() / self.channels {
            self.store(output, position, function(self.load(images, position)));
        }
    }
}

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
    /// Returns some of the images.
    pub(super) fn part(self, images: Range<usize>) -> NormInput<'a> {
        let of = |len: usize| images.start * len..images.end * len;
        let (values, saved) = (of(self.shape.image_len()), of(self.shape.saved_len()));
        NormInput { input: &self.input[values], saved: &self.saved[saved], ..self }
    }

    /// Returns the values and the statistics of each image.
    #[inline(always)]
    fn images(self) -> impl Iterator<Item = (&'a [f32], &'a [f32])> {
        let images = self.input.chunks_exact(self.shape.image_len());
        images.zip(self.saved.chunks_exact(self.shape.saved_len()))
    }
}

/// Normalises images.
pub(super) struct GroupForward<'a> {
    pub(super) shape: &'a GroupNormShape,
    pub(super) input: &'a [f32],
    pub(super) weight: &'a [f32],
    pub(super) bias: Option<&'a [f32]>,
    pub(super) saved: &'a mut [f32],
    pub(super) output: &'a mut [f32],
    /// Memory for two values of each channel.
    pub(super) channels: &'a mut [f32],
}

impl WithSimd for GroupForward<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let GroupForward { shape, input, weight, bias, saved, output, channels } = self;
        let (num, len) = (shape.channels, (shape.positions * shape.group_len()) as f32);
        let (means, sums) = channels.split_at_mut(num);
        let images = input.chunks_exact(shape.image_len()).zip(output.chunks_exact_mut(shape.image_len()));
        for ((x, y), saved) in images.zip(saved.chunks_exact_mut(shape.saved_len())) {
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
            for block in Block::all(simd, num) {
                let statistics = block.load([means, scales, weight], 0);
                match bias {
                    Some(bias) => {
                        let [bias] = block.load([bias], 0);
                        block.map(
                            [x],
                            y,
                            #[inline(always)]
                            |[x]| simd.add_f32s(normalise(simd, x, statistics), bias),
                        );
                    }
                    None => block.map(
                        [x],
                        y,
                        #[inline(always)]
                        |[x]| normalise(simd, x, statistics),
                    ),
                }
            }
        }
    }
}

/// Returns (x − mean) · scale · factor.
#[inline(always)]
fn normalise<S: Simd>(simd: S, x: S::f32s, [mean, scale, factor]: [S::f32s; 3]) -> S::f32s {
    simd.mul_f32s(simd.mul_f32s(simd.sub_f32s(x, mean), scale), factor)
}

/// Adds the gradient of the weight from images to `sums`, an image after the other.
pub(super) struct GroupWeightGradient<'a> {
    pub(super) norm_input: NormInput<'a>,
    pub(super) gradient: &'a [f32],
    /// Memory for three values of each channel.
    pub(super) channels: &'a mut [f32],
    pub(super) sums: &'a mut [f32],
}

impl WithSimd for GroupWeightGradient<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let GroupWeightGradient { norm_input, gradient, channels, sums } = self;
        let shape = norm_input.shape;
        let (means, rest) = channels.split_at_mut(shape.channels);
        let (scales, of_image) = rest.split_at_mut(shape.channels);
        for ((x, saved), dy) in norm_input.images().zip(gradient.chunks_exact(shape.image_len())) {
            spread(shape, saved, MEAN, means);
            spread(shape, saved, SCALE, scales);
            for block in Block::all(simd, shape.channels) {
                let [mean, scale] = block.load([means, scales], 0);
                block.sum(
                    [x, dy],
                    &mut [&mut *of_image],
                    #[inline(always)]
                    |[x, dy]| [normalise(simd, x, [mean, scale, dy])],
                );
            }
            sums.iter_mut().zip(&*of_image).for_each(|(sum, of_image)| *sum += of_image);
        }
    }
}

/// Computes the gradient of images from their values and the gradient of the outputs, and adds up that of
/// the weight if there are sums.
pub(super) struct GroupInputGradient<'a> {
    pub(super) norm_input: NormInput<'a>,
    pub(super) weight: &'a [f32],
    pub(super) gradient: &'a [f32],
    /// Memory for four values of each channel.
    pub(super) channels: &'a mut [f32],
    pub(super) input_gradient: &'a mut [f32],
    pub(super) weight_sums: Option<&'a mut [f32]>,
}

impl WithSimd for GroupInputGradient<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let GroupInputGradient { norm_input, weight, gradient, channels, input_gradient, mut weight_sums } =
            self;
        let shape = norm_input.shape;
        let (num, len) = (shape.channels, (shape.positions * shape.group_len()) as f32);
        let (statistics, sums) = channels.split_at_mut(2 * num);
        let (means, scales) = statistics.split_at_mut(num);
        let (sums, products) = sums.split_at_mut(num);
        let gradients = gradient.chunks_exact(shape.image_len());
        let gradients = gradients.zip(input_gradient.chunks_exact_mut(shape.image_len()));
        for ((x, saved), (dy, dx)) in norm_input.images().zip(gradients) {
            spread(shape, saved, MEAN, means);
            spread(shape, saved, SCALE, scales);
            for block in Block::all(simd, num) {
                let [mean, scale] = block.load([means, scales], 0);
                block.sum(
                    [x, dy],
                    &mut [&mut *sums, &mut *products],
                    #[inline(always)]
                    |[x, dy]| [dy, normalise(simd, x, [mean, scale, dy])],
                );
            }
            if let Some(weight_sums) = &mut weight_sums {
                weight_sums.iter_mut().zip(&*products).for_each(|(sum, of_image)| *sum += of_image);
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
                    [x, dy],
                    dx,
                    #[inline(always)]
                    |[x, dy]| {
                        let centred = simd.sub_f32s(simd.mul_f32s(dy, weight), mean_g);
                        let along = normalise(simd, x, [mean, scale, mean_product]);
                        simd.mul_f32s(simd.sub_f32s(centred, along), scale)
                    },
                );
            }
        }
    }
}
