//! Products of small matrices, whose operands are read where they are.
//!
//! Each element is one chain of fused multiply-adds in the order of the inner dimension, so its bits
//! depend neither on its place nor on the width of vectors.

use pulp::{Simd, WithSimd};

use super::Cpu;

/// The left operand: element (row, term) is at `row · row_stride + term · term_stride`.
#[derive(Clone, Copy)]
pub(super) struct Left<'a> {
    pub(super) values: &'a [f32],
    pub(super) row_stride: usize,
    pub(super) term_stride: usize,
}

/// A matrix whose rows are `stride` apart.
#[derive(Clone, Copy)]
pub(super) struct MatrixRows<'a> {
    pub(super) values: &'a [f32],
    pub(super) stride: usize,
}

/// Like [`MatrixRows`], to write.
pub(super) struct MatrixRowsMut<'a> {
    pub(super) values: &'a mut [f32],
    pub(super) stride: usize,
}

/// The product of a left operand, `[rows, terms]`, and a right one, `[terms, columns]`.
pub(super) struct SmallProduct<'a> {
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) terms: usize,
    pub(super) left: Left<'a>,
    pub(super) right: MatrixRows<'a>,
    pub(super) target: MatrixRowsMut<'a>,
    /// True to continue the values that are in the target, instead of zeros.
    pub(super) continues: bool,
}

impl Cpu {
    /// Computes a small product on this thread.
    pub(super) fn multiply_small(&self, product: SmallProduct<'_>) {
        self.arch.dispatch(product);
    }
}

/// The vectors of a tile's row.
const VECTORS: usize = 2;

impl WithSimd for SmallProduct<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let mut row = 0;
        // the sums of a tile fit the registers
        if S::REGISTER_COUNT >= 32 {
            row = self.strips::<S, 8>(simd, row);
        }
        row = self.strips::<S, 4>(simd, row);
        self.strips::<S, 1>(simd, row);
    }
}

impl SmallProduct<'_> {
    /// Computes as many rows from `row` on as are whole strips of `ROWS`, and returns the next row.
    #[inline(always)]
    fn strips<S: Simd, const ROWS: usize>(&mut self, simd: S, mut row: usize) -> usize {
        while row + ROWS <= self.rows {
            let mut column = 0;
            while column + VECTORS * S::F32_LANES <= self.columns {
                self.tile::<S, ROWS, VECTORS>(simd, row, column);
                column += VECTORS * S::F32_LANES;
            }
            while column < self.columns {
                self.tile::<S, ROWS, 1>(simd, row, column);
                column += S::F32_LANES;
            }
            row += ROWS;
        }
        row
    }

    #[inline(always)]
    fn tile<S: Simd, const ROWS: usize, const WIDTH: usize>(&mut self, simd: S, row: usize, column: usize) {
        let end = self.columns.min(column + WIDTH * S::F32_LANES);
        let mut sums = [[simd.splat_f32s(0.0); WIDTH]; ROWS];
        let stride = self.target.stride;
        if self.continues {
            for (at, sums) in sums.iter_mut().enumerate() {
                let start = (row + at) * stride;
                load(simd, &self.target.values[start + column..start + end], sums);
            }
        }
        let Left { values, row_stride, term_stride } = self.left;
        for term in 0..self.terms {
            let mut right = [simd.splat_f32s(0.0); WIDTH];
            let start = term * self.right.stride;
            load(simd, &self.right.values[start + column..start + end], &mut right);
            for (at, sums) in sums.iter_mut().enumerate() {
                let left = simd.splat_f32s(values[(row + at) * row_stride + term * term_stride]);
                for (sum, right) in sums.iter_mut().zip(right) {
                    *sum = simd.mul_add_f32s(left, right, *sum);
                }
            }
        }
        for (at, sums) in sums.iter().enumerate() {
            let start = (row + at) * stride;
            let line = &mut self.target.values[start + column..start + end];
            let (whole, rest) = S::as_mut_simd_f32s(line);
            whole.iter_mut().zip(sums).for_each(|(value, sum)| *value = *sum);
            if !rest.is_empty() {
                simd.partial_store_f32s(rest, sums[whole.len()]);
            }
        }
    }
}

/// Loads a line of at most as many elements as `vectors` have.
#[inline(always)]
fn load<S: Simd, const WIDTH: usize>(simd: S, line: &[f32], vectors: &mut [S::f32s; WIDTH]) {
    let (whole, rest) = S::as_simd_f32s(line);
    if rest.is_empty() && whole.len() == WIDTH {
        vectors.copy_from_slice(&whole[..WIDTH]);
        return;
    }
    vectors[..whole.len()].copy_from_slice(whole);
    if !rest.is_empty() {
        vectors[whole.len()] = simd.partial_load_f32s(rest);
    }
}
