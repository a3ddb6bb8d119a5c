//! Every operation of the GPU against the CPU's, on random inputs of odd sizes, with outputs
//! poisoned first.

use phalanx::comm::World;
use phalanx::device::prelude::*;
use phalanx::device::{
    Activation, AdamStep, AttentionDropout, AttentionShape, BlockShape, Cuda, DropoutMask, DropoutShape,
    EmbeddingShape, Gate, LinearShape, LionStep, OptimizerStep, Precision, Role, Rotation, SgdStep,
    WeightLayout, totals, update,
};

use super::comparison::{
    Array, DIFFERENCES, before, compare, exact, given, output, random, same_bits, weights,
};
use super::losses::{divided_losses, losses};
use super::operations::*;
use super::support::soak;

const ACTIVATIONS: [Activation; 6] = [
    Activation::Identity,
    Activation::Relu,
    Activation::Gelu,
    Activation::GeluTanh,
    Activation::Silu,
    Activation::Tanh,
];

/// Compares all operations in `precision`. TF32 is a format of cuBLASLt's products alone: everything else has
/// the kernels of `f32`.
pub fn all(_: &World, precision: Precision, tolerance: f32) {
    let cuda = Cuda::open(0, precision).unwrap();
    linear(&cuda, tolerance);
    if precision != Precision::Tf32 {
        activations(&cuda, tolerance);
        gates_and_dropout(&cuda, tolerance);
        super::image_twins::all(&cuda, tolerance);
        embeddings(&cuda, tolerance);
        attention(&cuda, tolerance);
        losses(&cuda, tolerance);
        divided_losses(&cuda, tolerance);
        optimizers(&cuda, tolerance);
        moves(&cuda, tolerance);
    }
    if precision == Precision::F32 {
        linear_in_one_kernel(&cuda, tolerance);
        wide_sums(&cuda, tolerance);
    }
    let differences = DIFFERENCES.take();
    assert!(differences.is_empty(), "{} differences:\n{}", differences.len(), differences.join("\n"));
}

/// Returns with which of a bias and none the product `number` is tried, which takes so many `operations`:
/// with both, or with one by turns if an emulated GPU would take long.
fn biases(number: usize, operations: usize) -> impl Iterator<Item = bool> {
    let is_long = operations > 1 << 20 && soak().is_none();
    [true, false].into_iter().filter(move |bias| !is_long || *bias == number.is_multiple_of(2))
}

fn linear(cuda: &Cuda, tolerance: f32) {
    let sizes =
        [(1, 1, 1), (3, 5, 7), (33, 65, 17), (64, 784, 128), (128, 64, 10), (130, 259, 131), (96, 72, 136)];
    for (rows, inputs, outputs) in sizes {
        for layout in [WeightLayout::OutputsByInputs, WeightLayout::InputsByOutputs] {
            let shape = LinearShape::whole(rows, inputs, outputs, layout, 8);
            // weights of the initial size, so that sums are as large as their terms
            let scale = (inputs as f32).sqrt().recip();
            let w = weights(random(inputs * outputs, 2).into_iter().map(|w| scale * w).collect());
            let x = given(random(rows * inputs, 1));
            let (b, g) = (weights(random(outputs, 3)), given(random(rows * outputs, 4)));
            for (number, activation) in ACTIVATIONS.into_iter().enumerate() {
                for bias in biases(number, rows * inputs * outputs) {
                    let arrays = [x.clone(), w.clone(), b.clone(), output(rows * outputs)];
                    let operation = LinearForward { num_read: 3, shape, activation, bias };
                    compare(
                        &format!("forward {shape:?} {activation:?}"),
                        cuda,
                        tolerance,
                        &arrays,
                        &operation,
                    );
                }
            }
            for accumulate in [false, true] {
                let operation = LinearBackwardWeight { num_read: 2, shape, accumulate };
                let arrays = [x.clone(), g.clone(), exact(before(inputs * outputs, accumulate))];
                compare(&format!("backward weight {shape:?}"), cuda, tolerance, &arrays, &operation);
            }
            let operation = LinearBackwardInput { num_read: 2, shape };
            let arrays = [g.clone(), w.clone(), output(rows * inputs)];
            compare(&format!("backward input {shape:?}"), cuda, tolerance, &arrays, &operation);
        }
    }
}

