//! Packing of operands: strips, in which the elements of a term are side by side.

use std::ops::Range;

use pulp::Simd;

use super::operand::Matrix;
use crate::device::cpu::fetch::{fetch, fetch_after};
use crate::device::cpu::transpose::transpose;

/// The packing of a panel of columns of the right operand into strips of `VECTORS` vectors,
/// `[strip][term][column of the strip]`, at once or little by little. Columns past the last have arbitrary
/// elements.
pub(super) struct Packing<'a, S: Simd, const VECTORS: usize> {
    right: Matrix<'a>,
    columns: Range<usize>,
    strips: &'a mut [[S::f32s; VECTORS]],
    num_whole: usize,
    fetched: Cursor,
    packed: Cursor,
    pace: Pace,
}

/// The number of lines as wide as a strip that are fetched, and packed, at a time.
#[derive(Clone, Copy, Default)]
pub(super) struct Pace {
    pub(super) fetched: usize,
    pub(super) packed: usize,
}

/// A term of a strip.
#[derive(Clone, Copy, Default)]
struct Cursor {
    term: usize,
    strip: usize,
}

impl Cursor {
    #[inline(always)]
    fn advance(&mut self, num_strips: usize) {
        self.strip += 1;
        if self.strip == num_strips {
            *self = Cursor { term: self.term + 1, strip: 0 };
        }
    }
}

impl<'a, S: Simd, const VECTORS: usize> Packing<'a, S, VECTORS> {
    /// Returns the packing of `columns` of `right` into `strips`.
    #[inline(always)]
    pub(super) fn new(
        right: Matrix<'a>,
        columns: Range<usize>,
        strips: &'a mut [[S::f32s; VECTORS]],
        pace: Pace,
    ) -> Packing<'a, S, VECTORS> {
        let num_whole = if right.transposed { 0 } else { columns.len() / (VECTORS * S::F32_LANES) };
        let [fetched, packed] = [Cursor::default(); 2];
        Packing { right, columns, strips, num_whole, fetched, packed, pace }
    }

    /// Returns the whole vectors of a line.
    #[inline(always)]
    fn line(&self, at: Cursor) -> &'a [f32] {
        let width = VECTORS * S::F32_LANES;
        &self.right.values[at.term * self.right.stride + self.columns.start + at.strip * width..][..width]
    }

    #[inline(always)]
    fn has(&self, at: Cursor) -> bool {
        at.term < self.right.rows && at.strip < self.num_whole
    }

    /// Asks for a few lines that are packed soon. This needs no vector registers.
    #[inline(always)]
    pub(super) fn fetch_some(&mut self) {
        for _ in 0..self.pace.fetched {
            if !self.has(self.fetched) {
                self.pace.fetched = 0;
                return;
            }
            fetch(self.line(self.fetched));
            self.fetched.advance(self.num_whole);
        }
    }

    /// Packs a few lines of whole strips.
    #[inline(always)]
    pub(super) fn pack_some(&mut self) {
        self.pack_lines(self.pace.packed);
    }

    #[inline(always)]
    fn pack_lines(&mut self, num: usize) {
        for _ in 0..num {
            if !self.has(self.packed) {
                self.pace.packed = 0;
                return;
            }
            let line = S::as_simd_f32s(self.line(self.packed)).0;
            let strip = &mut self.strips[self.packed.strip * self.right.rows + self.packed.term];
            strip.iter_mut().zip(line).for_each(|(into, vector)| *into = *vector);
            self.packed.advance(self.num_whole);
        }
    }

    /// Packs all that is left.
    #[inline(always)]
    pub(super) fn finish(mut self, simd: S) {
        if self.right.transposed {
            return self.interleave();
        }
        self.pack_lines(usize::MAX);
        let start = self.columns.start + self.num_whole * VECTORS * S::F32_LANES;
        if start < self.columns.end {
            let strip = &mut self.strips[self.num_whole * self.right.rows..];
            for (term, packed) in strip.iter_mut().enumerate().take(self.right.rows) {
                let line = &self.right.values[term * self.right.stride..][start..self.columns.end];
                let (whole, rest) = S::as_simd_f32s(line);
                packed[..whole.len()].copy_from_slice(whole);
                packed[whole.len()] = simd.partial_load_f32s(rest);
            }
        }
    }

    #[inline(always)]
    fn interleave(&mut self) {
        let width = VECTORS * S::F32_LANES;
        let Matrix { values, rows: num_terms, stride, .. } = self.right;
        for (strip, first) in self.columns.clone().step_by(width).enumerate() {
            let num_lines = width.min(self.columns.end - first);
            let strip = self.strips[strip * num_terms..][..num_terms].as_flattened_mut();
            let strip = bytemuck::cast_slice_mut(strip);
            transpose([num_lines, num_terms], &values[first * stride..], stride, strip, width);
        }
    }
}

/// The distance, in terms, at which a transposed left operand is fetched ahead: its lines are a stride apart.
const LEFT_AHEAD: usize = 24;

/// Strips of a transposed left operand that are packed together.
const STRIPS_AT_ONCE: usize = 4;

/// Packs the rows of `left`, `[strip][term][row of the strip]`. Rows past the last have
/// arbitrary elements.
#[inline(always)]
pub(super) fn pack_left<const ROWS: usize>(left: Matrix<'_>, strips: &mut [f32]) {
    let Matrix { values, rows, columns: num_terms, stride, transposed } = left;
    if !transposed {
        let strips = strips.chunks_exact_mut((ROWS * num_terms).max(1));
        for (strip, first) in strips.zip((0..rows).step_by(ROWS)) {
            let num_lines = ROWS.min(rows - first);
            transpose([num_lines, num_terms], &values[first * stride..], stride, strip, ROWS);
        }
        return;
    }
    // strips that share cache lines are written side by side
    let several = STRIPS_AT_ONCE * ROWS;
    let strips = strips.as_chunks_mut::<ROWS>().0;
    for (strips, first) in
        strips.chunks_mut((STRIPS_AT_ONCE * num_terms).max(1)).zip((0..rows).step_by(several))
    {
        let end = rows.min(first + several);
        for term in 0..num_terms {
            let line = &values[term * stride..][first..end];
            fetch_after(line, LEFT_AHEAD * stride);
            let (whole, rest) = line.as_chunks::<ROWS>();
            for (strip, factors) in whole.iter().enumerate() {
                strips[strip * num_terms + term] = *factors;
            }
            if !rest.is_empty() {
                strips[whole.len() * num_terms + term][..rest.len()].copy_from_slice(rest);
            }
        }
    }
}
