//! Normalisations against their formula, and the bits of all vectors, threads and divisions.

use super::*;
use crate::device::cpu::tests::{assert_close, poison, random};
use crate::device::{Activation, ActivationOperations, BiasShape, Vectors};

#[test]
fn columns_are_scaled_and_their_products_summed() {
    let (x, g) = ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [1.0, 0.0, 2.0, -1.0, 3.0, 0.5]);
    for threads in [1, 3] {
        let cpu = Cpu::new(threads).unwrap();
        let (mut y, mut sums) = ([f32::NAN; 6], [10.0, 20.0, 30.0]);
        cpu.scale_columns(&x, &[2.0, 0.5, -1.0], &mut y);
        assert_eq!(y, [2.0, 1.0, -3.0, 8.0, 2.5, -6.0]);
        cpu.scale_columns_backward_weight(3, &x, &g, RowSums::chain(&mut sums[..], 2, true));
        assert_eq!(sums, [10.0 - 3.0, 20.0 + 15.0, 30.0 + 9.0]);
    }
}

/// Images, and what is done with them.
struct GroupCase {
    shape: GroupNormShape,
    input: Vec<f32>,
    weight: Vec<f32>,
    bias: Vec<f32>,
    added: Option<Vec<f32>>,
    gradient: Vec<f32>,
}

/// The outputs, the gradients of the inputs, and the sums over positions.
type GroupResults = [Vec<f32>; 3];

impl GroupCase {
    fn new([positions, channels, groups]: [usize; 3], relu: bool, adds: bool) -> GroupCase {
        let shape = GroupNormShape { rows: 5, positions, channels, groups, epsilon: 1e-5, relu };
        let len = shape.rows * shape.image_len();
        let (weight, bias) = (random(channels, 2), random(channels, 3));
        let added = adds.then(|| random(len, 5));
        GroupCase { shape, input: random(len, 1), weight, bias, added, gradient: random(len, 4) }
    }

    /// Runs all passes, with a cut before image `cut`, and the backward pass fused or in parts.
    fn run(&self, cpu: &Cpu, cut: usize, is_fused: bool) -> GroupResults {
        let GroupCase { shape, input, weight, bias, added, gradient } = self;
        let [mut output, mut input_gradient] = [input.len(); 2].map(poison);
        let mut terms = [vec![], vec![]];
        for images in [0..cut, cut..shape.rows] {
            let shape = &GroupNormShape { rows: images.len(), ..*shape };
            let of = images.start * shape.image_len()..images.end * shape.image_len();
            let (x, y, dy) = (&input[of.clone()], &mut output[of.clone()], &gradient[of.clone()]);
            let added = added.as_ref().map(|added| &added[of.clone()]);
            let (mut saved, dx) = (poison(shape.rows * shape.saved_len()), &mut input_gradient[of]);
            let mut sums = poison(shape.rows * shape.position_sums_len());

            cpu.group_norm_forward(shape, x, weight, bias, added, &mut saved, y);
            if is_fused {
                cpu.group_norm_backward(shape, x, weight, &saved, y, dy, &mut sums, dx);
            } else {
                let mut dy = dy.to_vec();
                if shape.relu {
                    let bias = BiasShape { columns: shape.channels, positions: shape.positions };
                    cpu.activation_backward(Activation::Relu, bias, y, &mut dy, None);
                }
                cpu.group_norm_position_sums(shape, x, &saved, &dy, &mut sums);
                cpu.group_norm_backward_input(shape, x, weight, &saved, &dy, dx);
            }
            let of_tensors = sums.chunks(shape.rows.max(1) * shape.channels);
            terms.iter_mut().zip(of_tensors).for_each(|(terms, sums)| terms.extend_from_slice(sums));
        }
        [output, input_gradient, terms.concat()]
    }

    /// Returns the results of the formula.
    fn expected(&self) -> [Vec<f64>; 3] {
        let GroupCase { shape, input, weight, bias, added, gradient } = self;
        let len = shape.positions * shape.group_len();
        let [mut output, mut dx] = [vec![0.0; input.len()], vec![0.0; input.len()]];
        let len_of_terms = shape.rows * shape.channels;
        let mut sums = vec![0.0; 2 * len_of_terms];
        for (row, group) in (0..shape.rows).flat_map(|row| (0..shape.groups).map(move |group| (row, group))) {
            let first = group * shape.group_len();
            let channels = first..first + shape.group_len();
            let at = |position: usize, channel: usize| {
                row * shape.image_len() + position * shape.channels + channel
            };
            let elements: Vec<(usize, usize)> = (0..shape.positions)
                .flat_map(|position| channels.clone().map(move |channel| (at(position, channel), channel)))
                .collect();
            let mean_of = |value: &dyn Fn(usize, usize) -> f64| {
                elements.iter().map(|&(at, channel)| value(at, channel)).sum::<f64>() / len as f64
            };
            let mean = mean_of(&|at, _| f64::from(input[at]));
            let variance = mean_of(&|at, _| (f64::from(input[at]) - mean).powi(2));
            let scale = 1.0 / (variance + f64::from(shape.epsilon)).sqrt();
            let x = |at: usize| (f64::from(input[at]) - mean) * scale;
            let y = |at: usize, channel: usize| {
                let added = added.as_ref().map_or(0.0, |added| f64::from(added[at]));
                x(at) * f64::from(weight[channel]) + f64::from(bias[channel]) + added
            };
            let is_kept = |at: usize, channel: usize| !shape.relu || y(at, channel) > 0.0;
            let dy = |at, channel| if is_kept(at, channel) { f64::from(gradient[at]) } else { 0.0 };
            let g = |at: usize, channel: usize| dy(at, channel) * f64::from(weight[channel]);
            let (mean_g, mean_gx) = (mean_of(&g), mean_of(&|at, channel| g(at, channel) * x(at)));
            for &(at, channel) in &elements {
                output[at] = if is_kept(at, channel) { y(at, channel) } else { 0.0 };
                dx[at] = (g(at, channel) - mean_g - x(at) * mean_gx) * scale;
                let term = row * shape.channels + channel;
                sums[term] += x(at) * dy(at, channel);
                sums[len_of_terms + term] += dy(at, channel);
            }
        }
        [output, dx, sums]
    }
}