/// Compares the backward pass of linear layers in one kernel with the CPU's, and its bits with those of its
/// parts. In other formats than f32, which have no such kernel, rounding would move outputs across the corner
/// of ReLU.
fn linear_in_one_kernel(cuda: &Cuda, tolerance: f32) {
    let sizes =
        [(1, 1, 1), (3, 5, 7), (128, 320, 50), (128, 50, 10), (129, 20, 33), (256, 7, 65), (257, 3, 2)];
    for (rows, inputs, outputs) in sizes {
        for layout in [WeightLayout::OutputsByInputs, WeightLayout::InputsByOutputs] {
            let shape = LinearShape::whole(rows, inputs, outputs, layout, 8);
            assert_eq!(cuda.fuses_linear_backward(&shape), rows <= 256);
            let scale = (inputs as f32).sqrt().recip();
            let read = [
                given(random(rows * inputs, 1)),
                weights(random(inputs * outputs, 2).into_iter().map(|w| scale * w).collect()),
                weights(random(outputs, 3)),
                given(random(rows * outputs, 4)),
            ];
            for activation in ACTIVATIONS {
                for (accumulate, bias) in [(false, true), (true, true), (true, false)] {
                    // without a bias its sums stay as they are
                    let bias_sums = if bias { before(outputs, accumulate) } else { random(outputs, 6) };
                    let weight_sums = exact(before(inputs * outputs, accumulate));
                    let outs = [weight_sums, output(rows * inputs), exact(bias_sums)];
                    let arrays = [&read[..], &outs].concat();
                    let [whole, parts] = [false, true].map(|in_parts| LinearBackward {
                        num_read: 4,
                        shape,
                        activation,
                        accumulate,
                        bias,
                        in_parts,
                    });
                    let what = format!("backward {shape:?} {activation:?}");
                    compare(&what, cuda, tolerance, &arrays, &whole);
                    same_bits(&what, cuda, &arrays, [&whole, &parts]);
                }
            }
        }
    }
}

fn activations(cuda: &Cuda, tolerance: f32) {
    for (rows, columns) in [(1, 1), (3, 1), (1, 1023), (7, 33), (300, 10), (2311, 20), (513, 129)] {
        let len = rows * columns;
        // a single value where tanh is flat has few digits left
        let width = if len < 8 { 0.5 } else { 6.0 };
        let wide = random(len, 7).into_iter().map(|x| width * x).collect();
        for activation in ACTIVATIONS {
            let what = format!("{activation:?} of {rows} × {columns}");
            for accumulate in [false, true] {
                let bias = exact(if accumulate { random(columns, 9) } else { vec![f32::NAN; columns] });
                let operation = ActivationBothWays { num_read: 1, activation, columns, len, accumulate };
                let arrays = [given(Vec::clone(&wide)), given(random(len, 10)), output(len), bias];
                compare(&what, cuda, tolerance, &arrays, &operation);
                compare(&what, cuda, tolerance, &arrays[..3], &operation);
            }
        }
    }
}

/// Compares the sums of more columns than tiles fit the second dimension of a grid.
fn wide_sums(cuda: &Cuda, tolerance: f32) {
    let columns = (1 << 21) + 1;
    let (activation, len) = (Activation::Identity, columns);
    let operation = ActivationBothWays { num_read: 1, activation, columns, len, accumulate: false };
    let arrays = [given(random(len, 7)), given(random(len, 10)), output(len), exact(vec![f32::NAN; columns])];
    compare("sums of many columns", cuda, tolerance, &arrays, &operation);
}

fn gates_and_dropout(cuda: &Cuda, tolerance: f32) {
    for (rows, columns) in [(1, 1), (5, 3), (33, 65), (7, 1024)] {
        let len = rows * columns;
        for gate in [Gate::Sigmoid, Gate::Silu, Gate::Gelu] {
            let wide = random(2 * len, 1).into_iter().map(|x| 4.0 * x).collect();
            let arrays = [given(wide), given(random(len, 2)), output(len), output(2 * len)];
            let what = format!("{gate:?} of {rows} × {columns}");
            compare(&what, cuda, tolerance, &arrays, &Gated { num_read: 2, gate, columns });
        }
        for first in [0, 3, (1 << 34) + 7] {
            let (row_len, row_stride) = (len.div_ceil(4) as u64, len as u64);
            let mask = DropoutMask { rate: 0.3, seed: 0x1234_5678_9abc_def0, step: 17, module: 5 };
            let shape = DropoutShape { mask, first, row_len, row_stride };
            let arrays = [given(random(len, 1)), output(len), given(random(len, 2))];
            compare(&format!("{shape:?}"), cuda, tolerance, &arrays, &Dropout { num_read: 1, shape });
        }
    }
}

