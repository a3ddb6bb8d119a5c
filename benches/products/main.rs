//! Matrix products in a canonical order beside the device's and the `gemm` crate's:
//! `cargo bench --bench products`, or with a shape of your own,
//! `cargo bench --bench products -- ROWS INPUTS OUTPUTS`.
//!
//! `canonical.rs` and the files that it uses are a product whose bits do not depend on the layout.
//! This program checks its bits with every kind of vectors, which is all that `cargo test` runs,
//! and measures what the order costs: with one chain for each element, with a tree of eight leaves,
//! and with the tree where the right operand was packed before. All take turns on the same operands
//! with one thread; the best of each counts. Rates are in GFLOP/s; the last column is the tree's
//! beside `gemm`'s.

mod ahead;
mod canonical;
mod leaves;
mod pack;
mod tile;

use std::hint::black_box;
use std::time::Instant;

use canonical::{Matrix, Products};
use leaves::{Leaves, MOST_LEAVES};
use phalanx::device::{Activation, Cpu, LinearOperations, LinearShape, WeightLayout};
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
];

/// Seconds for which the contenders take turns.
const SECONDS: f64 = 0.5;

fn main() {
    check_bits();
    if !std::env::args().any(|argument| argument == "--bench") {
        println!("a product has one result for every kind of vectors and place in memory");
        return;
    }
    let columns = ["gemm", "device", "chain", "tree", "packed"].map(|name| format!("{name:>6}")).concat();
    println!(
        "{:>5} {:>6} {:>7} {:<16} {:<16}{columns} tree/gemm",
        "rows", "inputs", "outputs", "weight", "pass"
    );
    let device = Cpu::new(1).expect("one thread can always be had");
    let own: Vec<usize> = std::env::args().filter_map(|argument| argument.parse().ok()).collect();
    let own = own.as_chunks::<3>().0;
    for &[rows, inputs, outputs] in if own.is_empty() { SHAPES } else { own } {
        for layout in [WeightLayout::OutputsByInputs, WeightLayout::InputsByOutputs] {
            let shape = LinearShape { rows, inputs, outputs, layout };
            for pass in [Pass::Forward, Pass::BackwardInput, Pass::BackwardWeight] {
                let rates = rates(&device, &shape, pass);
                let columns = rates.map(|rate| format!("{rate:6.0}")).concat();
                println!(
                    "{rows:>5} {inputs:>6} {outputs:>7} {:<16} {:<16}{columns} {:9.2}",
                    format!("{layout:?}"),
                    format!("{pass:?}"),
                    rates[TREE] / rates[GEMM]
                );
            }
        }
    }
}

/// The contenders, in the order of the columns.
const GEMM: usize = 0;
const DEVICE: usize = 1;
const CHAIN: usize = 2;
const TREE: usize = 3;
const PACKED: usize = 4;

/// Compares the bits of products with those of plain loops, with every kind of vectors and for all
/// ways in which operands may lie in memory.
fn check_bits() {
    let mut kinds = vec![pulp::Arch::Scalar];
    #[cfg(target_arch = "x86_64")]
    {
        kinds.extend(pulp::x86::V3::try_new().map(pulp::Arch::V3));
        kinds.extend(pulp::x86::V4::try_new().map(pulp::Arch::V4));
    }
    for [m, n, k] in [[1, 1, 1], [3, 50, 7], [17, 100, 33], [9, 49, 130], [64, 24, 0]] {
        let leaves = Leaves { len: k, num: MOST_LEAVES };
        let [left, right] = [filled(m * k), filled(k * n)];
        for transposed in [[false, false], [false, true], [true, false], [true, true]] {
            let left = Matrix { values: &left, rows: m, columns: k, transposed: transposed[0] };
            let right = Matrix { values: &right, rows: k, columns: n, transposed: transposed[1] };
            let element = |row, column| {
                leaves.sum(|term| (left.element(row, term), right.element(term, column))).to_bits()
            };
            let expected: Vec<u32> = (0..m * n).map(|at| element(at / n, at % n)).collect();
            for kind in &kinds {
                let mut product = vec![f32::NAN; m * n];
                Products::new(*kind).multiply(leaves, left, right, false, &mut product);
                let found: Vec<u32> = product.iter().map(|element| element.to_bits()).collect();
                assert!(found == expected, "{m} × {n} × {k}, transposed {transposed:?}, {kind:?}");
            }
        }
    }
}

/// Returns memory on huge pages, as training has it.
fn filled(len: usize) -> Memory<f32> {
    let mut memory = Memory::zeroed(len).expect("there is memory for a matrix");
    memory.iter_mut().enumerate().for_each(|(i, value)| *value = (i % 1013) as f32 / 1013.0 - 0.5);
    memory
}

/// Returns the best rate of each contender.
fn rates(device: &Cpu, shape: &LinearShape, pass: Pass) -> [f64; 5] {
    let LinearShape { rows, inputs, outputs, layout } = *shape;
    let (input, weight, gradient) = (filled(rows * inputs), filled(inputs * outputs), filled(rows * outputs));
    let outputs_first = layout == WeightLayout::OutputsByInputs;
    let matrix = |values, rows, columns, transposed| Matrix { values, rows, columns, transposed };
    let (left, right) = match pass {
        Pass::Forward => {
            (matrix(&input, rows, inputs, false), matrix(&weight, inputs, outputs, outputs_first))
        }
        Pass::BackwardInput => {
            (matrix(&gradient, rows, outputs, false), matrix(&weight, outputs, inputs, !outputs_first))
        }
        Pass::BackwardWeight if outputs_first => {
            (matrix(&gradient, outputs, rows, true), matrix(&input, rows, inputs, false))
        }
        Pass::BackwardWeight => (matrix(&input, inputs, rows, true), matrix(&gradient, rows, outputs, false)),
    };
    let mut product = filled(left.rows * right.columns);
    let mut canonical = Products::new(pulp::Arch::new());
    let mut best = [f64::INFINITY; 5];
    let begin = Instant::now();
    while begin.elapsed().as_secs_f64() < SECONDS {
        for (contender, best) in best.iter_mut().enumerate() {
            if contender == PACKED {
                canonical.pack(right);
            }
            let leaves = Leaves { len: left.columns, num: if contender == CHAIN { 1 } else { MOST_LEAVES } };
            let start = Instant::now();
            match (contender, pass) {
                (GEMM, _) => gemm(left, right, &mut product),
                (DEVICE, Pass::Forward) => {
                    let activation = Activation::Identity;
                    device.linear_forward(shape, &input, &weight, None, activation, &mut [], &mut product);
                }
                (DEVICE, Pass::BackwardInput) => {
                    device.linear_backward_input(shape, &gradient, &weight, &mut product, None);
                }
                (DEVICE, Pass::BackwardWeight) => {
                    device.linear_backward_weight(shape, &input, &gradient, &mut product, false);
                }
                _ => canonical.multiply(leaves, left, right, contender == PACKED, &mut product),
            }
            *best = best.min(start.elapsed().as_secs_f64());
            black_box(&product);
        }
    }
    best.map(|seconds| 2.0 * (rows * inputs * outputs) as f64 / seconds / 1e9)
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
