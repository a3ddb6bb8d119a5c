//! Products of small matrices, whose operands are read where they are.
//!
//! Each element is one chain of fused multiply-adds in the order of the inner dimension, so its bits
//! depend neither on its place nor on the width of vectors.

use std::ops::Range;

use pulp::{Simd, WithSimd};

use super::Cpu;
use super::matmul::{LeftStrip, Lines};

/// The left operand.
#[derive(Clone, Copy)]
pub(super) enum Left<'a> {
    /// A matrix, row by row.
    Rows(MatrixRows<'a>),
    /// The transpose of a matrix, whose rows have the factors of a term.
    Terms(MatrixRows<'a>),
}

/// A matrix whose rows are `stride` apart.
#[derive(Clone, Copy)]
pub(super) struct MatrixRows<'a> {
    pub(super) values: &'a [f32],
    pub(super) stride: usize,
}

impl<'a> MatrixRows<'a> {
    /// Returns the rows from `row` on.
    pub(super) fn from(self, row: usize) -> MatrixRows<'a> {
        MatrixRows { values: &self.values[row * self.stride..], ..self }
    }
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
            if self.columns <= S::F32_LANES {
                row = self.strips::<S, 16>(simd, row);
            }
            row = self.strips::<S, 8>(simd, row);
        } else {
            // twelve sums, two vectors of the right operand and a factor of the left take 15 of 16 registers
            row = self.strips::<S, 6>(simd, row);
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
            match self.left {
                Left::Rows(MatrixRows { values, stride }) => {
                    let values = &values[row * stride..];
                    let mut lines: [&[f32]; ROWS] = [&[]; ROWS];
                    for (at, line) in lines.iter_mut().enumerate() {
                        *line = &values[at * stride..][..self.terms];
                    }
                    self.strip::<S, _, ROWS>(simd, row, Lines(lines));
                }
                Left::Terms(MatrixRows { values, stride }) => {
                    let terms = TermLines(MatrixRows { values: &values[row..], stride });
                    self.strip::<S, _, ROWS>(simd, row, terms);
                }
            }
            row += ROWS;
        }
        row
    }

    #[inline(always)]
    fn strip<S: Simd, L: LeftStrip<ROWS>, const ROWS: usize>(&mut self, simd: S, row: usize, left: L) {
        let (columns, pair) = (self.columns, VECTORS * S::F32_LANES);
        let mut column = 0;
        while column + pair <= columns {
            self.tile::<S, L, ROWS, VECTORS, true>(simd, row, column..column + pair, left);
            column += pair;
        }
        while column < columns {
            let end = column + S::F32_LANES;
            if end <= columns {
                self.tile::<S, L, ROWS, 1, true>(simd, row, column..end, left);
            } else {
                self.tile::<S, L, ROWS, 1, false>(simd, row, column..columns, left);
            }
            column = end;
        }
    }

    /// Computes a tile, of whole vectors or of a part of one. All loops have fixed lengths, so that the sums
    /// are in registers.
    #[inline(always)]
    fn tile<S, L, const ROWS: usize, const WIDTH: usize, const WHOLE: bool>(
        &mut self,
        simd: S,
        row: usize,
        columns: Range<usize>,
        left: L,
    ) where
        S: Simd,
        L: LeftStrip<ROWS>,
    {
        let mut sums = [[simd.splat_f32s(0.0); WIDTH]; ROWS];
        let MatrixRowsMut { values, stride } = &mut self.target;
        let target = &mut values[row * *stride + columns.start..];
        if self.continues {
            for (at, sums) in sums.iter_mut().enumerate() {
                *sums = load::<S, WIDTH, WHOLE>(simd, &target[at * *stride..][..columns.len()]);
            }
        }
        let right = &self.right.values[columns.start..];
        for term in 0..self.terms {
            let line = &right[term * self.right.stride..][..columns.len()];
            let right = load::<S, WIDTH, WHOLE>(simd, line);
            for (at, sums) in sums.iter_mut().enumerate() {
                let left = simd.splat_f32s(left.factor(term, at));
                for (sum, right) in sums.iter_mut().zip(right) {
                    *sum = simd.mul_add_f32s(left, right, *sum);
                }
            }
        }
        for (at, sums) in sums.iter().enumerate() {
            let line = &mut target[at * *stride..][..columns.len()];
            if WHOLE {
                S::as_mut_simd_f32s(&mut line[..WIDTH * S::F32_LANES]).0.copy_from_slice(sums);
            } else {
                simd.partial_store_f32s(line, sums[0]);
            }
        }
    }
}

/// Loads a line of whole vectors, or of a part of one.
#[inline(always)]
fn load<S: Simd, const WIDTH: usize, const WHOLE: bool>(simd: S, line: &[f32]) -> [S::f32s; WIDTH] {
    let mut vectors = [simd.splat_f32s(0.0); WIDTH];
    if WHOLE {
        vectors.copy_from_slice(S::as_simd_f32s(&line[..WIDTH * S::F32_LANES]).0);
    } else {
        vectors[0] = simd.partial_load_f32s(line);
    }
    vectors
}

/// Factors of which those of a term are consecutive.
#[derive(Clone, Copy)]
struct TermLines<'a>(MatrixRows<'a>);

impl<const ROWS: usize> LeftStrip<ROWS> for TermLines<'_> {
    #[inline(always)]
    fn part(self, first: usize, _: usize) -> Self {
        let TermLines(MatrixRows { values, stride }) = self;
        TermLines(MatrixRows { values: &values[first * stride..], stride })
    }

    #[inline(always)]
    fn factor(self, term: usize, row: usize) -> f32 {
        self.0.values[term * self.0.stride..][..ROWS][row]
    }
}
