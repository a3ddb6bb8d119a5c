//! Linear layers as matrix products.

use std::cell::RefCell;

use super::Cpu;
use super::matmul::Matrix;
use crate::device::{Activation, LinearOperations, LinearShape, RowSums, WeightLayout, WeightOperands};
use crate::memory::scratch::Room;

thread_local! {
    /// The inputs and the gradients of several micro-batches, side by side.
    static JOINED: RefCell<[Room; 2]> = const { RefCell::new([Room::new(), Room::new()]) };
}

impl LinearOperations for Cpu {
    fn linear_forward(
        &self,
        shape: &LinearShape,
        input: &[f32],
        weight: &[f32],
        bias: Option<&[f32]>,
        activation: Activation,
        saved: &mut [f32],
        output: &mut [f32],
    ) {
        let LinearShape { rows, inputs, outputs, layout, input_terms, .. } = *shape;
        let right = match layout {
            WeightLayout::OutputsByInputs => Matrix::transposed(weight, inputs, outputs),
            WeightLayout::InputsByOutputs => Matrix::new(weight, inputs, outputs),
        };
        self.multiply(Matrix::new(input, rows, inputs), right, input_terms, bias, output);
        assert!(activation == Activation::Identity || output.len() == rows * outputs, "a whole sum");
        self.activate(activation, output, saved);
    }

    fn linear_backward_weight(
        &self,
        shape: &LinearShape,
        operands: &[WeightOperands<&[f32]>],
        weight_gradient: RowSums<&mut [f32]>,
    ) {
        let LinearShape { inputs, outputs, layout, .. } = *shape;
        let terms = weight_gradient.rows;
        let mut sums = weight_gradient.arrays(inputs * outputs);
        let mut multiply = |rows: usize, input: &[f32], gradient: &[f32]| {
            let (left, right) = match layout {
                WeightLayout::OutputsByInputs => {
                    (Matrix::transposed(gradient, outputs, rows), Matrix::new(input, rows, inputs))
                }
                WeightLayout::InputsByOutputs => {
                    (Matrix::transposed(input, inputs, rows), Matrix::new(gradient, rows, outputs))
                }
            };
            self.multiply_section(left, right, terms, &mut sums);
        };
        if let [WeightOperands { rows, input, gradient }] = *operands {
            return multiply(rows, input, gradient);
        }
        let rows = operands.iter().map(|operand| operand.rows).sum();
        JOINED.with_borrow_mut(|[all_inputs, all_gradients]| {
            let all_inputs = all_inputs.elements(rows * inputs);
            let all_gradients = all_gradients.elements(rows * outputs);
            let mut first = 0;
            for &WeightOperands { rows, input, gradient } in operands {
                let end = first + rows;
                all_inputs[first * inputs..end * inputs].copy_from_slice(&input[..rows * inputs]);
                all_gradients[first * outputs..end * outputs].copy_from_slice(&gradient[..rows * outputs]);
                first = end;
            }
            multiply(rows, all_inputs, all_gradients);
        });
    }

    fn linear_backward_input(
        &self,
        shape: &LinearShape,
        gradient: &[f32],
        weight: &[f32],
        input_gradient: &mut [f32],
    ) {
        let LinearShape { rows, inputs, outputs, layout, output_terms, .. } = *shape;
        let right = match layout {
            WeightLayout::OutputsByInputs => Matrix::new(weight, outputs, inputs),
            WeightLayout::InputsByOutputs => Matrix::transposed(weight, outputs, inputs),
        };
        self.multiply(Matrix::new(gradient, rows, outputs), right, output_terms, None, input_gradient);
    }
}
