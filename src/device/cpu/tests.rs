//! Each operation against its formula, in `f64`, on random inputs of odd shapes, with outputs set
//! to NaN first.

use proptest::prelude::*;

use super::Cpu;
use crate::device::prelude::*;
use crate::device::{
    Activation, AdamStep, BiasShape, DropoutMask, DropoutShape, EmbeddingShape, LinearShape, NormShape,
    OptimizerStep, RowSums, WeightLayout, WeightOperands, totals, update,
};
use crate::memory::Memory;
use crate::sums::{Leaves, Section};

/// Returns reproducible numbers in −1..1.
pub(super) fn random(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 40) as f32 / (1 << 23) as f32) - 1.0
    };
    (0..len).map(|_| next()).collect()
}

pub(super) fn poison(len: usize) -> Vec<f32> {
    vec![f32::NAN; len]
}

pub(super) fn assert_close(found: &[f32], expected: &[f64], tolerance: f64) {
    assert_eq!(found.len(), expected.len());
    let scale = expected.iter().fold(1e-3_f64, |scale, x| scale.max(x.abs()));
    for (i, (&f, &e)) in found.iter().zip(expected).enumerate() {
        assert!((f64::from(f) - e).abs() <= tolerance * scale, "element {i}: {f}, not {e} (largest {scale})");
    }
}

pub(super) fn cpus() -> [Cpu; 2] {
    [1, 2].map(|threads| Cpu::new(threads).unwrap())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn products_agree_with_the_formula(
        rows in 0..80_usize, inputs in 1..300_usize, outputs in 1..300_usize, by_inputs: bool, bias: bool,
    ) {
        let layout = if by_inputs { WeightLayout::InputsByOutputs } else { WeightLayout::OutputsByInputs };
        check_linear(LinearShape::whole(rows, inputs, outputs, layout, 8), bias);
    }

    #[test]
    fn transposition_agrees_with_the_formula(
        batch in 0..4_usize,
        rows in 1..70_usize,
        columns in 1..70_usize,
    ) {
        let input = random(batch * rows * columns, 1);
        let mut output = poison(input.len());
        Cpu::new(1).unwrap().transpose_each(rows, columns, &input, &mut output);
        for (i, value) in output.iter().enumerate() {
            let (matrix, row, column) = (i / (rows * columns), i % rows, i / rows % columns);
            prop_assert_eq!(*value, input[(matrix * rows + row) * columns + column]);
        }
    }
}

fn check_linear(shape: LinearShape, with_bias: bool) {
    let LinearShape { rows, inputs, outputs, layout, .. } = shape;
    let (input, weight, gradient) =
        (random(rows * inputs, 1), random(inputs * outputs, 2), random(rows * outputs, 3));
    let bias = random(outputs, 4);
    let index = |i: usize, o: usize| match layout {
        WeightLayout::OutputsByInputs => o * inputs + i,
        WeightLayout::InputsByOutputs => i * outputs + o,
    };
    let product = |x: f32, y: f32| f64::from(x) * f64::from(y);
    let mut forward = vec![0.0; rows * outputs];
    let mut weight_expected = vec![0.0; weight.len()];
    let mut input_expected = vec![0.0; input.len()];
    for r in 0..rows {
        for o in 0..outputs {
            forward[r * outputs + o] += if with_bias { f64::from(bias[o]) } else { 0.0 };
            for i in 0..inputs {
                forward[r * outputs + o] += product(input[r * inputs + i], weight[index(i, o)]);
                weight_expected[index(i, o)] += product(input[r * inputs + i], gradient[r * outputs + o]);
                input_expected[r * inputs + i] += product(gradient[r * outputs + o], weight[index(i, o)]);
            }
        }
    }
    for cpu in cpus() {
        let mut output = poison(rows * outputs);
        let bias = with_bias.then_some(bias.as_slice());
        cpu.linear_forward(&shape, &input, &weight, bias, Activation::Identity, &mut [], &mut output);
        assert_close(&output, &forward, 1e-5);
        let mut weight_gradient = poison(weight.len());
        let sums = RowSums::chain(&mut weight_gradient[..], rows, false);
        let operands = [WeightOperands { rows, input: &input[..], gradient: &gradient[..] }];
        cpu.linear_backward_weight(&shape, &operands, sums);
        assert_close(&weight_gradient, &weight_expected, 1e-5);
        let mut input_gradient = poison(input.len());
        cpu.linear_backward_input(&shape, &gradient, &weight, &mut input_gradient);
        assert_close(&input_gradient, &input_expected, 1e-5);
    }
}

#[test]
fn a_wide_product_that_is_formed_column_major_agrees() {
    let layout = WeightLayout::InputsByOutputs;
    check_linear(LinearShape::whole(37, 513, 257, layout, 8), true);
}

