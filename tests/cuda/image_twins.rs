//! Operations on images, and normalisations, against the CPU's.

use phalanx::device::{ConvolutionShape, Cuda, GroupNormShape, NormShape, PoolShape};
use phalanx::sums::{Leaves, Section};

use super::comparison::{before, compare, exact, given, output, random, weights};
use super::operations::*;

pub fn all(cuda: &Cuda, tolerance: f32) {
    convolutions(cuda, tolerance);
    pools(cuda, tolerance);
    norms(cuda, tolerance);
    group_norms(cuda, tolerance);
    scales(cuda, tolerance);
}

fn convolutions(cuda: &Cuda, tolerance: f32) {
    // rows, channels, height, width, outputs, kernel, stride, padding; the first are LeNet's and the
    // CIFAR net's, the last of each half does not fit shared memory
    let shapes = [
        (3, 1, 28, 28, 10, 5, 1, 0),
        (5, 10, 12, 12, 20, 5, 1, 0),
        (2, 3, 32, 32, 6, 5, 1, 0),
        (2, 6, 14, 14, 16, 5, 1, 0),
        (1, 1, 1, 1, 1, 1, 1, 0),
        (4, 2, 7, 9, 3, 3, 1, 0),
        (3, 5, 6, 11, 33, 2, 1, 0),
        (130, 1, 5, 5, 2, 3, 1, 0),
        (2, 40, 12, 12, 42, 5, 1, 0),
        (3, 3, 12, 12, 8, 3, 1, 1),
        (2, 8, 12, 11, 16, 3, 2, 1),
        (2, 8, 7, 12, 16, 1, 2, 0),
        (1, 2, 9, 8, 3, 5, 3, 2),
        (2, 40, 12, 12, 40, 5, 2, 2),
        (1, 3, 10, 9, 4, 7, 1, 3),
        (2, 2, 16, 15, 3, 7, 1, 0),
        (2, 2, 16, 15, 3, 8, 1, 1),
    ];
    for (rows, channels, height, width, outputs, kernel, stride, padding) in shapes {
        let kinds = [
            (true, true, true),
            (true, true, false),
            (true, false, false),
            (false, true, true),
            (false, true, false),
            (false, false, false),
        ];
        for (pool, relu, flattens) in kinds {
            let shape = ConvolutionShape {
                rows,
                channels,
                height,
                width,
                outputs,
                kernel,
                stride,
                padding,
                pool,
                relu,
                flattens,
            };
            if pool && (stride > 1 || height < kernel + 1 || width < kernel + 1) {
                continue;
            }
            let scale = ((channels * kernel * kernel) as f32).sqrt().recip();
            let (len, what) = (rows * shape.output_len(), format!("{shape:?}"));
            let read = [
                given(random(rows * shape.image_len(), 1)),
                weights(random(shape.weight_len(), 2).into_iter().map(|w| scale * w).collect()),
                weights(random(outputs, 3)),
            ];
            for bias in [true, false] {
                let mut arrays = read.to_vec();
                arrays.push(output(len));
                compare(&what, cuda, tolerance, &arrays, &ConvolutionForward { num_read: 3, shape, bias });
            }
            for (accumulate, has_bias) in [(false, true), (true, true), (true, false)] {
                let [weight, bias] = [shape.weight_len(), outputs].map(|len| exact(before(len, accumulate)));
                let mut arrays = read.to_vec();
                arrays.extend([given(random(len, 4)), weight, output(rows * shape.image_len())]);
                arrays.extend(has_bias.then_some(bias));
                let operation = ConvolutionBackward { num_read: 4, shape, accumulate };
                compare(&what, cuda, tolerance, &arrays, &operation);
            }
        }
    }
}

fn pools(cuda: &Cuda, tolerance: f32) {
    let shapes = [
        (2, 9, 7, 3, [2, 2], [2, 2], 0),
        (3, 10, 10, 5, [3, 3], [3, 3], 0),
        (1, 4, 4, 1, [4, 4], [4, 4], 0),
        (5, 6, 6, 33, [2, 2], [2, 2], 0),
        (3, 5, 8, 7, [5, 8], [5, 8], 0),
        (2, 7, 4, 8, [2, 2], [2, 2], 0),
        // windows that overlap, that reach beyond the image, and that leave elements out
        (3, 9, 8, 4, [3, 3], [2, 2], 1),
        (2, 7, 10, 3, [5, 4], [1, 3], 2),
        (2, 8, 9, 8, [2, 2], [3, 3], 1),
    ];
    for (rows, height, width, channels, windows, strides, padding) in shapes {
        let ([window_height, window_width], [stride_height, stride_width]) = (windows, strides);
        let whole = PoolShape::whole(height, width, channels);
        let shape =
            PoolShape { rows, window_height, window_width, stride_height, stride_width, padding, ..whole };
        let (len, pooled) = (rows * shape.image_len(), rows * shape.output_len());
        let arrays = [given(random(len, 1)), given(random(pooled, 2)), output(pooled), output(len)];
        compare(&format!("maximum {shape:?}"), cuda, tolerance, &arrays, &Pool { num_read: 2, shape });
        compare(&format!("mean {shape:?}"), cuda, tolerance, &arrays, &AveragePool { num_read: 2, shape });
    }
    // a chain of floats over an image of one colour loses more and more of each value
    let shape = PoolShape { rows: 1, ..PoolShape::whole(700, 600, 1) };
    let arrays =
        [given(vec![0.3; shape.image_len()]), given(vec![1.0]), output(1), output(shape.image_len())];
    compare("mean of one colour", cuda, tolerance, &arrays, &AveragePool { num_read: 2, shape });
}

