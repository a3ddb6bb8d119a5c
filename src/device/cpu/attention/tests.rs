//! Attention against its formula, and the bits of its results.

use crate::device::cpu::tests::{assert_close, cpus, poison, random};
use crate::device::cpu::{Cpu, Vectors};
use crate::device::{
    ActivationOperations, AttentionDropout, AttentionOperations, AttentionShape, DropoutMask, DropoutShape,
};

const MASK: DropoutMask = DropoutMask { rate: 0.3, seed: 5, step: 9, module: 3 };

/// One head of a sequence: the places of its queries, keys, values and outputs in a position.
struct HeadPlaces {
    row: usize,
    query: usize,
    key: usize,
    value: usize,
    output: usize,
}

fn places(shape: &AttentionShape) -> Vec<HeadPlaces> {
    let AttentionShape { rows, groups, heads, width, .. } = *shape;
    let head = |row, group, head| {
        let start = group * (heads + 2) * width;
        let key = start + heads * width;
        let output = (group * heads + head) * width;
        HeadPlaces { row, query: start + head * width, key, value: key + width, output }
    };
    let heads = |(row, group)| (0..heads).map(move |number| head(row, group, number));
    (0..rows).flat_map(|row| (0..groups).map(move |group| (row, group))).flat_map(heads).collect()
}

/// Computes attention with whole matrices of scores, in `f64`: the output, and the gradient of the input.
fn plain_attention(shape: &AttentionShape, input: &[f32], gradient: &[f32]) -> [Vec<f64>; 2] {
    let AttentionShape { positions, width, causal, dropout, .. } = *shape;
    let (stride, out_stride) = (shape.input_width(), shape.output_width());
    let mut output = vec![0.0; gradient.len()];
    let mut input_gradient = vec![0.0; input.len()];
    for (number, head) in places(shape).into_iter().enumerate() {
        let input_at = |position, place, i| (head.row * positions + position) * stride + place + i;
        let output_at = |position, i| (head.row * positions + position) * out_stride + head.output + i;
        let x = |at: usize| f64::from(input[at]);
        for query in 0..positions {
            let keys = if causal { query + 1 } else { positions };
            let mut factors = vec![1.0; keys];
            if let Some(AttentionDropout { mask, first, row_stride }) = dropout {
                let padded = positions.div_ceil(4) * 4;
                let own = number % shape.num_heads() * positions + query;
                let first = first + head.row as u64 * row_stride + (own * padded) as u64;
                let shape = DropoutShape { mask, first, row_len: keys as u64, row_stride: keys as u64 };
                Cpu::new(1).unwrap().dropout(&shape, None, &mut factors);
            }
            let dot = |key| {
                let terms =
                    (0..width).map(|i| x(input_at(query, head.query, i)) * x(input_at(key, head.key, i)));
                terms.sum::<f64>() * f64::from(shape.scale())
            };
            let exponentials: Vec<f64> = (0..keys).map(|key| f64::exp(dot(key))).collect();
            let total: f64 = exponentials.iter().sum();
            let weights: Vec<f64> = exponentials.iter().map(|x| x / total).collect();
            let of_key = |key| {
                let terms = (0..width)
                    .map(|i| f64::from(gradient[output_at(query, i)]) * x(input_at(key, head.value, i)));
                terms.sum::<f64>() * f64::from(factors[key])
            };
            let weight_gradients: Vec<f64> = (0..keys).map(of_key).collect();
            let mean: f64 = weights.iter().zip(&weight_gradients).map(|(w, dw)| w * dw).sum();
            for key in 0..keys {
                let kept = weights[key] * f64::from(factors[key]);
                let score = weights[key] * (weight_gradients[key] - mean) * f64::from(shape.scale());
                for i in 0..width {
                    let (q, k, v) = (
                        input_at(query, head.query, i),
                        input_at(key, head.key, i),
                        input_at(key, head.value, i),
                    );
                    output[output_at(query, i)] += kept * x(v);
                    input_gradient[v] += kept * f64::from(gradient[output_at(query, i)]);
                    input_gradient[q] += score * x(k);
                    input_gradient[k] += score * x(q);
                }
            }
        }
    }
    [output, input_gradient]
}

