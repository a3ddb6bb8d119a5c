//! The operands of a product: matrices, and the strips of them that a tile reads, packed or where
//! they are.

use std::cell::Cell;
use std::ops::Range;

use pulp::Simd;

use crate::device::cpu::fetch::{fetch_after, fetch_near};

/// A row-major matrix, or the transpose of one.
#[derive(Clone, Copy)]
pub(in crate::device::cpu) struct Matrix<'a> {
    pub(super) values: &'a [f32],
    pub(super) rows: usize,
    pub(super) columns: usize,
    /// Elements from a row of `values` to the next.
    pub(super) stride: usize,
    pub(super) transposed: bool,
}

impl<'a> Matrix<'a> {
    /// Returns `values` as `[rows, columns]`.
    pub(in crate::device::cpu) fn new(values: &'a [f32], rows: usize, columns: usize) -> Matrix<'a> {
        assert!(holds(values, rows, columns), "a {rows} × {columns} matrix in {} elements", values.len());
        Matrix { values, rows, columns, stride: columns, transposed: false }
    }

    /// Returns the transpose, `[rows, columns]`, of `values` as `[columns, rows]`.
    pub(in crate::device::cpu) fn transposed(values: &'a [f32], rows: usize, columns: usize) -> Matrix<'a> {
        Matrix::new(values, columns, rows).transpose()
    }

    pub(super) fn transpose(self) -> Matrix<'a> {
        Matrix { rows: self.columns, columns: self.rows, transposed: !self.transposed, ..self }
    }

    pub(super) fn rows(self, rows: Range<usize>) -> Matrix<'a> {
        let start = rows.start * if self.transposed { 1 } else { self.stride };
        Matrix { values: self.values.get(start..).unwrap_or_default(), rows: rows.len(), ..self }
    }
}

/// Returns true if `values` are enough for a matrix of `rows × columns`, where `rows · columns`
/// may overflow.
pub(super) fn holds(values: &[f32], rows: usize, columns: usize) -> bool {
    rows.checked_mul(columns).is_some_and(|len| values.len() >= len)
}

/// The rows of the left operand.
pub(super) trait LeftRows<const ROWS: usize>: Copy {
    /// Some of its rows.
    type Strip: LeftStrip<ROWS>;

    /// Some of its rows, for the first tile that reads them.
    type FirstStrip: LeftStrip<ROWS>;

    /// Returns `ROWS` rows from `first` on, with arbitrary ones past the last.
    fn strip(self, first: usize) -> Self::Strip;

    /// Returns `ROWS` rows from `first` on for the first tile, if they are not yet where others read them.
    fn first_strip(self, first: usize) -> Option<Self::FirstStrip>;
}

/// The factors of `ROWS` rows of the left operand.
pub(in crate::device::cpu) trait LeftStrip<const ROWS: usize>: Copy {
    /// Returns the terms `first..end`.
    fn part(self, first: usize, end: usize) -> Self;

    /// Returns one factor.
    fn factor(self, term: usize, row: usize) -> f32;

    /// Packs the factors of a term, if they are packed while they are read.
    #[inline(always)]
    fn pack(self, _term: usize) {}
}

impl<'a, const ROWS: usize> LeftRows<ROWS> for Matrix<'a> {
    type Strip = Lines<'a, ROWS>;
    type FirstStrip = Lines<'a, ROWS>;

    #[inline(always)]
    fn strip(self, first: usize) -> Lines<'a, ROWS> {
        let line = |row: usize| &self.values[row.min(self.rows - 1) * self.stride..][..self.columns];
        Lines(std::array::from_fn(|row| line(first + row)))
    }

    #[inline(always)]
    fn first_strip(self, _: usize) -> Option<Lines<'a, ROWS>> {
        None
    }
}

/// The rows of a transposed matrix, `[strip][term][row of the strip]`, which the first tile of a strip packs.
#[derive(Clone, Copy)]
pub(super) struct PackedRows<'a, const ROWS: usize> {
    pub(super) rows: Matrix<'a>,
    pub(super) strips: &'a [Cell<[f32; ROWS]>],
    /// The number of rows, from the first on, that are still to be packed by their first tile.
    pub(super) num_unpacked: usize,
}

impl<'a, const ROWS: usize> LeftRows<ROWS> for PackedRows<'a, ROWS> {
    type Strip = PackedLeft<'a, ROWS>;
    type FirstStrip = LeftToPack<'a, ROWS>;

    #[inline(always)]
    fn strip(self, first: usize) -> PackedLeft<'a, ROWS> {
        let num_terms = self.rows.columns;
        PackedLeft(&self.strips[first / ROWS * num_terms..][..num_terms])
    }

    #[inline(always)]
    fn first_strip(self, first: usize) -> Option<LeftToPack<'a, ROWS>> {
        let Matrix { values, stride, .. } = self.rows;
        let PackedLeft(packed) = self.strip(first);
        // there may be no terms
        let values = values.get(first..).unwrap_or_default();
        (first < self.num_unpacked).then_some(LeftToPack { values, stride, packed })
    }
}

/// The distance, in terms, at which rows to pack are fetched into the L1 cache. Lines a power of two apart
/// have few places there: at a greater distance, they would displace each other.
const NEXT_TO_PACK: usize = 8;

