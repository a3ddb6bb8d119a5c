//! Matrix products of the CPU beside the `gemm` crate's: `cargo bench --features gemm --bench products`,
//! or with a shape of your own, `cargo bench --features gemm --bench products -- ROWS INPUTS OUTPUTS`.
//!
//! The CPU's products have a canonical order, in which an element's bits do not depend on the
//! layout; `gemm` cuts the inner dimension by the caches of the machine. Both take turns on the
//! same operands with one thread; the best of each counts. Rates are in GFLOP/s. With `-- cold`, operands
//! are taken in turns from so much memory that none is in a cache, as in a step of training.

use std::hint::black_box;
use std::time::Instant;

use phalanx::device::{
    Activation, Cpu, LinearOperations, LinearShape, RowSums, WeightLayout, WeightOperands,
};
use phalanx::memory::Memory;

/// A pass of a linear layer, which is a product.
#[derive(Clone, Copy, Debug)]
enum Pass {
    Forward,
    BackwardInput,
    BackwardWeight,
}

/// A linear layer's rows, inputs and outputs.
const SHAPES: &[[usize; 3]] = &[
    [1024, 1024, 1024],
    [128, 1024, 1024],
    [64, 1024, 1024],
    [16, 1024, 1024],
    [8, 1024, 1024],
    [64, 2048, 2048],
    [128, 256, 120],
    [128, 784, 128],
    [128, 120, 10],
    // of a GPT: 12 sequences of 64 positions, 8 of 256
    [768, 128, 384],
    [768, 512, 128],
    [2048, 384, 1536],
    [2048, 1536, 384],
];

/// Seconds for which the contenders take turns.
const SECONDS: f64 = 0.5;

/// Bytes of operands that take turns, so that none is in a cache.
const COLD_BYTES: usize = 1 << 30;

fn main() {
    println!(
        "{:>5} {:>6} {:>7} {:<16} {:<16}  gemm    CPU  CPU/gemm",
        "rows", "inputs", "outputs", "weight", "pass"
    );
    let cpu = Cpu::new(1).expect("one thread can always be had");
    let own: Vec<usize> = std::env::args().filter_map(|argument| argument.parse().ok()).collect();
    let own = own.as_chunks::<3>().0;
    let is_cold = std::env::args().any(|argument| argument == "cold");
    for &[rows, inputs, outputs] in if own.is_empty() { SHAPES } else { own } {
        for layout in [WeightLayout::OutputsByInputs, WeightLayout::InputsByOutputs] {
            let shape = LinearShape::whole(rows, inputs, outputs, layout, 8);
            for pass in [Pass::Forward, Pass::BackwardInput, Pass::BackwardWeight] {
                let [gemm, own] = rates(&cpu, &shape, pass, is_cold);
                println!(
                    "{rows:>5} {inputs:>6} {outputs:>7} {:<16} {:<16}{gemm:6.0} {own:6.0} {:9.2}",
                    format!("{layout:?}"),
                    format!("{pass:?}"),
                    own / gemm
                );
            }
        }
    }
}

/// An operand of `gemm`: a row-major matrix, or the transpose of one.
#[derive(Clone, Copy)]
struct Matrix<'a> {
    values: &'a [f32],
    rows: usize,
    columns: usize,
    transposed: bool,
}

/// Returns memory on huge pages, as training has it.
fn filled(len: usize) -> Memory<f32> {
    let mut memory = Memory::zeroed(len).expect("there is memory for a matrix");
    memory.iter_mut().enumerate().for_each(|(i, value)| *value = (i % 1013) as f32 / 1013.0 - 0.5);
    memory
}

