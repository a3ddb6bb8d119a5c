//! Normalisation of groups of channels, an image at a time. The lanes of a vector are channels: blocks of
//! them go along the positions, and groups are formed of the results.

use crate::device::GroupNormShape;

/// The channels of a block.
const LANES: usize = 16;

/// The chains of a sum over positions: position p is in chain p mod 4, because an addition waits for the one
/// before it in its chain.
const CHAINS: usize = 4;

/// The values of a block of channels, of which those past the last channel do not matter.
type Lanes = [f32; LANES];

/// Loads the channels `at..at + width`.
#[inline(always)]
fn load(values: &[f32], at: usize, width: usize) -> Lanes {
    let mut lanes = [0.0; LANES];
    if width == LANES {
        lanes.copy_from_slice(&values[at..at + LANES]);
    } else {
        lanes[..width].copy_from_slice(&values[at..at + width]);
    }
    lanes
}

/// Writes the sum over the positions for each of the channels that `of_channels` and `sums` have a value
/// of. `term` gets an element of each of the `images` and the channel's values.
#[inline(always)]
fn sum_positions<const N: usize, const K: usize>(
    images: [&[f32]; N],
    of_channels: [&[f32]; K],
    sums: &mut [f32],
    term: impl Fn([f32; N], [f32; K]) -> f32,
) {
    let channels = sums.len();
    for first in (0..channels).step_by(LANES) {
        let width = LANES.min(channels - first);
        let of_lanes = load_all(of_channels, first, width);
        let mut chains = [[0.0; LANES]; CHAINS];
        let num_positions = images[0].len() / channels;
        for start in (0..num_positions).step_by(CHAINS) {
            for (chain, position) in chains.iter_mut().zip(start..num_positions) {
                let lanes = load_all(images, position * channels + first, width);
                for (lane, sum) in chain.iter_mut().enumerate() {
                    *sum += term(of_lane(&lanes, lane), of_lane(&of_lanes, lane));
                }
            }
        }
        let [a, b, c, d] = chains;
        let block = &mut sums[first..first + width];
        for (lane, sum) in block.iter_mut().enumerate() {
            *sum = (a[lane] + b[lane]) + (c[lane] + d[lane]);
        }
    }
}

/// Computes each element of `output` with `function` from that of each of the `images` and the values of
/// its channel.
#[inline(always)]
fn map_positions<const N: usize, const K: usize>(
    images: [&[f32]; N],
    of_channels: [&[f32]; K],
    channels: usize,
    output: &mut [f32],
    function: impl Fn([f32; N], [f32; K]) -> f32,
) {
    for first in (0..channels).step_by(LANES) {
        let width = LANES.min(channels - first);
        let of_lanes = load_all(of_channels, first, width);
        for position in 0..output.len() / channels {
            let at = position * channels + first;
            let lanes = load_all(images, at, width);
            let mut results = [0.0; LANES];
            for (lane, result) in results.iter_mut().enumerate() {
                *result = function(of_lane(&lanes, lane), of_lane(&of_lanes, lane));
            }
            if width == LANES {
                output[at..at + LANES].copy_from_slice(&results);
            } else {
                output[at..at + width].copy_from_slice(&results[..width]);
            }
        }
    }
}

#[inline(always)]
fn load_all<const N: usize>(arrays: [&[f32]; N], at: usize, width: usize) -> [Lanes; N] {
    let mut all = [[0.0; LANES]; N];
    all.iter_mut().zip(arrays).for_each(|(lanes, array)| *lanes = load(array, at, width));
    all
}

#[inline(always)]
fn of_lane<const N: usize>(lanes: &[Lanes; N], lane: usize) -> [f32; N] {
    let mut values = [0.0; N];
    values.iter_mut().zip(lanes).for_each(|(value, lanes)| *value = lanes[lane]);
    values
}

/// Writes the mean and 1/σ of each group of an image's channels to `saved`. `sums` and `means` are
/// memory for a value of each channel.
#[inline(always)]
fn statistics(shape: &GroupNormShape, x: &[f32], saved: &mut [f32], sums: &mut [f32], means: &mut [f32]) {
    let len = (shape.positions * shape.group_len()) as f32;
    sum_positions([x], [], sums, |[x], []| x);
    for (saved, sums) in saved.chunks_exact_mut(2).zip(sums.chunks_exact(shape.group_len())) {
        saved[0] = sums.iter().sum::<f32>() / len;
    }
    for (means, saved) in means.chunks_exact_mut(shape.group_len()).zip(saved.chunks_exact(2)) {
        means.fill(saved[0]);
    }
    sum_positions([x], [means], sums, |[x], [mean]| (x - mean) * (x - mean));
    for (saved, sums) in saved.chunks_exact_mut(2).zip(sums.chunks_exact(shape.group_len())) {
        saved[1] = 1.0 / (sums.iter().sum::<f32>() / len + shape.epsilon).sqrt();
    }
}

