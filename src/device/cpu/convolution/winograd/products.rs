//! Products of coefficients: for each of the 36, a matrix product, of whose sums a block stays in registers.

use pulp::Simd;

use super::transform::{VectorSink, VectorSource};
use super::{COEFFICIENTS, SIDE};

/// A vector of each coefficient of a square, row by row.
pub(super) type CoefficientSquare<S> = [<S as Simd>::f32s; COEFFICIENTS];

/// Returns the vectors of `values` as squares of coefficients.
#[inline(always)]
pub(super) fn squares<S: Simd>(values: &mut [f32]) -> &mut [CoefficientSquare<S>] {
    S::as_mut_simd_f32s(values).0.as_chunks_mut().0
}

/// The coefficients of a square that were formed together.
pub(super) struct Formed<'a, S: Simd>(pub(super) &'a CoefficientSquare<S>);

impl<S: Simd> VectorSource<S> for Formed<'_, S> {
    #[inline(always)]
    fn get(&self, row: usize, column: usize) -> S::f32s {
        self.0[row * SIDE + column]
    }
}

/// The coefficients of a square, which go to places with equal distances.
pub(super) struct Coefficients<'a, S: Simd> {
    /// The vectors from the first coefficient on.
    pub(super) values: &'a mut [S::f32s],
    /// Vectors from a coefficient to the next.
    pub(super) stride: usize,
}

impl<S: Simd> VectorSink<S> for Coefficients<'_, S> {
    #[inline(always)]
    fn put(&mut self, row: usize, column: usize, vector: S::f32s) {
        self.values[(row * SIDE + column) * self.stride] = vector;
    }
}

/// Adds to the sum of each row r and vector v the products of the terms k,
/// `elements[k · step + r · stride]` times `vectors[k][v]`. `ROWS · VECTORS` sums have to fit the registers,
/// beside an element and the vectors of a term.
#[inline(always)]
pub(super) fn add_products<S: Simd, const ROWS: usize, const VECTORS: usize>(
    simd: S,
    sums: &mut [[S::f32s; VECTORS]; ROWS],
    elements: &[f32],
    [step, stride]: [usize; 2],
    vectors: &[[S::f32s; VECTORS]],
) {
    for (vectors, term) in vectors.iter().zip((0..).step_by(step)) {
        let elements = &elements[term..][..(ROWS - 1) * stride + 1];
        for (row, sums) in sums.iter_mut().enumerate() {
            let element = simd.splat_f32s(elements[row * stride]);
            for (sum, vector) in sums.iter_mut().zip(vectors) {
                *sum = simd.mul_add_f32s(element, *vector, *sum);
            }
        }
    }
}