#[test]
fn attention_agrees_with_the_formula() {
    for (rows, positions, groups, heads, width) in [
        (1, 1, 1, 1, 1),
        (2, 7, 2, 1, 6),
        (1, 16, 2, 1, 4),
        (3, 21, 1, 2, 5),
        (1, 32, 1, 3, 8),
        (1, 53, 1, 2, 40),
        (2, 70, 2, 2, 16),
    ] {
        for (causal, drops) in [(true, true), (false, true), (true, false), (false, false)] {
            let dropout = drops.then_some(AttentionDropout { mask: MASK, first: 12, row_stride: 1 << 20 });
            let shape = AttentionShape { rows, positions, groups, heads, width, causal, dropout };
            let input = random(rows * positions * shape.input_width(), 1);
            let gradient = random(rows * positions * shape.output_width(), 2);
            let [expected, expected_gradient] = plain_attention(&shape, &input, &gradient);
            for cpu in cpus() {
                let mut saved = poison(rows * positions * shape.num_heads());
                let (mut output, mut input_gradient) = (poison(gradient.len()), poison(input.len()));
                cpu.attention_forward(&shape, &input, &mut saved, &mut output);
                assert_close(&output, &expected, 1e-5);
                cpu.attention_backward(&shape, &input, &saved, &output, &gradient, &mut input_gradient);
                assert_close(&input_gradient, &expected_gradient, 1e-5);
            }
        }
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Returns the bits of what is saved, of the outputs and of the gradients of the inputs.
fn passes(cpu: &Cpu, shape: &AttentionShape, input: &[f32]) -> [Vec<u32>; 3] {
    let num_positions = shape.rows * shape.positions;
    let gradient = random(num_positions * shape.output_width(), 4);
    let mut saved = poison(num_positions * shape.num_heads());
    let (mut output, mut input_gradient) = (poison(gradient.len()), poison(input.len()));
    cpu.attention_forward(shape, input, &mut saved, &mut output);
    cpu.attention_backward(shape, input, &saved, &output, &gradient, &mut input_gradient);
    [saved, output, input_gradient].map(|values| bits(&values))
}

#[test]
fn attention_has_the_same_bits_with_any_threads_and_vectors() {
    for (positions, width, causal) in
        [(9, 12, true), (16, 12, false), (37, 12, true), (53, 40, true), (70, 12, false)]
    {
        let dropout = Some(AttentionDropout { mask: MASK, first: 8, row_stride: 1 << 20 });
        let shape = AttentionShape { rows: 3, positions, groups: 2, heads: 2, width, causal, dropout };
        let input = random(shape.rows * positions * shape.input_width(), 3);
        let expected = passes(&Cpu::new(1).unwrap(), &shape, &input);
        for vectors in [Vectors::Widest, Vectors::Avx2, Vectors::Portable] {
            for cpu in cpus().into_iter().filter_map(|cpu| cpu.with_vectors(vectors)) {
                assert!(passes(&cpu, &shape, &input) == expected, "{positions} positions, {cpu:?}");
            }
        }
    }
}

#[test]
fn what_earlier_passes_left_in_memory_does_not_count() {
    let cpu = Cpu::new(1).unwrap();
    for (causal, drops) in [(true, true), (false, true), (true, false), (false, false)] {
        let dropout = drops.then_some(AttentionDropout { mask: MASK, first: 8, row_stride: 1 << 20 });
        let shape =
            |positions| AttentionShape { rows: 1, positions, groups: 1, heads: 2, width: 9, causal, dropout };
        let len = |positions| positions * shape(positions).input_width();
        for positions in [5, 21, 53] {
            let (shape, input) = (shape(positions), random(len(positions), 7));
            let expected =
                std::thread::scope(|scope| scope.spawn(|| passes(&cpu, &shape, &input)).join().unwrap());
            passes(&cpu, &AttentionShape { positions: 70, ..shape }, &vec![f32::NAN; len(70)]);
            assert!(passes(&cpu, &shape, &input) == expected, "{positions} positions, causal {causal}");
        }
    }
}

#[test]
fn later_outputs_have_the_bits_of_all() {
    let (positions, cpu) = (37, Cpu::new(1).unwrap());
    // with more heads in a group than a block has queries, too
    for (causal, groups, heads) in [(true, 2, 3), (false, 2, 3), (true, 3, 1), (true, 1, 35)] {
        let shape = AttentionShape { rows: 1, positions, groups, heads, width: 8, causal, dropout: None };
        let input = random(positions * shape.input_width(), 5);
        let mut all = poison(positions * shape.output_width());
        cpu.attention_forward(&shape, &input, &mut poison(positions * shape.num_heads()), &mut all);
        for first in 0..positions {
            let expected = &all[first * shape.output_width()..];
            let mut output = poison(expected.len());
            cpu.attention_next(&shape, first, &input, &mut output);
            assert_eq!(bits(&output), bits(expected), "{heads} heads a group, from position {first} on");
        }
    }
}
