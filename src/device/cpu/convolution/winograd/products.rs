//! Products of the coefficients of tiles, a column of the square at a time, so that the sums of several
//! squares are in registers when the column is transformed.

use pulp::Simd;

use super::transform::VectorSink;
use super::{COEFFICIENTS, SIDE};

/// The column of a square.
pub(super) type TileColumn<S> = [<S as Simd>::f32s; SIDE];

/// A vector of each coefficient of a tile, column by column.
pub(super) struct Coefficients<'a, S: Simd>(pub(super) &'a mut [S::f32s; COEFFICIENTS]);

impl<S: Simd> VectorSink<S> for Coefficients<'_, S> {
    #[inline(always)]
    fn put(&mut self, row: usize, column: usize, vector: S::f32s) {
        self.0[column * SIDE + row] = vector;
    }
}

/// Returns the vectors of `values` as squares of coefficients.
#[inline(always)]
pub(super) fn squares<S: Simd>(values: &mut [f32]) -> &mut [[S::f32s; COEFFICIENTS]] {
    S::as_mut_simd_f32s(values).0.as_chunks_mut().0
}

/// Returns the vectors of `values` as columns.
#[inline(always)]
pub(super) fn columns<S: Simd>(values: &[f32]) -> &[TileColumn<S>] {
    S::as_simd_f32s(values).0.as_chunks().0
}

/// For each vector v, sum s and row r, adds `elements[first + s · space + r · stride] · vectors[v][r]` to
/// `sums[v][s][r]`. `SUMS · VECTORS` columns have to fit the registers: four of 32, two of 16, beside an
/// element and the vectors.
#[inline(always)]
pub(super) fn add_products<S: Simd, const SUMS: usize, const VECTORS: usize>(
    simd: S,
    sums: &mut [[TileColumn<S>; SUMS]; VECTORS],
    elements: &[f32],
    first: usize,
    [stride, space]: [usize; 2],
    vectors: [&TileColumn<S>; VECTORS],
) {
    // row by row, so that few of the elements and vectors are in registers beside the sums
    for row in 0..SIDE {
        for at in 0..SUMS {
            let element = simd.splat_f32s(elements[first + at * space + row * stride]);
            for (sums, vector) in sums.iter_mut().zip(vectors) {
                sums[at][row] = simd.mul_add_f32s(element, vector[row], sums[at][row]);
            }
        }
    }
}