/// Writes the two values of each group to all of its channels.
#[inline(always)]
fn spread(shape: &GroupNormShape, of_groups: &[f32], first: &mut [f32], second: &mut [f32]) {
    let len = shape.group_len();
    let channels = first.chunks_exact_mut(len).zip(second.chunks_exact_mut(len));
    for ((first, second), of_group) in channels.zip(of_groups.chunks_exact(2)) {
        first.fill(of_group[0]);
        second.fill(of_group[1]);
    }
}

/// Normalises one image. `channels` is memory for two values of each channel.
#[inline(always)]
pub(super) fn group_forward(
    shape: &GroupNormShape,
    weight: &[f32],
    bias: Option<&[f32]>,
    [channels, saved]: [&mut [f32]; 2],
    x: &[f32],
    y: &mut [f32],
) {
    let (means, scales) = channels.split_at_mut(shape.channels);
    statistics(shape, x, saved, scales, means);
    spread(shape, saved, means, scales);
    let normalise = |x: f32, mean: f32, scale: f32, w: f32| (x - mean) * scale * w;
    match bias {
        Some(bias) => {
            let of_channels = [&*means, &*scales, weight, bias];
            map_positions([x], of_channels, shape.channels, y, |[x], [mean, scale, w, bias]| {
                normalise(x, mean, scale, w) + bias
            });
        }
        None => {
            let of_channels = [&*means, &*scales, weight];
            map_positions([x], of_channels, shape.channels, y, |[x], [mean, scale, w]| {
                normalise(x, mean, scale, w)
            });
        }
    }
}

/// Adds the gradient of the weight from one image to `sums`. `channels` is memory for three values of each
/// channel.
#[inline(always)]
pub(super) fn group_weight_gradient(
    shape: &GroupNormShape,
    saved: &[f32],
    channels: &mut [f32],
    images: [&[f32]; 2],
    sums: &mut [f32],
) {
    let (means, rest) = channels.split_at_mut(shape.channels);
    let (scales, of_image) = rest.split_at_mut(shape.channels);
    spread(shape, saved, means, scales);
    sum_positions(images, [means, scales], of_image, |[x, dy], [mean, scale]| (x - mean) * scale * dy);
    sums.iter_mut().zip(of_image).for_each(|(sum, of_image)| *sum += *of_image);
}

/// Computes the gradient of one image from its values and the gradient of the outputs. `channels` is
/// memory for four values of each channel.
#[inline(always)]
pub(super) fn group_input_gradient(
    shape: &GroupNormShape,
    weight: &[f32],
    saved: &[f32],
    channels: &mut [f32],
    [x, dy]: [&[f32]; 2],
    dx: &mut [f32],
) {
    let (num, len) = (shape.channels, (shape.positions * shape.group_len()) as f32);
    let (statistics, sums) = channels.split_at_mut(2 * num);
    let (means, scales) = statistics.split_at_mut(num);
    let (sums, products) = sums.split_at_mut(num);
    spread(shape, saved, means, scales);
    sum_positions([dy], [], sums, |[dy], []| dy);
    sum_positions([x, dy], [means, scales], products, |[x, dy], [mean, scale]| (x - mean) * scale * dy);
    let groups = sums.chunks_exact_mut(shape.group_len()).zip(products.chunks_exact_mut(shape.group_len()));
    for ((sums, products), weight) in groups.zip(weight.chunks_exact(shape.group_len())) {
        let mean = |values: &[f32]| values.iter().zip(weight).map(|(value, w)| value * w).sum::<f32>() / len;
        let (mean_g, mean_product) = (mean(sums), mean(products));
        sums.fill(mean_g);
        products.fill(mean_product);
    }
    let of_channels = [&*means, &*scales, weight, &*sums, &*products];
    map_positions([x, dy], of_channels, num, dx, |[x, dy], [mean, scale, w, mean_g, mean_product]| {
        let normalised = (x - mean) * scale;
        (dy * w - mean_g - normalised * mean_product) * scale
    });
}
