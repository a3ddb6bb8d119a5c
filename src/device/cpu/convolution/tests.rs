//! Convolutions against their formula, in `f64`, on random inputs of odd shapes, with outputs set to NaN
//! first.

use proptest::prelude::*;

use crate::device::cpu::Cpu;
use crate::device::cpu::tests::{cpus, poison, random};
use crate::device::prelude::*;
use crate::device::{ConvolutionShape, RowSums, Vectors, ViewedSums};

/// Returns the height and width of a convolution's output before pooling.
fn plain_size(shape: &ConvolutionShape) -> (usize, usize) {
    let size = |len: usize| (len + 2 * shape.padding - shape.kernel) / shape.stride + 1;
    (size(shape.height), size(shape.width))
}

/// Returns the textbook convolution, `[row][y][x][output]` before pooling.
fn plain_convolution(shape: &ConvolutionShape, input: &[f32], weight: &[f32], bias: &[f32]) -> Vec<f64> {
    let (height, width) = plain_size(shape);
    let mut output = Vec::new();
    for row in 0..shape.rows {
        for y in 0..height {
            for x in 0..width {
                for (o, bias) in bias.iter().enumerate() {
                    let mut sum = f64::from(*bias);
                    for_each_tap(shape, row, (y, x), o, |i, w| {
                        sum += f64::from(input[i]) * f64::from(weight[w])
                    });
                    output.push(sum);
                }
            }
        }
    }
    output
}

/// Calls `visit` with the indices of the input and the weight of each tap of one output.
fn for_each_tap(
    shape: &ConvolutionShape,
    row: usize,
    (y, x): (usize, usize),
    o: usize,
    mut visit: impl FnMut(usize, usize),
) {
    let ConvolutionShape { channels, height, width, kernel, stride, padding, .. } = *shape;
    for c in 0..channels {
        for ky in 0..kernel {
            for kx in 0..kernel {
                let at = |place: usize, tap: usize| (place * stride + tap).checked_sub(padding);
                let (Some(y), Some(x)) = (at(y, ky), at(x, kx)) else { continue };
                if y < height && x < width {
                    let input = ((row * height + y) * width + x) * channels + c;
                    visit(input, ((o * channels + c) * kernel + ky) * kernel + kx);
                }
            }
        }
    }
}

/// The rounding of a sum in `f32`, relative to the sum of the absolute values of its terms.
const ROUNDING: f64 = 1e-6;

/// A value after pooling and ReLU.
struct Pooled {
    value: f64,
    /// The place `(y, x)` of the maximum in the convolution's output; none if ReLU sets it to 0.
    place: Option<(usize, usize)>,
    /// True if rounding decides to which place the gradient belongs, or whether it does to any.
    is_ambiguous: bool,
}

/// Returns the pooled values of a convolution's output, of which `f32` may order values otherwise that differ
/// by less than `rounding`.
fn plain_pool(shape: &ConvolutionShape, full: &[f64], rounding: f64) -> Vec<Pooled> {
    let (full_height, full_width) = plain_size(shape);
    let full_len = full_height * full_width * shape.outputs;
    let mut pooled = Vec::new();
    for row in 0..shape.rows {
        for y in 0..shape.output_height() {
            for x in 0..shape.output_width() {
                for o in 0..shape.outputs {
                    let window = shape.window();
                    let at =
                        |y: usize, x: usize| full[row * full_len + (y * full_width + x) * shape.outputs + o];
                    let mut places: Vec<(usize, usize)> = (0..window * window)
                        .map(|place| (y * window + place / window, x * window + place % window))
                        .collect();
                    // the sort is stable: the first of equal values stays before the others
                    places.sort_by(|a, b| at(b.0, b.1).total_cmp(&at(a.0, a.1)));
                    let value = at(places[0].0, places[0].1);
                    let is_close = |other: f64| value - other < rounding;
                    let is_ambiguous = places.get(1).is_some_and(|place| is_close(at(place.0, place.1)))
                        || shape.relu && value.abs() < rounding;
                    let is_cut = shape.relu && value <= 0.0;
                    let place = (!is_cut).then_some(places[0]);
                    pooled.push(Pooled { value: if is_cut { 0.0 } else { value }, place, is_ambiguous });
                }
            }
        }
    }
    pooled
}