fn norms(cuda: &Cuda, tolerance: f32) {
    for (rows, columns) in [(1, 1), (5, 3), (7, 32), (33, 65), (4, 1300), (300, 24)] {
        for is_centred in [true, false] {
            let shape = NormShape { rows, columns, epsilon: 1e-5, is_centred, positions: None };
            let (x, g) = (given(random(rows * columns, 1)), given(random(rows * columns, 2)));
            let (weight, bias) = (weights(random(columns, 3)), weights(random(columns, 4)));
            for bias_is_there in [true, false] {
                let arrays = [x.clone(), weight.clone(), bias.clone(), g.clone()];
                let outputs = [output(rows * columns), output(rows * columns)];
                let operation = LayerNorm { num_read: 4, shape, bias: bias_is_there };
                let arrays = [&arrays[..], &outputs].concat();
                compare(&format!("{shape:?}"), cuda, tolerance, &arrays, &operation);
            }
            for accumulate in [false, true] {
                let arrays = [x.clone(), weight.clone(), g.clone(), exact(before(columns, accumulate))];
                let operation = LayerNormWeight { num_read: 3, shape, accumulate };
                compare(&format!("weight of {shape:?}"), cuda, tolerance, &arrays, &operation);
            }
        }
    }
    // of some positions of 10, in one leaf
    for (samples, own, columns) in [(1, 1, 1), (3, 10, 7), (5, 4, 65), (70, 3, 32), (2, 0, 8)] {
        let all = Section::whole(Leaves { len: own, num: 1 });
        let (rows, positions) = (samples * own, Some(all));
        let shape = NormShape { rows, columns, epsilon: 1e-5, is_centred: true, positions };
        let arrays = [given(random(rows * columns, 1)), weights(random(columns, 2))];
        let gradient = given(random(rows * columns, 3));
        for has_bias in [true, false] {
            let tensors = 1 + usize::from(has_bias);
            let outputs =
                [exact(vec![f32::NAN; tensors * samples * columns]), exact(before(columns, has_bias))];
            let arrays = [&arrays[..], std::slice::from_ref(&gradient), &outputs].concat();
            let operation = PositionSums { num_read: 3, shape, samples, has_bias };
            compare(&format!("positions of {shape:?}"), cuda, tolerance, &arrays, &operation);
        }
    }
}

fn group_norms(cuda: &Cuda, tolerance: f32) {
    for (rows, positions, channels, groups) in
        [(1, 4, 1, 1), (3, 9, 8, 4), (2, 36, 6, 6), (5, 25, 33, 3), (70, 7, 16, 2)]
    {
        for (relu, adds) in [(false, false), (true, false), (false, true), (true, true)] {
            let shape = GroupNormShape { rows, positions, channels, groups, epsilon: 1e-5, relu };
            let len = rows * shape.image_len();
            let arrays = [
                given(random(len, 1)),
                weights(random(channels, 2)),
                weights(random(channels, 3)),
                given(random(len, 4)),
                output(len),
                output(len),
                exact(vec![f32::NAN; rows * shape.position_sums_len()]),
            ];
            // what is added to the outputs is the gradient, an array like any other
            let operation = GroupNorm { num_read: 4, shape, adds };
            compare(&format!("{shape:?}, adds {adds}"), cuda, tolerance, &arrays, &operation);
        }
    }
}

fn scales(cuda: &Cuda, tolerance: f32) {
    for (rows, columns) in [(1, 1), (5, 3), (7, 32), (33, 65), (4, 1300), (300, 24)] {
        for accumulate in [false, true] {
            let arrays = [
                given(random(rows * columns, 1)),
                weights(random(columns, 2)),
                given(random(rows * columns, 3)),
                output(rows * columns),
                exact(before(columns, accumulate)),
            ];
            let operation = ScaleColumns { num_read: 3, rows, columns, accumulate };
            compare(&format!("scale of {rows} × {columns}"), cuda, tolerance, &arrays, &operation);
        }
    }
}