fn embeddings(cuda: &Cuda, tolerance: f32) {
    for (tokens, first, rows, columns) in
        [(1, 0, 1, 1), (5, 0, 7, 3), (300, 2, 5, 33), (40, 3, 0, 8), (64, 0, 9, 300), (1500, 1, 6, 40)]
    {
        let shape = EmbeddingShape { tokens, first, rows, columns };
        let numbers: Vec<f32> = (0..tokens).map(|at| (at * at % 11) as f32).collect();
        for accumulate in [false, true] {
            let before = if accumulate { random(rows * columns, 5) } else { vec![f32::NAN; rows * columns] };
            let arrays = [
                exact(numbers.clone()),
                weights(random(rows * columns, 1)),
                given(random(tokens * columns, 2)),
                output(tokens * columns),
                exact(before),
            ];
            compare(
                &format!("{shape:?}"),
                cuda,
                tolerance,
                &arrays,
                &Embed { num_read: 3, shape, accumulate },
            );
        }
        let arrays = [given(random(3 * columns, 1)), weights(random(columns, 2)), output(3 * columns)];
        compare("add_table", cuda, tolerance, &arrays, &AddTable { num_read: 2 });
    }
}

fn attention(cuda: &Cuda, tolerance: f32) {
    for (rows, positions, groups, heads, width) in [
        (1, 1, 1, 1, 1),
        (2, 5, 1, 2, 3),
        (1, 33, 2, 1, 8),
        (3, 17, 2, 3, 40),
        (1, 70, 1, 1, 64),
        (1, 37, 1, 2, 96),
        (1, 50, 1, 1, 250),
    ] {
        for (causal, drops) in [(true, false), (false, false), (true, true), (false, true)] {
            let mask = DropoutMask { rate: 0.3, seed: 0x1234_5678_9abc_def0, step: 17, module: 5 };
            let dropout =
                drops.then_some(AttentionDropout { mask, first: (1 << 34) + 4, row_stride: 1 << 17 });
            let shape = AttentionShape { rows, positions, groups, heads, width, causal, dropout };
            let (inputs, outputs) = (positions * shape.input_width(), positions * shape.output_width());
            let arrays = [
                given(random(rows * inputs, 1)),
                given(random(rows * outputs, 2)),
                output(rows * outputs),
                output(rows * inputs),
                output(rows * (positions - positions / 2) * shape.output_width()),
            ];
            compare(&format!("{shape:?}"), cuda, tolerance, &arrays, &Attention { num_read: 2, shape });
            if width % 2 == 0 && !drops {
                let arrays =
                    [given(random(rows * inputs, 1)), output(rows * inputs), given(random(rows * inputs, 2))];
                let rotation = Rotation { base: 10_000.0, first: 3 * rows, inverse: causal };
                let operation = Rotate { num_read: 1, shape, rotation };
                compare(&format!("rotate {shape:?}"), cuda, tolerance, &arrays, &operation);
            }
        }
    }
}

