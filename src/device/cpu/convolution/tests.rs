//! Convolutions against their formula, in `f64`, on random inputs of odd shapes, with outputs set to NaN
//! first.

use proptest::prelude::*;

use crate::device::cpu::Cpu;
use crate::device::cpu::tests::{assert_close, cpus, poison, random};
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

/// Returns the pooled values, and for each the place `(y, x)` of its maximum in the convolution's
/// output.
fn plain_pool(shape: &ConvolutionShape, full: &[f64]) -> (Vec<f64>, Vec<(usize, usize)>) {
    let (full_height, full_width) = plain_size(shape);
    let full_len = full_height * full_width * shape.outputs;
    let (mut values, mut places) = (Vec::new(), Vec::new());
    for row in 0..shape.rows {
        for y in 0..shape.output_height() {
            for x in 0..shape.output_width() {
                for o in 0..shape.outputs {
                    let window = shape.window();
                    let at =
                        |y: usize, x: usize| full[row * full_len + (y * full_width + x) * shape.outputs + o];
                    let mut best = (y * window, x * window);
                    for place in 0..window * window {
                        let candidate = (y * window + place / window, x * window + place % window);
                        if at(candidate.0, candidate.1) > at(best.0, best.1) {
                            best = candidate;
                        }
                    }
                    let value = at(best.0, best.1);
                    values.push(if shape.relu { value.max(0.0) } else { value });
                    places.push(best);
                }
            }
        }
    }
    (values, places)
}

fn check_convolution(shape: ConvolutionShape) {
    let input = random(shape.rows * shape.image_len(), 1);
    let (weight, bias) = (random(shape.weight_len(), 2), random(shape.outputs, 3));
    let full = plain_convolution(&shape, &input, &weight, &bias);
    let (expected, places) = plain_pool(&shape, &full);
    let output_gradient = random(expected.len(), 4);
    // the place among all outputs of the one that has number `at`, channels last
    let place_of = |at: usize| {
        let (image, at) = (at / shape.output_len() * shape.output_len(), at % shape.output_len());
        let num_places = shape.output_len() / shape.outputs;
        image + if shape.flattens { at % shape.outputs * num_places + at / shape.outputs } else { at }
    };
    let gradient: Vec<f32> = (0..expected.len())
        .map(|at| if shape.relu && expected[at] <= 0.0 { 0.0 } else { output_gradient[place_of(at)] })
        .collect();
    let mut in_place = vec![0.0; expected.len()];
    expected.iter().enumerate().for_each(|(at, value)| in_place[place_of(at)] = *value);
    let expected = in_place;

    let mut weight_expected = vec![0.0_f64; weight.len()];
    let mut bias_expected = vec![0.0_f64; bias.len()];
    let mut input_expected = vec![0.0_f64; input.len()];
    for (i, (g, &place)) in gradient.into_iter().zip(&places).enumerate() {
        bias_expected[i % shape.outputs] += f64::from(g);
        for_each_tap(&shape, i / shape.output_len(), place, i % shape.outputs, |at, w| {
            weight_expected[w] += f64::from(g) * f64::from(input[at]);
            input_expected[at] += f64::from(g) * f64::from(weight[w]);
        });
    }
    for cpu in cpus() {
        let (mut output, mut argmax) = (poison(expected.len()), poison(shape.rows * shape.argmax_len()));
        cpu.convolution_forward(&shape, &input, &weight, Some(&bias), &mut argmax, &mut output);
        assert_close(&output, &expected, 1e-5);

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
            let times = |expected: &[f64]| expected.iter().map(|x| factor * x).collect::<Vec<_>>();
            assert_close(&weight_gradient, &times(&weight_expected), 1e-5);
            assert_close(&bias_gradient, &times(&bias_expected), 1e-5);
        }

        let mut input_gradient = poison(input.len());
        cpu.convolution_backward_input(&shape, &weight, &argmax, &gradient, &mut input_gradient);
        assert_close(&input_gradient, &input_expected, 1e-5);
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
