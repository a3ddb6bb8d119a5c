//! Matrix products in a canonical order: an element has the same bits whatever its place in the
//! product, the number of rows and columns, and the width of vectors.
//!
//! The left operand is packed into strips of as many rows as a tile has, the right one, a panel of
//! columns at a time, into strips as wide as a tile, whether they are transposed or not. `tile.rs`
//! multiplies a strip with a strip, over the whole inner dimension. This is the algorithm of Goto &
//! van de Geijn, "Anatomy of high-performance matrix multiplication", TOMS 2008, without its cut of
//! the inner dimension: a panel is the narrower the longer its columns are.

use std::ops::Range;

use phalanx::memory::Memory;
use pulp::{Simd, WithSimd};

use crate::ahead::Ahead;
use crate::leaves::Leaves;
use crate::pack::{PackRight, pack_left};
use crate::tile::{self, Stack, Target, VECTORS};

/// A row-major matrix, or the transpose of one.
#[derive(Clone, Copy)]
pub struct Matrix<'a> {
    pub values: &'a [f32],
    pub rows: usize,
    pub columns: usize,
    pub transposed: bool,
}

/// Bytes of packed columns that stay in the second cache of a core.
const PANEL_BYTES: usize = 512 << 10;

impl<'a> Matrix<'a> {
    /// Returns one element.
    pub fn element(self, row: usize, column: usize) -> f32 {
        self.values[if self.transposed { column * self.rows + row } else { row * self.columns + column }]
    }

    /// Returns the columns of each panel: whole strips that stay in the second cache.
    fn panels(self, size: TileSize) -> impl Iterator<Item = Range<usize>> {
        let strip_bytes = size.columns * self.rows * size_of::<f32>();
        let width = (PANEL_BYTES / strip_bytes).max(1) * size.columns;
        (0..self.columns).step_by(width).map(move |first| first..self.columns.min(first + width))
    }

    /// Returns the elements that packing of `num` columns from `first` on reads.
    fn read_by_packing(self, first: usize, num: usize) -> Ahead<'a> {
        let num = num.min(self.columns - first);
        if self.transposed {
            let values = &self.values[first * self.rows..][..num * self.rows];
            return Ahead::new(values, values.len(), values.len());
        }
        Ahead::new(if num > 0 { &self.values[first..] } else { &[] }, num, self.columns)
    }
}

/// The size of a tile with the processor's vectors.
#[derive(Clone, Copy)]
struct TileSize {
    rows: usize,
    columns: usize,
}

impl WithSimd for TileSize {
    type Output = TileSize;

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> TileSize {
        TileSize { rows: tile_rows::<S>(), columns: VECTORS * S::F32_LANES }
    }
}

/// Returns the rows of a tile whose sums fit the registers.
#[inline(always)]
const fn tile_rows<S: Simd>() -> usize {
    if S::REGISTER_COUNT >= 32 { 8 } else { 4 }
}

/// Multiplies matrices on one thread, with memory for packed operands.
pub struct Products {
    arch: pulp::Arch,
    left: Memory<f32>,
    right: Memory<f32>,
}

/// Returns the first `len` elements of `memory`, which grows if it is shorter.
fn room(memory: &mut Memory<f32>, len: usize) -> &mut [f32] {
    if memory.len() < len {
        *memory = Memory::zeroed(len).expect("there is memory for packed operands");
    }
    &mut memory[..len]
}

impl Products {
    /// Returns products with the vectors of `arch`.
    pub fn new(arch: pulp::Arch) -> Products {
        let [left, right] = [0, 0].map(|len| Memory::zeroed(len).expect("nothing takes no memory"));
        Products { arch, left, right }
    }

    /// Packs all of `right`, for any number of products with it.
    pub fn pack(&mut self, right: Matrix<'_>) {
        let size = self.arch.dispatch(TileSize { rows: 0, columns: 0 });
        let strips = room(&mut self.right, right.columns.next_multiple_of(size.columns) * right.rows);
        self.arch.dispatch(PackRight { right, first: 0, strips });
    }