fn optimizers(cuda: &Cuda, tolerance: f32) {
    let mut constants = vec![0.0; update::LEN];
    (constants[update::LEARNING_RATE], constants[update::GRADIENT_SCALE]) = (0.1, 0.5);
    (constants[update::BIAS_CORRECTION1], constants[update::BIAS_CORRECTION2]) = (0.19, 0.002);
    for len in [1, 3, 4, 33, 1023, 100_003] {
        let read = [exact(constants.clone()), exact(random(len, 1))];
        let sums = exact(vec![0.5; totals::LEN]);
        for (momentum, nesterov) in [(0.0, false), (0.9, false), (0.9, true)] {
            for weight_decay in [0.0, 0.1] {
                let step = OptimizerStep::Sgd(SgdStep { momentum, nesterov, weight_decay });
                let slot = (momentum != 0.0).then(|| exact(random(len, 3)));
                let mut arrays = read.to_vec();
                arrays.push(weights(random(len, 2)));
                arrays.extend(slot.into_iter().chain([sums.clone()]));
                compare(&format!("{len} values {step:?}"), cuda, tolerance, &arrays, &Optimizer { step });
            }
        }
        for decoupled in [false, true] {
            let (beta1, beta2, epsilon) = (0.9, 0.999, 1e-8);
            let step = OptimizerStep::Adam(AdamStep { beta1, beta2, epsilon, weight_decay: 0.1, decoupled });
            let second = random(len, 4).into_iter().map(f32::abs).collect();
            let mut arrays = read.to_vec();
            arrays.extend([weights(random(len, 2)), exact(random(len, 3)), exact(second), sums.clone()]);
            compare(&format!("{len} values {step:?}"), cuda, tolerance, &arrays, &Optimizer { step });
        }
        let step = OptimizerStep::Lion(LionStep { beta1: 0.9, beta2: 0.99, weight_decay: 0.1 });
        let mut arrays = read.to_vec();
        arrays.extend([weights(random(len, 2)), exact(random(len, 3)), sums.clone()]);
        compare(&format!("{len} values {step:?}"), cuda, tolerance, &arrays, &Optimizer { step });
        let written = [exact(vec![f32::NAN]), exact(constants.clone())];
        let mut values = random(len, 6);
        for what in ["squares", "squares with NaN"] {
            let [total, update] = written.clone();
            compare(what, cuda, tolerance, &[exact(values.clone()), total, update], &Squares);
            values[len / 2] = f32::NAN;
        }
    }
}

fn moves(cuda: &Cuda, tolerance: f32) {
    for (rows, columns) in [(1, 1), (5, 3), (16, 20), (33, 65), (24, 64), (72, 136), (136, 72)] {
        let len = 3 * rows * columns;
        let arrays = [given(random(len, 1)), output(len)];
        compare("transposition", cuda, tolerance, &arrays, &TransposeEach { num_read: 1, rows, columns });
        for (more, still_more) in [(2, 5), (8, 16)] {
            let (from_stride, into_stride) = (columns + more, columns + still_more);
            let shape = BlockShape { rows, columns, from_stride, into_stride };
            let arrays = [given(random(rows * from_stride, 1)), given(random(rows * into_stride, 2))];
            compare("a block", cuda, tolerance, &arrays, &CopyBlock { num_read: 1, shape });
        }
        for role in [Role::Activations, Role::Exact] {
            let arrays = [Array(random(len, 3), role), Array(random(len, 4), role)];
            compare("an addition", cuda, tolerance, &arrays, &Add { num_read: 1 });
            let arrays = [&arrays[..], &[Array(vec![f32::NAN; len], role)]].concat();
            for relu in [false, true] {
                compare("a sum of two", cuda, tolerance, &arrays, &Sum { num_read: 2, relu });
            }
        }
        let numbers: Vec<f32> =
            (0..rows).map(|row| f32::from_bits((7 * row as u32 + 2) % (3 * rows as u32))).collect();

        // the last two leave a table out
        let widths = [[columns, 1], [columns, 0], [0, columns], [columns, columns + 1], [columns, 2], [3, 1]];
        for (number, columns) in widths.into_iter().enumerate() {
            let [table, other] = columns.map(|columns| exact(random(3 * rows * columns, 1)));
            let [mut into, mut other_into] = columns.map(|columns| rows * columns);
            match number {
                4 => other_into = 0,
                5 => into = 0,
                _ => {}
            }
            let outputs = [output(into), exact(vec![f32::NAN; other_into])];
            let arrays = [&[exact(numbers.clone()), table, other][..], &outputs].concat();
            compare("rows", cuda, tolerance, &arrays, &GatherRows { num_read: 3, columns });
        }
        for role in [Role::Activations, Role::Parameters, Role::Exact] {
            let arrays =
                [exact(random(len, 1)), Array(vec![f32::NAN; len], role), Array(vec![f32::NAN; len], role)];
            compare("fill and copy", cuda, tolerance, &arrays, &FillAndCopy { num_read: 1, value: 0.375 });
        }
    }
}