/// Returns the gradients of the weight, the bias and the input, from those at places `(y, x)` of the
/// convolution's output.
fn plain_gradients(
    shape: &ConvolutionShape,
    input: &[f32],
    weight: &[f32],
    gradients: &[(f32, Option<(usize, usize)>)],
) -> [Vec<f64>; 3] {
    let mut results = [weight.len(), shape.outputs, input.len()].map(|len| vec![0.0; len]);
    let [of_weight, of_bias, of_input] = &mut results;
    for (i, (gradient, place)) in gradients.iter().enumerate() {
        let (gradient, Some(place)) = (f64::from(*gradient), *place) else { continue };
        of_bias[i % shape.outputs] += gradient;
        for_each_tap(shape, i / shape.output_len(), place, i % shape.outputs, |at, w| {
            of_weight[w] += gradient * f64::from(input[at]);
            of_input[at] += gradient * f64::from(weight[w]);
        });
    }
    results
}

fn largest(magnitudes: &[f64]) -> f64 {
    magnitudes.iter().fold(0.0, |most: f64, magnitude| most.max(*magnitude))
}

/// Panics unless `actual` is `expected` up to the rounding of sums whose terms have absolute values that add
/// up to `magnitudes`. Minimal filtering, which may form the gradient of the inputs even where it does not
/// form the outputs, rounds three times as much.
fn assert_sums(shape: &ConvolutionShape, actual: &[f32], expected: &[f64], magnitudes: &[f64]) {
    assert_eq!(actual.len(), expected.len());
    let has_whole_vectors = [shape.channels, shape.outputs].iter().all(|num| num.is_multiple_of(16));
    let is_plain = shape.kernel == 3 && shape.stride == 1 && !shape.pool && !shape.relu;
    let factor = if is_plain && has_whole_vectors { 3.0 } else { 1.0 };
    let allowed = factor * ROUNDING * largest(magnitudes);
    for (at, (actual, expected)) in actual.iter().zip(expected).enumerate() {
        let difference = (f64::from(*actual) - expected).abs();
        assert!(difference <= allowed, "element {at}: {actual}, not {expected} (allowed {allowed})");
    }
}