/// Returns the best rates of `gemm` and of the CPU.
fn rates(cpu: &Cpu, shape: &LinearShape, pass: Pass, is_cold: bool) -> [f64; 2] {
    let LinearShape { rows, inputs, outputs, .. } = *shape;
    let lengths = [rows * inputs, inputs * outputs, rows * outputs];
    let bytes = size_of::<f32>() * lengths.iter().sum::<usize>();
    let num_sets = if is_cold { COLD_BYTES / bytes + 1 } else { 1 };
    let mut sets: Vec<[Memory<f32>; 3]> = (0..num_sets).map(|_| lengths.map(filled)).collect();
    let mut best = [f64::INFINITY; 2];
    let begin = Instant::now();
    for turn in 0.. {
        let [gemm, own] = [2 * turn, 2 * turn + 1].map(|at| at % num_sets);
        best[0] = best[0].min(seconds(None, shape, pass, &mut sets[gemm]));
        best[1] = best[1].min(seconds(Some(cpu), shape, pass, &mut sets[own]));
        if begin.elapsed().as_secs_f64() > SECONDS {
            break;
        }
    }
    best.map(|seconds| 2.0 * (rows * inputs * outputs) as f64 / seconds / 1e9)
}

/// Returns the seconds of a product by `cpu`, or else by `gemm`, of two of the operands of a linear layer:
/// its input, weight and output. It takes the place of the third.
fn seconds(cpu: Option<&Cpu>, shape: &LinearShape, pass: Pass, operands: &mut [Memory<f32>; 3]) -> f64 {
    let LinearShape { rows, inputs, outputs, layout, .. } = *shape;
    let [input, weight, gradient] = operands;
    let outputs_first = layout == WeightLayout::OutputsByInputs;
    let start = Instant::now();
    match (cpu, pass) {
        (Some(cpu), Pass::Forward) => {
            let activation = Activation::Identity;
            cpu.linear_forward(shape, input, weight, None, activation, &mut [], gradient);
        }
        (Some(cpu), Pass::BackwardInput) => cpu.linear_backward_input(shape, gradient, weight, input),
        (Some(cpu), Pass::BackwardWeight) => {
            let sums = RowSums::chain(&mut weight[..], rows, false);
            let operands = [WeightOperands { rows, input: &input[..], gradient: &gradient[..] }];
            cpu.linear_backward_weight(shape, &operands, sums);
        }
        (None, Pass::Forward) => {
            gemm(
                matrix(input, rows, inputs, false),
                matrix(weight, inputs, outputs, outputs_first),
                gradient,
            );
        }
        (None, Pass::BackwardInput) => {
            gemm(
                matrix(gradient, rows, outputs, false),
                matrix(weight, outputs, inputs, !outputs_first),
                input,
            );
        }
        (None, Pass::BackwardWeight) if outputs_first => {
            gemm(matrix(gradient, outputs, rows, true), matrix(input, rows, inputs, false), weight);
        }
        (None, Pass::BackwardWeight) => {
            gemm(matrix(input, inputs, rows, true), matrix(gradient, rows, outputs, false), weight);
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    black_box(operands);
    seconds
}

/// Returns `values` as a matrix, or as the transpose of one.
fn matrix(values: &[f32], rows: usize, columns: usize, transposed: bool) -> Matrix<'_> {
    Matrix { values, rows, columns, transposed }
}

#[allow(unsafe_code)]
fn gemm(left: Matrix<'_>, right: Matrix<'_>, product: &mut [f32]) {
    let (m, n, k) = (left.rows, right.columns, left.columns);
    let holds = |matrix: Matrix<'_>| matrix.values.len() == matrix.rows * matrix.columns;
    assert!(holds(left) && holds(right) && right.rows == k && product.len() == m * n);
    // from a column to the next, and from a row to the next
    let strides = |matrix: Matrix<'_>| {
        if matrix.transposed { [matrix.rows as isize, 1] } else { [1, matrix.columns as isize] }
    };
    let (l, r) = (strides(left), strides(right));
    // SAFETY: the three slices hold the matrices that their sizes and strides describe, and
    // `product` is borrowed exclusively.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            product.as_mut_ptr(),
            1,
            n as isize,
            false,
            left.values.as_ptr(),
            l[0],
            l[1],
            right.values.as_ptr(),
            r[0],
            r[1],
            1.0,
            1.0,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}
