//! The transforms between tiles and their coefficients, with the points 0, 1, −1, 2, −2 and ∞. A line is
//! transformed by each of Lavin & Gray's matrices in as few operations as it takes; a square has its columns
//! transformed, and then its rows.

use pulp::Simd;

use super::{KERNEL, SIDE, TILE};

/// A square of vectors that can be read.
pub(super) trait VectorSource<S: Simd> {
    /// Returns a vector.
    fn get(&self, row: usize, column: usize) -> S::f32s;
}

/// A square of vectors that can be written.
pub(super) trait VectorSink<S: Simd> {
    /// Writes a vector.
    fn put(&mut self, row: usize, column: usize, vector: S::f32s);
}

/// Values that begin with a cache line: vectors of them take one each, and not two.
#[repr(align(64))]
struct Aligned<T>(T);

/// A transform of lines of `FROM` vectors into lines of `INTO`.
pub(super) trait Transform<const FROM: usize, const INTO: usize> {
    fn line<S: Simd>(simd: S, line: [S::f32s; FROM]) -> [S::f32s; INTO];

    /// Transforms the columns of a square, and then the rows of the result.
    #[inline(always)]
    fn square<S: Simd>(simd: S, from: &impl VectorSource<S>, into: &mut impl VectorSink<S>) {
        let zero = simd.splat_f32s(0.0);
        let mut columns = Aligned([[zero; INTO]; FROM]);
        for (column, transformed) in columns.0.iter_mut().enumerate() {
            let mut line = [zero; FROM];
            for (row, vector) in line.iter_mut().enumerate() {
                *vector = from.get(row, column);
            }
            *transformed = Self::line(simd, line);
        }
        for row in 0..INTO {
            Self::row(simd, row, &columns.0, into);
        }
    }

    /// Transforms a row of a square whose columns have been transformed.
    #[inline(always)]
    fn row<S: Simd>(simd: S, row: usize, columns: &[[S::f32s; INTO]; FROM], into: &mut impl VectorSink<S>) {
        let mut line = [simd.splat_f32s(0.0); FROM];
        line.iter_mut().zip(columns).for_each(|(vector, column)| *vector = column[row]);
        for (column, vector) in Self::line(simd, line).into_iter().enumerate() {
            into.put(row, column, vector);
        }
    }
}

/// Returns `factor · a + b`.
#[inline(always)]
fn fused<S: Simd>(simd: S, factor: f32, a: S::f32s, b: S::f32s) -> S::f32s {
    simd.mul_add_f32s(simd.splat_f32s(factor), a, b)
}

/// Bᵀ: inputs into coefficients.
pub(super) struct OfInputs;

impl Transform<SIDE, SIDE> for OfInputs {
    #[inline(always)]
    fn line<S: Simd>(simd: S, [a, b, c, d, e, f]: [S::f32s; SIDE]) -> [S::f32s; SIDE] {
        let (even, odd) = (fused(simd, -4.0, c, e), fused(simd, -4.0, b, d));
        let (difference, across) = (simd.sub_f32s(e, c), simd.sub_f32s(d, b));
        [
            fused(simd, 4.0, a, fused(simd, -5.0, c, e)),
            simd.add_f32s(even, odd),
            simd.sub_f32s(even, odd),
            fused(simd, 2.0, across, difference),
            fused(simd, -2.0, across, difference),
            fused(simd, 4.0, b, fused(simd, -5.0, d, f)),
        ]
    }
}

/// Aᵀ: coefficients into outputs.
pub(super) struct IntoOutputs;

impl Transform<SIDE, TILE> for IntoOutputs {
    #[inline(always)]
    fn line<S: Simd>(simd: S, [a, b, c, d, e, f]: [S::f32s; SIDE]) -> [S::f32s; TILE] {
        let (sum, difference) = (simd.add_f32s(b, c), simd.sub_f32s(b, c));
        let (far_sum, far_difference) = (simd.add_f32s(d, e), simd.sub_f32s(d, e));
        [
            simd.add_f32s(simd.add_f32s(a, sum), far_sum),
            fused(simd, 2.0, far_difference, difference),
            fused(simd, 4.0, far_sum, sum),
            simd.add_f32s(fused(simd, 8.0, far_difference, difference), f),
        ]
    }
}

/// A: gradients of outputs into gradients of coefficients.
pub(super) struct OfOutputs;

impl Transform<TILE, SIDE> for OfOutputs {
    #[inline(always)]
    fn line<S: Simd>(simd: S, [a, b, c, d]: [S::f32s; TILE]) -> [S::f32s; SIDE] {
        let (even, odd) = (simd.add_f32s(a, c), simd.add_f32s(b, d));
        let (far_even, far_odd) = (fused(simd, 4.0, c, a), fused(simd, 4.0, d, b));
        [
            a,
            simd.add_f32s(even, odd),
            simd.sub_f32s(even, odd),
            fused(simd, 2.0, far_odd, far_even),
            fused(simd, -2.0, far_odd, far_even),
            d,
        ]
    }
}

/// G: a kernel into coefficients.
pub(super) struct OfKernel;

impl Transform<KERNEL, SIDE> for OfKernel {
    #[inline(always)]
    fn line<S: Simd>(simd: S, [a, b, c]: [S::f32s; KERNEL]) -> [S::f32s; SIDE] {
        let times = |factor: f32, vector| simd.mul_f32s(simd.splat_f32s(factor), vector);
        let even = times(-1.0 / 6.0, simd.add_f32s(a, c));
        let far_even = fused(simd, 1.0 / 6.0, c, times(1.0 / 24.0, a));
        [
            times(0.25, a),
            fused(simd, -1.0 / 6.0, b, even),
            fused(simd, 1.0 / 6.0, b, even),
            fused(simd, 1.0 / 12.0, b, far_even),
            fused(simd, -1.0 / 12.0, b, far_even),
            c,
        ]
    }
}

/// Gᵀ: gradients of coefficients into those of the kernel.
pub(super) struct IntoKernel;

impl Transform<SIDE, KERNEL> for IntoKernel {
    #[inline(always)]
    fn line<S: Simd>(simd: S, [a, b, c, d, e, f]: [S::f32s; SIDE]) -> [S::f32s; KERNEL] {
        let times = |factor: f32, vector| simd.mul_f32s(simd.splat_f32s(factor), vector);
        let (sum, difference) = (times(1.0 / 6.0, simd.add_f32s(b, c)), simd.sub_f32s(c, b));
        let (far_sum, far_difference) = (simd.add_f32s(d, e), simd.sub_f32s(d, e));
        [
            simd.sub_f32s(fused(simd, 0.25, a, times(1.0 / 24.0, far_sum)), sum),
            fused(simd, 1.0 / 6.0, difference, times(1.0 / 12.0, far_difference)),
            simd.sub_f32s(fused(simd, 1.0 / 6.0, far_sum, f), sum),
        ]
    }
}
