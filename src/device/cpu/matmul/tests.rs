//! Bits of products against plain loops, with every kind of vectors.

use super::operand::{Matrix, holds};
use crate::device::Cpu;
use crate::sums::{Leaves, Section};

/// Returns numbers that are not all rounded alike.
fn filled(len: usize, seed: usize) -> Vec<f32> {
    (0..len).map(|i| ((i * 7919 + seed) % 1013) as f32 / 1013.0 - 0.5).collect()
}

/// Returns CPUs with every kind of vectors that this processor has, and 1 to 3 threads.
fn cpus() -> Vec<Cpu> {
    let mut kinds = vec![pulp::Arch::Scalar];
    #[cfg(target_arch = "x86_64")]
    {
        kinds.extend(pulp::x86::V3::try_new().map(pulp::Arch::V3));
        kinds.extend(pulp::x86::V4::try_new().map(pulp::Arch::V4));
    }
    Cpu::new(2).unwrap();
    kinds.into_iter().flat_map(|arch| (1..=3).map(move |threads| Cpu { threads, arch })).collect()
}

/// Shapes `[m, n, k]`: tiles cut on every side, panels of several strips, empty leaves, no terms,
/// few rows with many terms, short leaves of one length, a left operand larger than the right one.
const SHAPES: &[[usize; 3]] = &[
    [1, 1, 1],
    [3, 50, 7],
    [17, 100, 33],
    [9, 49, 130],
    [64, 24, 0],
    [64, 50, 0],
    [40, 96, 300],
    [2, 700, 400],
    [11, 301, 230],
    [40, 900, 300],
    [70, 100, 128],
    [13, 17, 24],
    [250, 60, 70],
];

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Returns each way in which two operands may lie in memory.
fn operands<'a>(
    left: &'a [f32],
    right: &'a [f32],
    [m, n, k]: [usize; 3],
) -> impl Iterator<Item = (Matrix<'a>, Matrix<'a>)> {
    assert!(holds(left, m, k) && holds(right, k, n));
    let lefts = [Matrix::new(left, m, k), Matrix::transposed(left, m, k)];
    let rights = [Matrix::new(right, k, n), Matrix::transposed(right, k, n)];
    lefts.into_iter().flat_map(move |left| rights.map(|right| (left, right)))
}

fn element(matrix: Matrix<'_>, row: usize, column: usize) -> f32 {
    let (row, column) = if matrix.transposed { (column, row) } else { (row, column) };
    matrix.values[row * matrix.stride + column]
}

fn plain(left: Matrix<'_>, right: Matrix<'_>, num_leaves: usize, bias: Option<&[f32]>) -> Vec<u32> {
    let leaves = Leaves { len: left.columns, num: num_leaves };
    let n = right.columns;
    let start = |at: usize| bias.map_or(0.0, |bias| bias[at % n]);
    let factors = |at: usize| move |term| (element(left, at / n, term), element(right, term, at % n));
    (0..left.rows * n).map(|at| leaves.sum_from(start(at), factors(at)).to_bits()).collect()
}

#[test]
fn a_product_has_the_bits_of_plain_loops() {
    for &shape in SHAPES.iter().chain(&[[257, 900, 300]]) {
        let [m, n, k] = shape;
        let (left, right) = (filled(m * k, 1), filled(k * n, 2));
        for (left, right) in operands(&left, &right, shape) {
            let bias = filled(n, 5);
            for bias in [None, Some(&bias[..])] {
                let expected = plain(left, right, 8, bias);
                for cpu in cpus() {
                    let mut product = vec![f32::NAN; m * n];
                    let terms = Section::whole(Leaves { len: k, num: 8 });
                    cpu.multiply(left, right, terms, bias, &mut product);
                    let ways = [left.transposed, right.transposed];
                    assert!(bits(&product) == expected, "{shape:?}, transposed {ways:?}, {cpu:?}");
                }
            }
        }
    }
}

#[test]
fn sections_of_a_product_add_up_to_its_bits() {
    for num_leaves in [1, 3, 8, 13] {
        for &shape in SHAPES {
            let [m, n, k] = shape;
            let (left, right) = (filled(k * m, 3), filled(k * n, 4));
            let matrices = (Matrix::transposed(&left, m, k), Matrix::new(&right, k, n));
            let expected = plain(matrices.0, matrices.1, num_leaves, None);
            for (cpu, num_parts) in cpus().iter().zip([1, 3, 20, 2, 7, 16, 5, 8, 4]) {
                let mut stack = vec![vec![f32::NAN; m * n]; 4];
                for index in 0..num_parts {
                    let leaves = Leaves { len: k, num: num_leaves };
                    let terms = Section::whole(leaves).micro_batch(index, num_parts);
                    let range = terms.terms();
                    let left = Matrix::transposed(&left[range.start * m..], m, range.len());
                    let right = Matrix::new(&right[range.start * n..], range.len(), n);
                    let mut targets: Vec<&mut [f32]> = stack.iter_mut().map(Vec::as_mut_slice).collect();
                    cpu.multiply_section(left, right, terms, &mut targets);
                }
                assert!(
                    bits(&stack[0]) == expected,
                    "{shape:?}, {num_leaves} leaves, {num_parts} parts, {cpu:?}"
                );
            }
        }
    }
}
