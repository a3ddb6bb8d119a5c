//! Packing of operands: strips, in which the elements of a term are side by side.

use pulp::{Simd, WithSimd};

use crate::canonical::Matrix;
use crate::tile::VECTORS;

/// Packs the columns of `right` from `first` on, `[strip][term][column of the strip]`, as many
/// strips as `strips` holds. Columns past the last have arbitrary elements.
pub struct PackRight<'a> {
    pub right: Matrix<'a>,
    pub first: usize,
    pub strips: &'a mut [f32],
}

impl WithSimd for PackRight<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let PackRight { right, first, strips } = self;
        let Matrix { values, rows: num_terms, columns, transposed } = right;
        let width = VECTORS * S::F32_LANES;
        let end = columns.min(first + strips.len() / num_terms);
        if transposed {
            for (strip, first) in strips.chunks_exact_mut(width * num_terms).zip((first..end).step_by(width))
            {
                let lines = &values[first * num_terms..end.min(first + width) * num_terms];
                interleave(lines, num_terms, width, strip);
            }
            return;
        }
        let strips = S::as_mut_simd_f32s(strips).0.as_chunks_mut::<VECTORS>().0;
        for (term, line) in values.chunks_exact(columns).enumerate() {
            for (strip, line) in line[first..end].chunks(width).enumerate() {
                let (whole, rest) = S::as_simd_f32s(line);
                let strip = &mut strips[strip * num_terms + term];
                if let Some(whole) = whole.first_chunk::<VECTORS>() {
                    *strip = *whole;
                } else {
                    strip[..whole.len()].copy_from_slice(whole);
                    strip[whole.len()] = simd.partial_load_f32s(rest);
                }
            }
        }
    }
}

/// Writes `lines`, each of `num_terms` consecutive elements, side by side into `strip`, term by
/// term. The elements that share a cache line are read together.
#[inline(always)]
fn interleave(lines: &[f32], num_terms: usize, width: usize, strip: &mut [f32]) {
    const AT_ONCE: usize = 16;
    for first in (0..num_terms).step_by(AT_ONCE) {
        let terms = first..num_terms.min(first + AT_ONCE);
        let strip = &mut strip[terms.start * width..terms.end * width];
        for (at, line) in lines.chunks_exact(num_terms).enumerate() {
            // the same loop twice, for one is unrolled
            if let Some(several) = line[terms.clone()].first_chunk::<AT_ONCE>() {
                for (i, element) in several.iter().enumerate() {
                    strip[i * width + at] = *element;
                }
            } else {
                for (i, element) in line[terms.clone()].iter().enumerate() {
                    strip[i * width + at] = *element;
                }
            }
        }
    }
}

/// Packs the rows of `left`, `[strip][term][row of the strip]`. Rows past the last have arbitrary
/// elements.
#[inline(always)]
pub fn pack_left<const ROWS: usize>(left: Matrix<'_>, strips: &mut [f32]) {
    let Matrix { values, rows, columns: num_terms, transposed } = left;
    if !transposed {
        let strips = strips.chunks_exact_mut(ROWS * num_terms);
        for (strip, lines) in strips.zip(values.chunks(ROWS * num_terms)) {
            interleave(lines, num_terms, ROWS, strip);
        }
        return;
    }
    let strips = strips.as_chunks_mut::<ROWS>().0;
    for (term, line) in values.chunks_exact(rows).enumerate() {
        let (whole, rest) = line.as_chunks::<ROWS>();
        for (strip, several) in whole.iter().enumerate() {
            strips[strip * num_terms + term] = *several;
        }
        if !rest.is_empty() {
            strips[whole.len() * num_terms + term][..rest.len()].copy_from_slice(rest);
        }
    }
}