#[test]
fn a_product_of_few_rows_agrees() {
    for rows in [1, 2, 3, 16, 31, 32, 33] {
        for (inputs, outputs) in [(131, 517), (256, 300), (67, 1031)] {
            for layout in [WeightLayout::InputsByOutputs, WeightLayout::OutputsByInputs] {
                check_linear(LinearShape::whole(rows, inputs, outputs, layout, 8), true);
            }
        }
    }
}

#[test]
fn the_matrix_product_of_the_worked_example() {
    let a: Vec<f32> = (0..8).map(|x| x as f32).collect();
    let b: Vec<f32> = (8..16).map(|x| x as f32).collect();
    let shape = LinearShape::whole(2, 4, 2, WeightLayout::InputsByOutputs, 8);
    let mut product = poison(4);
    Cpu::new(1).unwrap().linear_forward(&shape, &a, &b, None, Activation::Identity, &mut [], &mut product);
    assert_eq!(product, [76.0, 82.0, 252.0, 274.0]);
}

#[test]
fn threads_share_long_arrays_without_a_trace() {
    let len = 3 * 4096 + 17;
    let adam = AdamStep { beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.1, decoupled: true };
    let mut update = [0.0; update::LEN];
    (update[update::LEARNING_RATE], update[update::GRADIENT_SCALE]) = (0.1, 1.0);
    (update[update::BIAS_CORRECTION1], update[update::BIAS_CORRECTION2]) = (0.1, 0.001);
    let results = cpus().map(|cpu| {
        let (mut parameters, gradients) = (random(len, 1), random(len, 2));
        let mut moments = [(); 2].map(|()| Memory::zeroed(len).unwrap());
        moments[0].copy_from_slice(&random(len, 3));
        moments[1].fill(0.5);
        let mut sums = [0.0; totals::LEN];
        let step = OptimizerStep::Adam(adam);
        let [first, second] = &mut moments;
        let slots = &mut [&mut first[..], &mut second[..]];
        cpu.optimizer_step(&step, &update, &mut parameters, &gradients, slots, &mut sums);
        let shape = BiasShape { columns: len, positions: 1 };
        cpu.activation_backward(Activation::Tanh, shape, &gradients, &mut moments[0], None);
        let mut squares = vec![0.0; cpu.squares_len()];
        cpu.sum_squares(&gradients, &mut squares);
        let exact = cpu.exact_squares(&squares).value();
        let expected: f64 = gradients.iter().map(|value| f64::from(*value).powi(2)).sum();
        assert!((exact - expected).abs() < 1e-12 * exact, "{exact}");
        (parameters, moments.map(|moment| moment.to_vec()), exact, sums)
    });
    assert_eq!(results[0], results[1]);
}

#[test]
fn threads_share_columns_of_sums_and_rows_of_tables_without_a_trace() {
    let (rows, columns, num_tokens) = (260, 70, 40);
    let [input, gradient] = [1, 2].map(|seed| random(rows * columns, seed));
    let tokens: Vec<f32> = (0..rows).map(|row| (row * row % 37) as f32).collect();
    let leaves = Leaves { len: rows, num: 6 };
    let results: Vec<Vec<u32>> = [1, 2, 3, 5]
        .into_iter()
        .map(|threads| {
            let cpu = Cpu::new(threads).unwrap();
            let mut all = Vec::new();
            let mut keep = |values: &[f32]| all.extend(values.iter().map(|value| value.to_bits()));
            let mut sum = poison(columns);
            let whole = Section::whole(leaves);
            let mut values = gradient.clone();
            let shape = BiasShape { columns, positions: 1 };
            let of_rows = RowSums { stack: &mut sum[..], stride: columns, rows: whole };
            cpu.activation_backward(Activation::Identity, shape, &[], &mut values, Some(of_rows));
            keep(&sum);
            for positions in [None, Some(Section::whole(Leaves { len: 10, num: 2 }))] {
                let num = positions.map_or(rows, |positions| rows / positions.len());
                let shape = NormShape { rows, columns, epsilon: 1e-5, is_centred: true, positions };
                let (mut saved, mut output) = (poison(NormShape::SAVED * rows), poison(rows * columns));
                cpu.layer_norm_forward(&shape, &input, &input[..columns], None, &mut saved, &mut output);
                keep(&output);
                let samples = Section::whole(Leaves { len: num, num: 6 });
                let of_rows = RowSums { stack: &mut sum[..], stride: columns, rows: samples };
                cpu.layer_norm_backward_weight(&shape, &input, &saved, &gradient, of_rows);
                keep(&sum);
            }
            let shape = EmbeddingShape { tokens: rows, columns, rows: num_tokens, first: 0 };
            let mut output = poison(rows * columns);
            cpu.embed(&shape, &tokens, &input, &mut output);
            keep(&output);
            let mut table = poison(num_tokens * columns);
            let of_rows = RowSums { stack: &mut table[..], stride: num_tokens * columns, rows: whole };
            cpu.embed_backward(&shape, &tokens, &gradient, of_rows);
            assert!(table[38 * columns..].iter().all(|value| *value == 0.0), "no token has these rows");
            keep(&table);
            all
        })
        .collect();
    assert!(results.iter().all(|each| *each == results[0]));
}