/// Rows of a transposed matrix where they are, which are packed while they are read: the loads and stores
/// for that take no time from the multiply-adds.
#[derive(Clone, Copy)]
pub(super) struct LeftToPack<'a, const ROWS: usize> {
    values: &'a [f32],
    stride: usize,
    packed: &'a [Cell<[f32; ROWS]>],
}

impl<const ROWS: usize> LeftToPack<'_, ROWS> {
    #[inline(always)]
    fn factors(&self, term: usize) -> &[f32; ROWS] {
        &self.values[term * self.stride..].as_chunks().0[0]
    }
}

impl<const ROWS: usize> LeftStrip<ROWS> for LeftToPack<'_, ROWS> {
    #[inline(always)]
    fn part(self, first: usize, end: usize) -> Self {
        // a leaf after the last term is empty
        let values = self.values.get(first * self.stride..).unwrap_or_default();
        LeftToPack { values, packed: &self.packed[first..end], ..self }
    }

    #[inline(always)]
    fn factor(self, term: usize, row: usize) -> f32 {
        self.factors(term)[row]
    }

    #[inline(always)]
    fn pack(self, term: usize) {
        let factors = self.factors(term);
        // one line: another tile fetches that in which these rows may end
        fetch_near(factors.as_ptr().wrapping_add(NEXT_TO_PACK * self.stride), 1);
        self.packed[term].set(*factors);
    }
}

/// `[term][row of the strip]`.
#[derive(Clone, Copy)]
pub(super) struct PackedLeft<'a, const ROWS: usize>(pub(super) &'a [Cell<[f32; ROWS]>]);

impl<const ROWS: usize> LeftStrip<ROWS> for PackedLeft<'_, ROWS> {
    #[inline(always)]
    fn part(self, first: usize, end: usize) -> Self {
        PackedLeft(&self.0[first..end])
    }

    #[inline(always)]
    fn factor(self, term: usize, row: usize) -> f32 {
        self.0[term].get()[row]
    }
}

/// Rows where they are, of consecutive terms.
#[derive(Clone, Copy)]
pub(in crate::device::cpu) struct Lines<'a, const ROWS: usize>(pub(in crate::device::cpu) [&'a [f32]; ROWS]);

impl<const ROWS: usize> LeftStrip<ROWS> for Lines<'_, ROWS> {
    #[inline(always)]
    fn part(self, first: usize, end: usize) -> Self {
        let mut lines = self.0;
        for line in &mut lines {
            *line = &line[first..end];
        }
        Lines(lines)
    }

    #[inline(always)]
    fn factor(self, term: usize, row: usize) -> f32 {
        self.0[row][term]
    }
}

/// `WIDTH` vectors of columns of the right operand.
pub(super) trait RightStrip<S: Simd, const WIDTH: usize>: Copy {
    /// Returns the terms `first..end`.
    fn part(self, first: usize, end: usize) -> Self;

    /// Returns the columns of a term.
    fn vectors(self, term: usize) -> [S::f32s; WIDTH];

    /// Asks for the columns of a term that is used soon after `term`.
    fn fetch_ahead(self, term: usize);
}

/// `[term][column of the strip]`, of which the first are read.
#[derive(Clone, Copy)]
pub(super) struct PackedColumns<'a, S: Simd, const VECTORS: usize>(pub(super) &'a [[S::f32s; VECTORS]]);

impl<S: Simd, const VECTORS: usize, const WIDTH: usize> RightStrip<S, WIDTH>
    for PackedColumns<'_, S, VECTORS>
{
    #[inline(always)]
    fn part(self, first: usize, end: usize) -> Self {
        PackedColumns(&self.0[first..end])
    }

    #[inline(always)]
    fn vectors(self, term: usize) -> [S::f32s; WIDTH] {
        let vectors = &self.0[term];
        std::array::from_fn(|v| vectors[v])
    }

    #[inline(always)]
    fn fetch_ahead(self, term: usize) {
        let vectors = std::ptr::from_ref(&self.0[term]).wrapping_add(PACKED_AHEAD);
        fetch_near(vectors.cast(), WIDTH * S::F32_LANES);
    }
}

/// The distance, in terms, at which a strip is fetched ahead from the L2 cache: the processor's own
/// prefetcher brings some lines too late.
const PACKED_AHEAD: usize = 12;

/// The distance, in terms, at which columns are fetched ahead where they are: the processor's own prefetcher
/// does not recognise lines a stride apart.
const AHEAD: usize = 24;

/// One vector of columns where they are, `stride` elements from a term to the next.
#[derive(Clone, Copy)]
pub(super) struct Columns<'a> {
    pub(super) values: &'a [f32],
    pub(super) stride: usize,
}

impl<'a> Columns<'a> {
    /// Returns the first `len` columns of a term.
    #[inline(always)]
    fn line(self, term: usize, len: usize) -> &'a [f32] {
        &self.values[term * self.stride..][..len]
    }
}

impl<S: Simd> RightStrip<S, 1> for Columns<'_> {
    #[inline(always)]
    fn part(self, first: usize, _: usize) -> Self {
        Columns { values: &self.values[first * self.stride..], ..self }
    }

    #[inline(always)]
    fn vectors(self, term: usize) -> [S::f32s; 1] {
        [S::as_simd_f32s(self.line(term, S::F32_LANES)).0[0]]
    }

    #[inline(always)]
    fn fetch_ahead(self, term: usize) {
        fetch_after(self.line(term, S::F32_LANES), AHEAD * self.stride);
    }
}