    /// Computes `product = left · right` with the sums that `leaves` describes, and packs `right`
    /// unless it `is_packed` already.
    pub fn multiply(
        &mut self,
        leaves: Leaves,
        left: Matrix<'_>,
        right: Matrix<'_>,
        is_packed: bool,
        product: &mut [f32],
    ) {
        let (size, k) = (self.arch.dispatch(TileSize { rows: 0, columns: 0 }), leaves.len);
        assert!(left.columns == k && right.rows == k && product.len() == left.rows * right.columns);
        if k == 0 {
            return product.fill(0.0);
        }
        let strips = room(&mut self.left, left.rows.next_multiple_of(size.rows) * k);
        self.arch.dispatch(PackLeft { left, strips });
        for columns in right.panels(size) {
            let (left, stride) = (&*self.left, right.columns);
            let len = columns.len().next_multiple_of(size.columns) * k;
            let (strips, ahead) = if is_packed {
                let (strips, next) = self.right[columns.start * k..].split_at(len);
                let num = next.len().min(len);
                (strips, Ahead::new(&next[..num], num, num))
            } else {
                let strips = room(&mut self.right, len);
                self.arch.dispatch(PackRight { right, first: columns.start, strips });
                (&*strips, right.read_by_packing(columns.end, columns.len()))
            };
            self.arch.dispatch(Panel { leaves, left, right: strips, ahead, product, columns, stride });
        }
    }
}

/// Packs all rows of the left operand.
struct PackLeft<'a> {
    left: Matrix<'a>,
    strips: &'a mut [f32],
}

impl WithSimd for PackLeft<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        match tile_rows::<S>() {
            8 => pack_left::<8>(self.left, self.strips),
            _ => pack_left::<4>(self.left, self.strips),
        }
    }
}

/// The product of the packed left operand with a packed panel of the right one.
struct Panel<'a> {
    leaves: Leaves,
    left: &'a [f32],
    right: &'a [f32],
    /// Read after this.
    ahead: Ahead<'a>,
    product: &'a mut [f32],
    /// The columns of the product.
    columns: Range<usize>,
    /// Elements from a row of the product to the next.
    stride: usize,
}

impl WithSimd for Panel<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        match tile_rows::<S>() {
            8 => self.multiply::<S, 8>(simd),
            _ => self.multiply::<S, 4>(simd),
        }
    }
}

impl Panel<'_> {
    /// Goes along the rows of the product: written in columns of tiles, a large product takes up to
    /// 1.4 times as long.
    #[inline(always)]
    fn multiply<S: Simd, const ROWS: usize>(self, simd: S) {
        let Panel { leaves, left, right, mut ahead, product, columns, stride } = self;
        let k = leaves.len;
        let mut stack = Stack::<S, ROWS>::new(simd);
        let left = left.as_chunks::<ROWS>().0;
        let right = S::as_simd_f32s(right).0.as_chunks::<VECTORS>().0;
        for (rows, left) in product.chunks_mut(ROWS * stride).zip(left.chunks_exact(k)) {
            let height = rows.len() / stride;
            for (strip, right) in right.chunks_exact(k).enumerate() {
                let column = columns.start + strip * VECTORS * S::F32_LANES;
                let width = (VECTORS * S::F32_LANES).min(columns.end - column);
                let target = Target { values: &mut rows[column..], stride, height, width };
                let stack = &mut stack;
                let ahead = &mut ahead;
                match width.div_ceil(S::F32_LANES) {
                    1 => tile::multiply::<S, ROWS, 1>(simd, leaves, left, right, stack, ahead, target),
                    2 => tile::multiply::<S, ROWS, 2>(simd, leaves, left, right, stack, ahead, target),
                    _ => tile::multiply::<S, ROWS, VECTORS>(simd, leaves, left, right, stack, ahead, target),
                }
            }
        }
    }
}