#[test]
fn gradients_of_parameters_have_the_same_bits_in_one_call_and_in_two() {
    let (rows, first, columns, positions) = (13, 5, 3, 4);
    let (input, gradient) = (random(rows * 50, 1), random(rows * 70, 2));
    let samples = random(rows * positions * columns, 3);
    let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
    let mut found = Vec::new();
    for cpu in cpus() {
        for cut in [rows, first] {
            let mut weight = poison(50 * 70);
            let (mut bias, mut image_bias) = (poison(70), poison(columns));
            for part in [0..cut, cut..rows].into_iter().filter(|part| !part.is_empty()) {
                let num_rows = part.len();
                let continues = part.start > 0;
                let of = |len: usize| part.start * len..part.end * len;
                let layout = WeightLayout::InputsByOutputs;
                let shape = LinearShape::whole(part.len(), 50, 70, layout, 8);
                let (input, gradient) = (&input[of(50)], &mut gradient[of(70)].to_vec());
                let sums = RowSums::chain(&mut weight[..], num_rows, continues);
                let operands = [WeightOperands { rows: num_rows, input, gradient: &gradient[..] }];
                cpu.linear_backward_weight(&shape, &operands, sums);
                let (activation, shape) = (Activation::Identity, BiasShape { columns: 70, positions: 1 });
                let sums = RowSums::chain(&mut bias[..], num_rows, continues);
                cpu.activation_backward(activation, shape, &[], gradient, Some(sums));
                let shape = BiasShape { columns, positions };
                let sample = &mut samples[of(positions * columns)].to_vec();
                let sums = RowSums::chain(&mut image_bias[..], num_rows, continues);
                cpu.activation_backward(activation, shape, &[], sample, Some(sums));
            }
            found.push([bits(&weight), bits(&bias), bits(&image_bias)]);
        }
    }
    assert!(found.iter().all(|each| *each == found[0]));
    let sums = |len: usize, values: &[f32]| -> Vec<f64> {
        (0..len).map(|at| values.iter().skip(at).step_by(len).map(|value| f64::from(*value)).sum()).collect()
    };
    let values = |bits: &[u32]| bits.iter().map(|bits| f32::from_bits(*bits)).collect::<Vec<_>>();
    assert_close(&values(&found[0][1]), &sums(70, &gradient), 1e-6);
    assert_close(&values(&found[0][2]), &sums(columns, &samples), 1e-6);
}

#[test]
fn dropout_draws_each_element_by_its_number() {
    let draws = |first, len, step| {
        let mut values = vec![1.0; len];
        let (row_len, row_stride) = (len.max(1) as u64, len.max(1) as u64);
        let mask = DropoutMask { rate: 0.25, seed: 11, step, module: 2 };
        let shape = DropoutShape { mask, first, row_len, row_stride };
        Cpu::new(1).unwrap().dropout(&shape, None, &mut values);
        values
    };
    let all = draws(0, 40_000, 7);
    let kept = all.iter().filter(|value| **value == 1.0 / 0.75).count();
    assert_eq!(kept, 40_000 - all.iter().filter(|value| **value == 0.0).count());
    // within five standard deviations of 30,000
    assert!(kept.abs_diff(30_000) < 5 * 87, "{kept}");
    for (first, len) in [(0, 1), (1, 3), (5, 64), (63, 130), (4_094, 5_000)] {
        assert_eq!(draws(first as u64, len, 7), all[first..first + len], "{first}, {len}");
    }
    // some of each row
    for cpu in cpus() {
        for (first, row_len, row_stride) in [(0, 7, 50), (13, 70, 90), (3, 1, 2)] {
            let mut values = vec![1.0; 9 * row_len];
            let (row_len, row_stride) = (row_len as u64, row_stride as u64);
            let mask = DropoutMask { rate: 0.25, seed: 11, step: 7, module: 2 };
            let first = first as u64;
            let shape = DropoutShape { mask, first, row_len, row_stride };
            cpu.dropout(&shape, None, &mut values);
            for (row, values) in (0..).zip(values.chunks_exact(row_len as usize)) {
                let start = (first + row * row_stride) as usize;
                assert_eq!(values, &all[start..start + row_len as usize]);
            }
        }
    }
    let differ = draws(0, 40_000, 8).iter().zip(&all).filter(|(a, b)| a != b).count();
    // the chance of a difference is 2 · 0.25 · 0.75
    assert!(differ.abs_diff(15_000) < 500, "{differ}");
}