#[test]
fn group_norms_agree_with_the_formula_and_have_the_same_bits_everywhere() {
    let bits = |results: GroupResults| results.map(|values| values.into_iter().map(f32::to_bits).collect());
    let shapes = [[7, 16, 2], [25, 33, 3], [9, 20, 5], [4, 64, 8], [3, 1, 1]];
    let kinds = [(false, false), (true, false), (false, true), (true, true)];
    for (shape, (relu, adds)) in shapes.into_iter().flat_map(|shape| kinds.map(|kind| (shape, kind))) {
        let case = GroupCase::new(shape, relu, adds);
        let found = case.run(&Cpu::new(1).unwrap(), 0, true);
        found.iter().zip(case.expected()).for_each(|(found, expected)| assert_close(found, &expected, 1e-5));
        let expected: [Vec<u32>; 3] = bits(found);
        let vectors = [Vectors::Widest, Vectors::Avx512, Vectors::Avx2, Vectors::Portable];
        for threads in [1, 2, 3] {
            for cpu in vectors.iter().filter_map(|vectors| Cpu::new(threads).unwrap().with_vectors(*vectors))
            {
                for (cut, is_fused) in [(0, false), (2, true), (3, false), (5, true)] {
                    assert_eq!(bits(case.run(&cpu, cut, is_fused)), expected, "{:?} {adds}", case.shape);
                }
            }
        }
    }
}

#[test]
fn a_group_norm_with_a_relu_keeps_nan() {
    let shape = GroupNormShape { rows: 1, positions: 2, channels: 2, groups: 2, epsilon: 1e-5, relu: true };
    let (mut saved, mut output) = (poison(shape.saved_len()), vec![0.0; 4]);
    let (input, cpu) = ([f32::NAN, 1.0, 2.0, 3.0], Cpu::new(1).unwrap());
    cpu.group_norm_forward(&shape, &input, &[1.0; 2], &[0.0; 2], None, &mut saved, &mut output);
    assert!(output[0].is_nan() && output[1] == 0.0 && output[2].is_nan() && output[3] > 0.9, "{output:?}");
}

/// Normalises rows of `columns` elements and computes their gradients, both by the formula and by `cpus`.
fn check_layer_norm(columns: usize, is_centred: bool, cpus: &[Cpu]) {
    let shape = NormShape { rows: 5, columns, epsilon: 1e-5, is_centred, positions: None };
    let [input, gradient] = [1, 2].map(|seed| random(shape.rows * columns, seed));
    let [weight, bias] = [3, 4].map(|seed| random(columns, seed));
    let [mut expected, mut expected_gradient] = [vec![], vec![]];
    for (x, dy) in input.chunks(columns).zip(gradient.chunks(columns)) {
        let mean_of = |value: &dyn Fn(usize) -> f64| (0..columns).map(value).sum::<f64>() / columns as f64;
        let mean = if is_centred { mean_of(&|i| f64::from(x[i])) } else { 0.0 };
        let variance = mean_of(&|i| (f64::from(x[i]) - mean).powi(2));
        let scale = 1.0 / (variance + f64::from(shape.epsilon)).sqrt();
        let normal = |i: usize| (f64::from(x[i]) - mean) * scale;
        let g = |i: usize| f64::from(dy[i]) * f64::from(weight[i]);
        let mean_g = if is_centred { mean_of(&g) } else { 0.0 };
        let mean_gx = mean_of(&|i| g(i) * normal(i));
        expected.extend((0..columns).map(|i| normal(i) * f64::from(weight[i]) + f64::from(bias[i])));
        expected_gradient.extend((0..columns).map(|i| (g(i) - mean_g - normal(i) * mean_gx) * scale));
    }
    let mut first_bits: Option<[Vec<u32>; 3]> = None;
    for cpu in cpus {
        let (mut saved, [mut output, mut dx]) = (poison(2 * shape.rows), [input.len(); 2].map(poison));
        cpu.layer_norm_forward(&shape, &input, &weight, Some(&bias), &mut saved, &mut output);
        cpu.layer_norm_backward_input(&shape, &input, &weight, &saved, &gradient, &mut dx);
        assert_close(&output, &expected, 1e-5);
        assert_close(&dx, &expected_gradient, 1e-5);
        let bits = [saved, output, dx].map(|values| values.into_iter().map(f32::to_bits).collect());
        assert_eq!(*first_bits.get_or_insert_with(|| bits.clone()), bits, "{columns} columns, {cpu:?}");
    }
}

#[test]
fn layer_norms_agree_with_the_formula_and_have_the_same_bits_everywhere() {
    let vectors = [Vectors::Widest, Vectors::Avx512, Vectors::Avx2, Vectors::Portable];
    let with = |threads| vectors.map(|vectors| Cpu::new(threads).unwrap().with_vectors(vectors));
    let cpus: Vec<Cpu> = [1, 3].into_iter().flat_map(with).flatten().collect();
    for columns in [3, 7, 16, 31, 32, 33, 40, 100] {
        for is_centred in [true, false] {
            check_layer_norm(columns, is_centred, &cpus);
        }
    }
}