fn check_convolution(shape: ConvolutionShape) {
    let input = random(shape.rows * shape.image_len(), 1);
    let (weight, bias) = (random(shape.weight_len(), 2), random(shape.outputs, 3));
    let absolute = |values: &[f32]| values.iter().map(|value| value.abs()).collect::<Vec<_>>();
    let [absolute_input, absolute_weight] = [&input, &weight].map(|values| absolute(values));
    let full = plain_convolution(&shape, &input, &weight, &bias);
    let output_magnitudes = plain_convolution(&shape, &absolute_input, &absolute_weight, &absolute(&bias));
    let pooled = plain_pool(&shape, &full, ROUNDING * largest(&output_magnitudes));
    let mut output_gradient = random(pooled.len(), 4);
    // the place among all outputs of the one that has number `at`, channels last
    let place_of = |at: usize| {
        let (image, at) = (at / shape.output_len() * shape.output_len(), at % shape.output_len());
        let num_places = shape.output_len() / shape.outputs;
        image + if shape.flattens { at % shape.outputs * num_places + at / shape.outputs } else { at }
    };
    let mut expected = vec![0.0; pooled.len()];
    let mut gradients = Vec::new();
    for (i, Pooled { value, place, is_ambiguous }) in pooled.into_iter().enumerate() {
        expected[place_of(i)] = value;
        if is_ambiguous {
            output_gradient[place_of(i)] = 0.0;
        }
        gradients.push((output_gradient[place_of(i)], place));
    }
    let [of_weight, of_bias, of_input] = plain_gradients(&shape, &input, &weight, &gradients);
    gradients.iter_mut().for_each(|(gradient, _)| *gradient = gradient.abs());
    let [weight_magnitudes, bias_magnitudes, input_magnitudes] =
        plain_gradients(&shape, &absolute_input, &absolute_weight, &gradients);
    for cpu in cpus() {
        let (mut output, mut argmax) = (poison(expected.len()), poison(shape.rows * shape.argmax_len()));
        cpu.convolution_forward(&shape, &input, &weight, Some(&bias), &mut argmax, &mut output);
        assert_sums(&shape, &output, &expected, &output_magnitudes);

        let mut gradient = output_gradient.clone();
        if shape.relu {
            cpu.convolution_backward_relu(&shape, &output, &mut gradient);
        }
        let (mut weight_gradient, mut bias_gradient) = (poison(weight.len()), poison(bias.len()));
        for (continues, factor) in [(false, 1.0), (true, 2.0)] {
            let sums = ViewedSums {
                weight: Some(RowSums::chain(&mut weight_gradient[..], shape.rows, continues)),
                bias: Some(RowSums::chain(&mut bias_gradient[..], shape.rows, continues)),
            };
            cpu.convolution_backward_weight(&shape, &input, &argmax, &gradient, sums);
            let times = |sums: &[f64]| sums.iter().map(|sum| factor * sum).collect::<Vec<_>>();
            assert_sums(&shape, &weight_gradient, &times(&of_weight), &times(&weight_magnitudes));
            assert_sums(&shape, &bias_gradient, &times(&of_bias), &times(&bias_magnitudes));
        }

        let mut input_gradient = poison(input.len());
        cpu.convolution_backward_input(&shape, &weight, &argmax, &gradient, &mut input_gradient);
        assert_sums(&shape, &input_gradient, &of_input, &input_magnitudes);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn convolution_agrees_with_the_formula(
        rows in 1..4_usize, channels in 1..13_usize, outputs in 1..40_usize, kernel in 1..7_usize,
        extra in (1..16_usize, 1..16_usize), steps in (1..4_usize, 0..3_usize), pool: bool, relu: bool,
        flattens: bool,
    ) {
        let (height, width) = (kernel + extra.0, kernel + extra.1);
        let (stride, padding) = (if pool { 1 } else { steps.0 }, steps.1.min(kernel - 1));
        check_convolution(ConvolutionShape {
            rows, channels, height, width, outputs, kernel, stride, padding, pool, relu,
            flattens: relu && flattens,
        });
    }

    #[test]
    fn strided_convolution_agrees_with_the_formula(
        rows in 1..3_usize, channels in 1..40_usize, outputs in 1..20_usize, kernel in 1..7_usize,
        size in (1..14_usize, 1..14_usize), steps in (2..9_usize, 0..6_usize),
    ) {
        let padding = steps.1.min(kernel - 1);
        let [height, width] = [size.0, size.1].map(|side| side.max(kernel.saturating_sub(2 * padding)));
        let shape = wide(rows, channels, [height, width], outputs, padding);
        check_convolution(ConvolutionShape { kernel, stride: steps.0, ..shape });
    }

    #[test]
    fn minimal_filtering_agrees_with_the_formula(
        rows in 1..8_usize, channels in 1..4_usize, outputs in 1..4_usize, height in 1..18_usize,
        width in 1..18_usize, padding in 0..3_usize,
    ) {
        let [height, width] = [height, width].map(|side| (side + 2).saturating_sub(2 * padding).max(1));
        check_convolution(wide(rows, 16 * channels, [height, width], 16 * outputs, padding));
    }
}

/// The padding and a stride leave rows without inputs.
#[test]
fn images_smaller_than_a_stride_agree_with_the_formula() {
    for (kernel, stride, padding, side) in
        [(2, 2, 1, 1), (3, 3, 1, 2), (3, 4, 1, 3), (4, 3, 2, 1), (1, 5, 0, 2)]
    {
        let shape = wide(2, 3, [side, side], 5, padding);
        check_convolution(ConvolutionShape { kernel, stride, ..shape });
    }
}

#[test]
fn convolution_agrees_at_the_sizes_of_lenet_and_cifar() {
    let pooled = |channels, height, outputs| ConvolutionShape {
        rows: 3,
        channels,
        height,
        width: height,
        outputs,
        kernel: 5,
        stride: 1,
        padding: 0,
        pool: true,
        relu: true,
        flattens: channels > 3,
    };
    for shape in [pooled(1, 28, 10), pooled(10, 12, 20), pooled(3, 32, 6), pooled(6, 14, 16)] {
        check_convolution(shape);
    }
}

/// Two values of one of the windows are 4e-7 apart, less than the rounding of values of 1.7 that are sums of
/// 250 terms.
#[test]
fn pools_of_almost_equal_values_agree_with_the_formula() {
    let shape = wide(1, 10, [7, 8], 2, 2);
    check_convolution(ConvolutionShape { kernel: 5, pool: true, ..shape });
}

/// Returns a convolution as in residual networks.
fn wide(
    rows: usize,
    channels: usize,
    [height, width]: [usize; 2],
    outputs: usize,
    padding: usize,
) -> ConvolutionShape {
    ConvolutionShape {
        rows,
        channels,
        height,
        width,
        outputs,
        kernel: 3,
        stride: 1,
        padding,
        pool: false,
        relu: false,
        flattens: false,
    }
}

/// The bits of all passes depend neither on the width of vectors, the number of threads nor on how the
/// images are divided into calls.
fn check_bits(shape: ConvolutionShape) {
    let (rows, cut) = (shape.rows, 3);
    let input = random(rows * shape.image_len(), 1);
    let gradient = random(rows * shape.output_len(), 2);
    let (weight, bias) = (random(shape.weight_len(), 3), random(shape.outputs, 4));
    let passes = |cpu: &Cpu, cuts: &[usize]| {
        let lengths = [rows * shape.output_len(), input.len(), weight.len(), bias.len()];
        let mut results = lengths.map(poison);
        for cuts in cuts.windows(2) {
            let part = cuts[0]..cuts[1];
            let shape = ConvolutionShape { rows: part.len(), ..shape };
            let of = |len: usize| part.start * len..part.end * len;
            let (images, outputs) = (of(shape.image_len()), of(shape.output_len()));
            let [output, input_gradient, weight_gradient, bias_gradient] = &mut results;
            let output = &mut output[outputs.clone()];
            cpu.convolution_forward(&shape, &input[images.clone()], &weight, Some(&bias), &mut [], output);
            let (input_gradient, gradient) = (&mut input_gradient[images.clone()], &gradient[outputs]);
            cpu.convolution_backward_input(&shape, &weight, &[], gradient, input_gradient);
            let chain = |sums| Some(RowSums::chain(sums, part.len(), part.start > 0));
            let sums =
                ViewedSums { weight: chain(&mut weight_gradient[..]), bias: chain(&mut bias_gradient[..]) };
            cpu.convolution_backward_weight(&shape, &input[images], &[], gradient, sums);
        }
        results.map(|values| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>())
    };
    let expected = passes(&Cpu::new(1).unwrap(), &[0, rows]);
    let vectors = [Vectors::Widest, Vectors::Avx512, Vectors::Avx2, Vectors::Portable];
    for threads in [1, 2, 3, 5] {
        for cpu in vectors.iter().filter_map(|vectors| Cpu::new(threads).unwrap().with_vectors(*vectors)) {
            assert_eq!(passes(&cpu, &[0, rows]), expected);
            assert_eq!(passes(&cpu, &[0, cut, cut + 1, rows]), expected);
        }
    }
}

#[test]
fn minimal_filtering_has_the_same_bits_everywhere() {
    // of whole vectors as many as go together with the widest, and one more
    let shape = wide(7, 32, [9, 6], 80, 1);
    assert!(super::winograd::applies(&shape));
    check_bits(shape);
}

#[test]
fn direct_convolutions_have_the_same_bits_everywhere() {
    let plain = wide(5, 3, [9, 12], 19, 1);
    let strided = ConvolutionShape { channels: 21, stride: 2, ..plain };
    let large = ConvolutionShape { kernel: 5, stride: 3, padding: 2, ..strided };
    for shape in [plain, strided, large, ConvolutionShape { kernel: 1, padding: 0, ..strided }] {
        assert!(!super::winograd::applies(&shape));
        check_bits(shape);
    }
}
