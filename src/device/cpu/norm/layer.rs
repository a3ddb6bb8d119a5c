//! Vectors that are normalised one by one: layer norm, and RMS norm, whose mean is taken to be zero.

use pulp::{Simd, WithSimd};

use crate::device::NormShape;
use crate::device::cpu::loops::sum_of;

/// Normalises vectors.
pub(super) struct LayerForward<'a> {
    pub(super) shape: &'a NormShape,
    pub(super) input: &'a [f32],
    pub(super) weight: &'a [f32],
    pub(super) bias: Option<&'a [f32]>,
    pub(super) saved: &'a mut [f32],
    pub(super) output: &'a mut [f32],
}

impl WithSimd for LayerForward<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let LayerForward { shape, input, weight, bias, saved, output } = self;
        let NormShape { columns, epsilon, is_centred, .. } = *shape;
        let rows = input.chunks_exact(columns).zip(output.chunks_exact_mut(columns));
        for ((x, y), saved) in rows.zip(saved.chunks_exact_mut(NormShape::SAVED)) {
            let mut mean = 0.0;
            if is_centred {
                let sum = sum_of(
                    simd,
                    [x],
                    #[inline(always)]
                    |[x]| x,
                );
                mean = sum / columns as f32;
            }
            let all_mean = simd.splat_f32s(mean);
            let squares = sum_of(
                simd,
                [x],
                #[inline(always)]
                |[x]| {
                    let centred = simd.sub_f32s(x, all_mean);
                    simd.mul_f32s(centred, centred)
                },
            );
            let scale = 1.0 / (squares / columns as f32 + epsilon).sqrt();
            saved.copy_from_slice(&[mean, scale]);
            for ((y, x), w) in y.iter_mut().zip(x).zip(weight) {
                *y = (x - mean) * scale * w;
            }
            if let Some(bias) = bias {
                y.iter_mut().zip(bias).for_each(|(y, bias)| *y += bias);
            }
        }
    }
}

/// Computes the gradients of vectors that were normalised.
pub(super) struct LayerBackward<'a> {
    pub(super) shape: &'a NormShape,
    pub(super) input: &'a [f32],
    pub(super) weight: &'a [f32],
    pub(super) saved: &'a [f32],
    pub(super) gradient: &'a [f32],
    pub(super) input_gradient: &'a mut [f32],
}

impl WithSimd for LayerBackward<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let LayerBackward { shape, input, weight, saved, gradient, input_gradient } = self;
        let NormShape { columns, is_centred, .. } = *shape;
        let rows = input.chunks_exact(columns).zip(gradient.chunks_exact(columns));
        let rows = rows.zip(input_gradient.chunks_exact_mut(columns));
        for (((x, dy), dx), saved) in rows.zip(saved.chunks_exact(NormShape::SAVED)) {
            let (mean, scale) = (saved[0], saved[1]);
            let [all_mean, all_scale] = [mean, scale].map(|value| simd.splat_f32s(value));
            let mut mean_g = 0.0;
            if is_centred {
                let sum = sum_of(
                    simd,
                    [dy, weight],
                    #[inline(always)]
                    |[dy, w]| simd.mul_f32s(dy, w),
                );
                mean_g = sum / columns as f32;
            }
            let mean_gx = sum_of(
                simd,
                [dy, weight, x],
                #[inline(always)]
                |[dy, w, x]| {
                    let normalised = simd.mul_f32s(simd.sub_f32s(x, all_mean), all_scale);
                    simd.mul_f32s(simd.mul_f32s(dy, w), normalised)
                },
            ) / columns as f32;
            for (((dx, x), dy), w) in dx.iter_mut().zip(x).zip(dy).zip(weight) {
                let normalised = (x - mean) * scale;
                *dx = (dy * w - mean_g - normalised * mean_gx) * scale;
            }
        }
    }
}
