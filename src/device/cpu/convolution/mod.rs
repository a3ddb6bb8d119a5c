//! Convolution: images are split among the threads, and output channels where a sum over images is
//! formed; `forward.rs` and `backward.rs` are the loops.
//!
//! `argmax` holds the place of the maximum in its window, 0 to 3 in reading order, as the bits of
//! the `f32`.

mod backward;
mod forward;

use std::cell::RefCell;

use super::Cpu;
use crate::device::{ConvolutionOperations, ConvolutionShape};
use backward::{ConvolutionScratch, InputGradient, WeightGradient};
use forward::Forward;

/// Runs `work` with memory that the operations of this thread reuse.
fn with_scratch(work: impl FnOnce(&mut ConvolutionScratch)) {
    thread_local! {
        static SCRATCH: RefCell<ConvolutionScratch> = RefCell::default();
    }
    SCRATCH.with_borrow_mut(work);
}

impl ConvolutionOperations for Cpu {
    fn convolution_forward(
        &self,
        shape: &ConvolutionShape,
        input: &[f32],
        weight: &[f32],
        bias: &[f32],
        argmax: &mut [f32],
        output: &mut [f32],
    ) {
        let (image_len, output_len) = (shape.image_len(), shape.output_len());
        let part = self.rows_per_thread(shape.rows);
        let parts = input.chunks(image_len * part).zip(argmax.chunks_mut(output_len * part));
        self.for_each(parts.zip(output.chunks_mut(output_len * part)), |((input, argmax), output)| {
            with_scratch(|scratch| {
                let packed = &mut scratch.first;
                self.arch.dispatch(Forward { shape, input, weight, bias, argmax, output, packed });
            });
        });
    }

    fn convolution_backward_weight(
        &self,
        shape: &ConvolutionShape,
        input: &[f32],
        argmax: &[f32],
        gradient: &[f32],
        weight_gradient: &mut [f32],
        accumulate: bool,
    ) {
        if !accumulate {
            weight_gradient.fill(0.0);
        }
        // each thread has some of the outputs and all images, whose order no thread changes
        let part = self.rows_per_thread(shape.outputs);
        let weights_of_output = shape.weight_len() / shape.outputs;
        let parts = weight_gradient.chunks_mut(weights_of_output * part).zip((0..).step_by(part));
        self.for_each(parts, |(weight_gradient, first)| {
            with_scratch(|scratch| {
                let outputs = first..first + weight_gradient.len() / weights_of_output;
                let work =
                    WeightGradient { shape, input, argmax, gradient, outputs, weight_gradient, scratch };
                self.arch.dispatch(work);
            });
        });
    }

    fn convolution_backward_input(
        &self,
        shape: &ConvolutionShape,
        weight: &[f32],
        argmax: &[f32],
        gradient: &[f32],
        input_gradient: &mut [f32],
    ) {
        let part = self.rows_per_thread(shape.rows);
        let maps = gradient.chunks(shape.output_len() * part).zip(argmax.chunks(shape.output_len() * part));
        let parts = input_gradient.chunks_mut(shape.image_len() * part).zip(maps);
        self.for_each(parts, |(input_gradient, (gradient, argmax))| {
            with_scratch(|scratch| {
                let work = InputGradient { shape, weight, argmax, gradient, input_gradient, scratch };
                self.arch.dispatch(work);
            });
        });
    }
}
