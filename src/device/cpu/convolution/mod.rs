//! Convolution: images are split among the threads, and output channels where a sum over images is
//! formed; `windows.rs` and `blocks.rs` are the loops, and `winograd/` has those for kernels of 3 × 3 on many
//! channels.
//!
//! `argmax` holds the place of the maximum in its window, 0 to 3 in reading order, as the bits of
//! the `f32`.

mod backward;
mod blocks;
mod forward;
mod padding;
mod strided;
#[cfg(test)]
mod tests;
mod windows;
mod winograd;

use std::cell::RefCell;

use super::Cpu;
use super::leaf_sums::{add_up, split_off};
use crate::device::{
    Activation, ActivationOperations, BiasShape, ConvolutionOperations, ConvolutionShape, ParameterSums,
    RowSums,
};
use backward::{InputGradient, WeightGradient, is_dense};
use forward::Forward;
use padding::ConvolutionScratch;
use strided::StridedInputGradient;
use winograd::{WinogradForward, WinogradWeightGradient};

thread_local! {
    static SCRATCH: RefCell<ConvolutionScratch> = RefCell::default();
}

/// Runs `work` with memory that the operations of this thread reuse.
fn with_scratch(work: impl FnOnce(&mut ConvolutionScratch)) {
    SCRATCH.with_borrow_mut(work);
}

/// Returns the places of maxima. Without pooling every window has one place, which any values stand for.
fn places<'a>(shape: &ConvolutionShape, argmax: &'a [f32], gradient: &'a [f32]) -> &'a [f32] {
    if shape.pool { argmax } else { gradient }
}

impl Cpu {
    /// Computes a pass of some images on this thread.
    fn pass(&self, pass: Forward<'_>) {
        if winograd::applies(pass.shape) {
            self.arch.dispatch(WinogradForward(pass));
        } else {
            self.arch.dispatch(pass);
        }
    }

    /// Adds up the gradient of the weight.
    fn add_weight_gradient(
        &self,
        shape: &ConvolutionShape,
        input: &[f32],
        argmax: &[f32],
        gradient: &[f32],
        weight_gradient: RowSums<&mut [f32]>,
    ) {
        let argmax = places(shape, argmax, gradient);
        // each thread has some of the outputs and all images, whose order no thread changes
        let is_winograd = winograd::applies(shape);
        let unit = if is_winograd { winograd::CHANNEL_MULTIPLE } else { 1 };
        let part = self.rows_per_thread(shape.outputs).next_multiple_of(unit);
        let weights_of_output = shape.weight_len() / shape.outputs;
        let (rows, mut rests) = (weight_gradient.rows, weight_gradient.arrays(shape.weight_len()));
        let parts = (0..shape.outputs).step_by(part).map(|first| {
            let outputs = first..shape.outputs.min(first + part);
            let own = split_off(&mut rests, outputs.len() * weights_of_output);
            (outputs, own)
        });
        self.for_each(parts, |(outputs, mut sums)| {
            add_up(rows, &mut sums, |images, sums| {
                let of = |values: usize| images.start * values..images.end * values;
                let (input, of_outputs) = (&input[of(shape.image_len())], of(shape.output_len()));
                let (gradient, argmax) = (&gradient[of_outputs.clone()], &argmax[of_outputs]);
                let outputs = outputs.clone();
                with_scratch(|scratch| {
                    if is_winograd {
                        let work = WinogradWeightGradient { shape, input, gradient, outputs, sums, scratch };
                        self.arch.dispatch(work);
                    } else {
                        let work = WeightGradient { shape, input, argmax, gradient, outputs, sums, scratch };
                        self.arch.dispatch(work);
                    }
                });
            });
        });
    }
}

impl ConvolutionOperations for Cpu {
    fn convolution_forward(
        &self,
        shape: &ConvolutionShape,
        input: &[f32],
        weight: &[f32],
        bias: Option<&[f32]>,
        mut argmax: &mut [f32],
        output: &mut [f32],
    ) {
        let (image_len, output_len) = (shape.image_len(), shape.output_len());
        let part = self.rows_per_thread(shape.rows);
        let parts = input.chunks(image_len * part).zip(output.chunks_mut(output_len * part));
        let parts = parts.map(|(input, output)| {
            let len = input.len() / image_len * shape.argmax_len();
            let argmax = argmax.split_off_mut(..len).unwrap_or_default();
            (input, argmax, output)
        });
        self.for_each(parts, |(input, argmax, output)| {
            with_scratch(|scratch| {
                let (is_transposed, output) = (false, &mut *output);
                self.pass(Forward { shape, input, weight, bias, argmax, output, scratch, is_transposed });
            });
            if shape.flattens {
                let BiasShape { columns, positions } = shape.output_rows();
                self.transpose_in_place(positions, columns, output);
            }
        });
    }

    fn convolution_backward_relu(&self, shape: &ConvolutionShape, output: &[f32], gradient: &mut [f32]) {
        let rows = shape.output_rows();
        self.activation_backward(Activation::Relu, rows, output, gradient, None);
        if shape.flattens {
            let part = self.rows_per_thread(gradient.len() / shape.output_len()) * shape.output_len();
            self.for_each(gradient.chunks_mut(part), |gradient| {
                self.transpose_in_place(rows.columns, rows.positions, gradient);
            });
        }
    }

    fn convolution_backward_weight(
        &self,
        shape: &ConvolutionShape,
        input: &[f32],
        argmax: &[f32],
        gradient: &[f32],
        mut sums: impl ParameterSums<Cpu>,
    ) {
        sums.bias(|sums| self.add_rows(shape.output_rows(), gradient, sums));
        sums.weight(|sums| self.add_weight_gradient(shape, input, argmax, gradient, sums));
    }

    fn convolution_backward_input(
        &self,
        shape: &ConvolutionShape,
        weight: &[f32],
        argmax: &[f32],
        gradient: &[f32],
        input_gradient: &mut [f32],
    ) {
        let argmax = places(shape, argmax, gradient);
        let part = self.rows_per_thread(shape.rows);
        if is_dense(shape) && shape.stride == 1 {
            // a convolution of the gradients, with the zeros around them that the first one lacked
            let shape = &ConvolutionShape {
                channels: shape.outputs,
                outputs: shape.channels,
                height: shape.output_height(),
                width: shape.output_width(),
                padding: shape.kernel - 1 - shape.padding,
                ..*shape
            };
            let parts = gradient.chunks(shape.image_len() * part);
            let parts = parts.zip(input_gradient.chunks_mut(shape.output_len() * part));
            return self.for_each(parts, |(input, output)| {
                with_scratch(|scratch| {
                    let (bias, argmax, is_transposed) = (None, &mut [][..], true);
                    self.pass(Forward { shape, input, weight, bias, argmax, output, scratch, is_transposed });
                });
            });
        }
        let parts = input_gradient.chunks_mut(shape.image_len() * part);
        if is_dense(shape) {
            return self.for_each(parts.zip(gradient.chunks(shape.output_len() * part)), |images| {
                with_scratch(|scratch| {
                    let (input_gradient, gradient) = images;
                    let work = StridedInputGradient { shape, weight, gradient, input_gradient, scratch };
                    self.arch.dispatch(work);
                });
            });
        }
        let maps = gradient.chunks(shape.output_len() * part).zip(argmax.chunks(shape.output_len() * part));
        let parts = parts.zip(maps);
        self.for_each(parts, |(input_gradient, (gradient, argmax))| {
            with_scratch(|scratch| {
                let work = InputGradient { shape, weight, argmax, gradient, input_gradient, scratch };
                self.arch.dispatch(work);
            });
        });
    }
}
