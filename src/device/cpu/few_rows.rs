//! The product of a few rows with a wide matrix, as in a pipeline's micro-batches.
//!
//! `gemm` walks down the matrix in panels a few columns wide: with rows a power of two apart, each
//! step hits the same few sets of the caches, and few rows do not hide that. Here the matrix is
//! read once and in order, in stripes 1 KiB wide, while the stripe of the product stays in the L1
//! cache.

use std::cell::RefCell;

use pulp::{Simd, WithSimd};

use super::Cpu;
use super::matmul::Matrix;

/// Rows of the matrix that are added at a time.
const DEPTH: usize = 4;

/// Columns of a stripe.
const WIDTH: usize = 256;

thread_local! {
    static STRIPE: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// A product of `[rows, depth]` with `[depth, columns]`, both row-major.
struct FewRows<'a> {
    rows: usize,
    depth: usize,
    columns: usize,
    left: &'a [f32],
    right: &'a [f32],
    /// Memory for a stripe of the product.
    stripe: &'a mut [f32],
    product: &'a mut [f32],
}

impl Cpu {
    /// Computes `product = left · right`; neither operand is transposed.
    pub(super) fn multiply_few_rows(&self, left: Matrix<'_>, right: Matrix<'_>, product: &mut [f32]) {
        let (rows, depth, columns) = (left.rows, right.rows, right.columns);
        let (left, right) = (left.values, right.values);
        STRIPE.with_borrow_mut(|stripe| {
            stripe.resize(stripe.len().max(WIDTH * rows), 0.0);
            self.arch.dispatch(FewRows { rows, depth, columns, left, right, stripe, product });
        });
    }
}

impl WithSimd for FewRows<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let FewRows { rows, depth, columns, left, right, stripe, product } = self;
        for first in (0..columns).step_by(WIDTH) {
            let width = WIDTH.min(columns - first);
            let stripe = &mut stripe[..rows * width];
            stripe.fill(0.0);
            let mut at = 0;
            while at + DEPTH <= depth {
                let matrix: [&[f32]; DEPTH] =
                    std::array::from_fn(|i| &right[(at + i) * columns + first..][..width]);
                add(simd, matrix, LeftColumns { left, depth, at }, stripe, width);
                at += DEPTH;
            }
            while at < depth {
                let matrix = [&right[at * columns + first..][..width]];
                add(simd, matrix, LeftColumns { left, depth, at }, stripe, width);
                at += 1;
            }
            for row in 0..rows {
                product[row * columns + first..][..width].copy_from_slice(&stripe[row * width..][..width]);
            }
        }
    }
}

/// Consecutive columns, from `at`, of the left operand, which has `depth` columns.
struct LeftColumns<'a> {
    left: &'a [f32],
    depth: usize,
    at: usize,
}

/// Adds to each row of `stripe` the rows of `matrix`, times the factors in the row's `columns`.
#[inline(always)]
fn add<S: Simd, const N: usize>(
    simd: S,
    matrix: [&[f32]; N],
    columns: LeftColumns<'_>,
    stripe: &mut [f32],
    width: usize,
) {
    let LeftColumns { left, depth, at } = columns;
    let factors = |row: usize| -> &[f32; N] {
        left[row * depth + at..].first_chunk().expect("the left operand has these columns")
    };
    let mut pairs = stripe.chunks_exact_mut(2 * width);
    let mut row = 0;
    for pair in &mut pairs {
        let (first, second) = pair.split_at_mut(width);
        add_rows(simd, matrix, [factors(row), factors(row + 1)], [first, second]);
        row += 2;
    }
    let single = pairs.into_remainder();
    if !single.is_empty() {
        add_rows(simd, matrix, [factors(row)], [single]);
    }
}

/// Adds the rows of `matrix` to R rows of the stripe at once, so that each loaded vector is used R
/// times.
#[inline(always)]
fn add_rows<S: Simd, const N: usize, const R: usize>(
    simd: S,
    matrix: [&[f32]; N],
    factors: [&[f32; N]; R],
    lines: [&mut [f32]; R],
) {
    let (whole, rest) = (lines[0].len() / S::F32_LANES, lines[0].len() % S::F32_LANES);
    let vectors: [&[S::f32s]; N] = std::array::from_fn(|i| &S::as_simd_f32s(matrix[i]).0[..whole]);
    let splat: [[S::f32s; N]; R] =
        std::array::from_fn(|row| std::array::from_fn(|i| simd.splat_f32s(factors[row][i])));
    let mut lines = lines.map(|line| S::as_mut_simd_f32s(line));
    {
        let sums: [&mut [S::f32s]; R] = lines.each_mut().map(|(line, _)| &mut line[..whole]);
        for column in 0..whole {
            let mut values: [S::f32s; R] = std::array::from_fn(|row| sums[row][column]);
            for i in 0..N {
                let vector = vectors[i][column];
                for row in 0..R {
                    values[row] = simd.mul_add_f32s(splat[row][i], vector, values[row]);
                }
            }
            for row in 0..R {
                sums[row][column] = values[row];
            }
        }
    }
    for (row, (_, line)) in lines.iter_mut().enumerate() {
        for column in 0..rest {
            for i in 0..N {
                line[column] =
                    factors[row][i].mul_add(matrix[i][whole * S::F32_LANES + column], line[column]);
            }
        }
    }
}
