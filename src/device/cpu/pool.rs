//! Max-pooling on its own, in plain loops.

use super::Cpu;
use crate::device::{PoolOperations, PoolShape};

impl PoolOperations for Cpu {
    /// `argmax` holds the place in the window as the bits of the `f32`.
    fn max_pool_forward(&self, shape: &PoolShape, input: &[f32], argmax: &mut [f32], output: &mut [f32]) {
        let mut at = 0;
        for_each_window(shape, |origin| {
            let (mut best, mut place) = (input[origin], 0);
            for candidate in 1..shape.size * shape.size {
                let value = input[origin + offset(shape, candidate)];
                // NaN propagates, as in PyTorch
                if value > best || value.is_nan() {
                    (best, place) = (value, candidate);
                }
            }
            output[at] = best;
            argmax[at] = f32::from_bits(place as u32);
            at += 1;
        });
    }

    fn max_pool_backward(
        &self,
        shape: &PoolShape,
        argmax: &[f32],
        gradient: &[f32],
        input_gradient: &mut [f32],
    ) {
        input_gradient.fill(0.0);
        let mut at = 0;
        for_each_window(shape, |origin| {
            input_gradient[origin + offset(shape, argmax[at].to_bits() as usize)] = gradient[at];
            at += 1;
        });
    }
}

/// Returns the distance from a window's first element to its element `place`, in reading order.
fn offset(shape: &PoolShape, place: usize) -> usize {
    (place / shape.size * shape.width + place % shape.size) * shape.channels
}

/// Calls `visit` with the index of the first element of every window, in the order of the outputs.
fn for_each_window(shape: &PoolShape, mut visit: impl FnMut(usize)) {
    let PoolShape { rows, height, width, channels, size } = *shape;
    for image in 0..rows {
        for row in 0..height / size {
            for column in 0..width / size {
                let origin = ((image * height + row * size) * width + column * size) * channels;
                (origin..origin + channels).for_each(&mut visit);
            }
        }
    }
}
