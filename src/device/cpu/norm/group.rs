//! Passes of one image through a group norm.

use crate::device::GroupNormShape;

/// Writes the mean and 1/σ of each group of an image's channels to `saved`. `sums` and `means` are
/// memory for a value of each channel.
#[inline(always)]
fn statistics(shape: &GroupNormShape, x: &[f32], saved: &mut [f32], sums: &mut [f32], means: &mut [f32]) {
    let len = (shape.positions * shape.group_len()) as f32;
    sums.fill(0.0);
    for x in x.chunks_exact(shape.channels) {
        sums.iter_mut().zip(x).for_each(|(sum, x)| *sum += x);
    }
    for (saved, sums) in saved.chunks_exact_mut(2).zip(sums.chunks_exact(shape.group_len())) {
        saved[0] = sums.iter().sum::<f32>() / len;
    }
    for (means, saved) in means.chunks_exact_mut(shape.group_len()).zip(saved.chunks_exact(2)) {
        means.fill(saved[0]);
    }
    sums.fill(0.0);
    for x in x.chunks_exact(shape.channels) {
        for ((sum, x), mean) in sums.iter_mut().zip(x).zip(&*means) {
            *sum = (x - mean).mul_add(x - mean, *sum);
        }
    }
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
    for (x, y) in x.chunks_exact(shape.channels).zip(y.chunks_exact_mut(shape.channels)) {
        let factors = means.iter().zip(&*scales).zip(weight);
        for ((y, x), ((mean, scale), w)) in y.iter_mut().zip(x).zip(factors) {
            *y = (x - mean) * scale * w;
        }
        if let Some(bias) = bias {
            y.iter_mut().zip(bias).for_each(|(y, bias)| *y += bias);
        }
    }
}

/// Adds the gradient of the weight from one image to `sums`. `channels` is memory for two values of each
/// channel.
#[inline(always)]
pub(super) fn group_weight_gradient(
    shape: &GroupNormShape,
    saved: &[f32],
    channels: &mut [f32],
    [x, dy]: [&[f32]; 2],
    sums: &mut [f32],
) {
    let (means, scales) = channels.split_at_mut(shape.channels);
    spread(shape, saved, means, scales);
    for (x, dy) in x.chunks_exact(shape.channels).zip(dy.chunks_exact(shape.channels)) {
        let values = x.iter().zip(dy).zip(means.iter().zip(&*scales));
        for (sum, ((x, dy), (mean, scale))) in sums.iter_mut().zip(values) {
            *sum = ((x - mean) * scale).mul_add(*dy, *sum);
        }
    }
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
    sums.fill(0.0);
    products.fill(0.0);
    for (x, dy) in x.chunks_exact(num).zip(dy.chunks_exact(num)) {
        let sums = sums.iter_mut().zip(products.iter_mut());
        let values = x.iter().zip(dy).zip(means.iter().zip(&*scales));
        for ((sum, product), ((x, dy), (mean, scale))) in sums.zip(values) {
            *sum += dy;
            *product = ((x - mean) * scale).mul_add(*dy, *product);
        }
    }
    let groups = sums.chunks_exact_mut(shape.group_len()).zip(products.chunks_exact_mut(shape.group_len()));
    for ((sums, products), weight) in groups.zip(weight.chunks_exact(shape.group_len())) {
        let mean = |values: &[f32]| values.iter().zip(weight).map(|(value, w)| value * w).sum::<f32>() / len;
        let (mean_g, mean_product) = (mean(sums), mean(products));
        sums.fill(mean_g);
        products.fill(mean_product);
    }
    let positions = x.chunks_exact(num).zip(dy.chunks_exact(num)).zip(dx.chunks_exact_mut(num));
    for ((x, dy), dx) in positions {
        let values = x.iter().zip(dy).zip(weight).zip(means.iter().zip(&*scales));
        let values = values.zip(sums.iter().zip(&*products));
        for (dx, ((((x, dy), w), (mean, scale)), (mean_g, mean_product))) in dx.iter_mut().zip(values) {
            let normalised = (x - mean) * scale;
            *dx = (dy * w - mean_g - normalised * mean_product) * scale;
        }
    }
}
