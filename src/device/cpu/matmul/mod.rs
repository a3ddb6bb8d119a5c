//! Matrix products in a canonical order: an element has the same bits whatever its place in the
//! product, the number of rows, columns and threads, and the width of vectors.
//!
//! The left operand is read where it is; a transposed one is packed into strips of as many rows as a tile
//! has, by the first tile that reads them. The right operand is packed into strips as wide as a tile, a
//! panel of columns at a time: while a panel is multiplied, the next one is packed little by little, so that
//! the memory is read meanwhile. `tile.rs` multiplies a strip with a strip, over the whole inner dimension.
//! This is the algorithm of Goto & van de Geijn, "Anatomy of high-performance matrix multiplication", TOMS
//! 2008, without its cut of the inner dimension: a panel is the narrower the longer its columns are.
//!
//! A product of few rows with a transposed operand is formed as the transpose of the product of the
//! transposes: its large operand is then read where it is. So is a product whose transposed left operand is
//! large and larger than the right one, because panels are packed in less time.

mod operand;
mod pack;
mod panel;
#[cfg(test)]
mod tests;
mod tile;

use std::cell::{Cell, RefCell};

use pulp::{Simd, WithSimd};
use smallvec::SmallVec;

use super::Cpu;
use super::cache::l2_cache_bytes;
use super::leaf_sums::SumArrays;
use super::loops::LONG_PASS;
use super::transpose::transpose;
use crate::memory::scratch::Room;
use crate::sums::{MOST_LEAVES, MOST_PENDING, Section, Step};
use operand::{Columns, PackedColumns, PackedLeft, PackedRows, holds};
pub(super) use operand::{LeftStrip, Lines, Matrix};
use pack::{Pace, Packing, pack_left};
use panel::Panel;
use tile::{SumOrder, Target, stack_len};

/// The share of a core's L2 cache that a panel takes. The next panel takes as much; the rest is for the
/// rows of the left operand and of the product.
const PANEL_SHARE: [usize; 2] = [5, 16];

/// Blocks for which lines of the next panel are fetched before the first tile, so that they are in
/// the cache when they are packed.
const FETCHED_BEFORE: usize = 2;

/// Above this many elements, a right operand is read where it is if one tile has all rows: 9 to 16 with 32
/// vector registers, up to 8 with fewer. Otherwise it is packed.
const LARGE: usize = 1 << 16;

/// Up to this many rows for each thread, a product with a large transposed operand is formed as its
/// transpose.
const MAX_FEW_ROWS: usize = 128;

/// A transposed operand has to have this many terms for that, besides being large.
const MANY_TERMS: usize = 256;

/// A product whose transposed left operand has more elements, and more rows than the right one has columns,
/// is formed as its transpose: to pack the larger operand in panels takes less time.
const LARGE_LEFT: usize = if cfg!(test) { 1 << 12 } else { 1 << 20 };

/// Each thread has to have as many rows of that transpose, because all pack the larger operand.
const FEWEST_ROWS: usize = if cfg!(test) { 16 } else { 128 };

/// The most bytes of a packed left operand, and of a transposed product: larger ones are formed in parts, so
/// that a thread's memory does not grow with the rows of a batch or with a vocabulary.
const MOST_SCRATCH_BYTES: usize = if cfg!(test) { 64 << 10 } else { 64 << 20 };

/// Memory of a thread for packed operands.
struct Packed {
    left: Room,
    right: Room,
    stack: Room,
}

impl Packed {
    const fn new() -> Packed {
        Packed { left: Room::new(), right: Room::new(), stack: Room::new() }
    }
}

thread_local! {
    static PACKED: RefCell<Packed> = const { RefCell::new(Packed::new()) };
    static TRANSPOSED_PRODUCT: RefCell<Room> = const { RefCell::new(Room::new()) };
}

impl Cpu {
    /// Computes `left · right`, `[left.rows, right.columns]`, from `terms` of canonical sums. The first
    /// leaf of a column begins with its element of `bias`, if there is one. `products` holds an array
    /// for each value that the terms leave on the stack.
    pub(super) fn multiply(
        &self,
        left: Matrix<'_>,
        right: Matrix<'_>,
        terms: Section,
        bias: Option<&[f32]>,
        products: &mut [f32],
    ) {
        let (m, n) = (left.rows, right.columns);
        if m * n == 0 {
            return;
        }
        let terms = if bias.is_some() { terms.with_start() } else { terms };
        if self.gains_by_transposing(left, right) {
            return self.multiply_transposed(left, right, terms, bias, products);
        }
        if let Some(bias) = bias {
            let part = if m * n < LONG_PASS { m } else { self.rows_per_thread(m) } * n;
            self.for_each(products[..m * n].chunks_mut(part), |rows| {
                rows.chunks_exact_mut(n).for_each(|row| row.copy_from_slice(bias));
            });
        }
        let mut products: SumArrays<'_> = products.chunks_exact_mut(m * n).collect();
        self.multiply_rows(left, right, terms, &mut products);
    }

    /// Returns true if a product takes less time as the transpose of the product of the transposes.
    fn gains_by_transposing(&self, left: Matrix<'_>, right: Matrix<'_>) -> bool {
        let (m, n, k) = (left.rows, right.columns, left.columns);
        match (left.transposed, right.transposed) {
            (false, true) => {
                let is_large = n * k > LARGE && k >= MANY_TERMS;
                let has_few_rows = is_large && m / self.threads <= MAX_FEW_ROWS;
                // threads divide the rows of a product
                let has_less_rows_than_threads = self.threads > 1 && m < 8 * self.threads && n > m;
                has_few_rows || has_less_rows_than_threads
            }
            (true, false) => {
                // with fewer terms, it would take longer to transpose the product than to pack the operand
                let is_shorter_transposed = m > n && m * k > LARGE_LEFT && k >= n;
                let fits = m * n * size_of::<f32>() <= MOST_SCRATCH_BYTES;
                is_shorter_transposed && n / self.threads >= FEWEST_ROWS && fits
            }
            _ => false,
        }
    }

    /// Computes a product as the transpose of that of the transposes, some columns at a time.
    fn multiply_transposed(
        &self,
        left: Matrix<'_>,
        right: Matrix<'_>,
        terms: Section,
        bias: Option<&[f32]>,
        products: &mut [f32],
    ) {
        let (m, n) = (left.rows, right.columns);
        let num_arrays = products.len() / (m * n);
        let most = (MOST_SCRATCH_BYTES / (num_arrays * m * size_of::<f32>()).max(1)).clamp(1, n);
        TRANSPOSED_PRODUCT.with_borrow_mut(|room| {
            for first in (0..n).step_by(most) {
                let columns = first..n.min(first + most);
                let len = columns.len() * m;
                let transposed = room.elements(num_arrays * len);
                if let Some(bias) = bias {
                    let rows = transposed[..len].chunks_exact_mut(m).zip(&bias[columns.clone()]);
                    rows.for_each(|(row, bias)| row.fill(*bias));
                }
                let mut arrays: SumArrays<'_> = transposed.chunks_exact_mut(len).collect();
                let rows = right.transpose().rows(columns.clone());
                self.multiply_rows(rows, left.transpose(), terms, &mut arrays);
                for (transposed, product) in arrays.iter().zip(products.chunks_exact_mut(m * n)) {
                    let part = self.rows_per_thread(m);
                    self.for_each(product.chunks_mut(part * n).enumerate(), |(number, product)| {
                        let (size, from) = ([columns.len(), product.len() / n], &transposed[number * part..]);
                        self.vectorised(
                            #[inline(always)]
                            || transpose(size, from, m, &mut product[first..], n),
                        );
                    });
                }
            }
        });
    }

    /// Adds the `terms` of `left · right`, `[left.rows, right.columns]`, to the values on a stack
    /// of products, the lowest of which is the first of `targets`.
    pub(super) fn multiply_section(
        &self,
        left: Matrix<'_>,
        right: Matrix<'_>,
        terms: Section,
        targets: &mut [&mut [f32]],
    ) {
        let is_whole = terms.depth_before() == 0 && terms.depth_after() == 1;
        let len = left.rows * right.columns;
        if len > 0 && is_whole && self.gains_by_transposing(left, right) {
            return self.multiply_transposed(left, right, terms, None, &mut targets[0][..len]);
        }
        self.multiply_rows(left, right, terms, targets);
    }

    /// Adds terms of a product to the values on a stack. Threads divide its rows.
    fn multiply_rows(&self, left: Matrix<'_>, right: Matrix<'_>, terms: Section, targets: &mut [&mut [f32]]) {
        let (m, n, k) = (left.rows, right.columns, left.columns);
        assert!(right.rows == k && terms.len() == k, "inner lengths of a product");
        for target in &mut *targets {
            assert!(holds(target, m, n), "a {m} × {n} product in {} elements", target.len());
        }
        assert!(targets.len() >= terms.depth_before().max(terms.depth_after()), "products of a stack");
        let steps: SmallVec<[Step; 32]> = terms.steps().collect();
        assert!(steps.len() <= MOST_LEAVES, "a sum has at most {MOST_LEAVES} leaves");
        if steps.is_empty() {
            return;
        }
        let order = SumOrder::new(&steps, terms);
        let tile_rows = self.arch.dispatch(TileRows);
        let rows_per_thread = m.div_ceil(self.threads).next_multiple_of(tile_rows).max(tile_rows);
        let most_packed = (MOST_SCRATCH_BYTES / (size_of::<f32>() * k.max(1)) / tile_rows).max(1) * tile_rows;
        let rows_per_part = if left.transposed { rows_per_thread.min(most_packed) } else { rows_per_thread };
        let mut rests: [&mut [f32]; MOST_PENDING] = std::array::from_fn(|_| &mut [] as &mut [f32]);
        rests.iter_mut().zip(targets).for_each(|(rest, target)| *rest = &mut target[..m * n]);
        let parts = (0..m).step_by(rows_per_part).map(|first| {
            let rows = first..m.min(first + rows_per_part);
            let part = rests.each_mut().map(|rest| {
                let len = rest.len().min(rows.len() * n);
                rest.split_off_mut(..len).expect("the length is at most all")
            });
            (rows, part)
        });
        self.for_each(parts, |(rows, mut targets)| {
            PACKED.with_borrow_mut(|packed| {
                let left = left.rows(rows);
                self.arch.dispatch(ThreadProduct { left, right, order, targets: &mut targets, packed });
            });
        });
    }
}

/// Rows of a tile with long leaves, where there are 16 vector registers and where there are 32.
const TILE_ROWS: [usize; 2] = [6, 8];

/// Asks for the rows of a tile with long leaves.
struct TileRows;

impl WithSimd for TileRows {
    type Output = usize;

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> usize {
        TILE_ROWS[usize::from(S::REGISTER_COUNT >= 32)]
    }
}

/// A product on one thread.
struct ThreadProduct<'a, 'b> {
    left: Matrix<'a>,
    right: Matrix<'a>,
    order: SumOrder<'a>,
    targets: &'a mut [&'b mut [f32]],
    packed: &'a mut Packed,
}

impl WithSimd for ThreadProduct<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Matrix { rows, columns, transposed, .. } = self.right;
        let in_place = !transposed && rows * columns > LARGE && columns >= S::F32_LANES;
        // the sums of a tile fit the registers, beside a row of the right operand and a factor of the left
        match (S::REGISTER_COUNT >= 32, self.left.rows) {
            (true, 9..=16) if in_place => self.multiply_in_place::<S, 16>(simd),
            (false, ..=8) if in_place => self.multiply_in_place::<S, 8>(simd),
            (true, _) if self.order.has_short_leaves() => self.multiply::<S, 4, 3, true>(simd),
            (true, _) => self.multiply::<S, { TILE_ROWS[1] }, 3, false>(simd),
            (false, _) => self.multiply::<S, { TILE_ROWS[0] }, 2, false>(simd),
        }
    }
}

impl ThreadProduct<'_, '_> {
    /// Multiplies no more than `ROWS` rows with a matrix that is read where it is, but for the
    /// columns after its last whole vector.
    #[inline(always)]
    fn multiply_in_place<S: Simd, const ROWS: usize>(self, simd: S) {
        let ThreadProduct { left, right, order, targets, packed } = self;
        let (height, stride, k) = (left.rows, right.columns, left.columns);
        let rows = packed.left.elements(ROWS * k);
        pack_left::<ROWS>(left, rows);
        let left = PackedLeft(as_cells::<ROWS>(rows));
        let stack = packed.stack.elements(stack_len::<S>(ROWS, 1));
        let last = packed.right.elements(k * S::F32_LANES);
        let last = S::as_mut_simd_f32s(last).0.as_chunks_mut::<1>().0;
        let num_whole = right.columns / S::F32_LANES * S::F32_LANES;
        Packing::new(right, num_whole..right.columns, last, Pace::default()).finish(simd);
        let mut nothing = Packing::new(right, 0..0, &mut [], Pace::default());
        for at in (0..right.columns).step_by(S::F32_LANES) {
            let width = S::F32_LANES.min(right.columns - at);
            let target = Target { targets: &mut *targets, at, stride, height, width };
            let (stack, next) = (&mut *stack, &mut nothing);
            if width == S::F32_LANES {
                let right = Columns { values: &right.values[at..], stride: right.stride };
                tile::multiply::<S, _, _, ROWS, 1, 1, false>(simd, order, left, right, stack, next, target);
            } else {
                let right = PackedColumns::<S, 1>(last);
                tile::multiply::<S, _, _, ROWS, 1, 1, false>(simd, order, left, right, stack, next, target);
            }
        }
    }

    /// Multiplies by tiles of `ROWS` rows of `VECTORS` vectors, two or three.
    #[inline(always)]
    fn multiply<S: Simd, const ROWS: usize, const VECTORS: usize, const PAIRS: bool>(self, simd: S) {
        let ThreadProduct { left, right, order, targets, packed } = self;
        let (m, n, k) = (left.rows, right.columns, left.columns);
        let strip_width = VECTORS * S::F32_LANES;
        let strip_bytes = strip_width * k.max(1) * size_of::<f32>();
        let cache_bytes = if cfg!(test) { 256 << 10 } else { l2_cache_bytes() };
        let panel_bytes = cache_bytes * PANEL_SHARE[0] / PANEL_SHARE[1];
        let panel_width = (panel_bytes / strip_bytes).max(1) * strip_width;
        let rows = packed.left.elements(if left.transposed { m.next_multiple_of(ROWS) * k } else { 0 });
        // tiles pack whole strips, if there is a whole strip of the right operand for the first of them
        let num_packed_by_tiles = if n >= strip_width { m / ROWS * ROWS } else { 0 };
        if left.transposed {
            pack_left::<ROWS>(left.rows(num_packed_by_tiles..m), &mut rows[num_packed_by_tiles * k..]);
        }
        let rows = as_cells::<ROWS>(rows);
        let stack = packed.stack.elements(stack_len::<S>(ROWS, VECTORS));
        let len = panel_width.min(n.next_multiple_of(strip_width)) * k;
        let strips = S::as_mut_simd_f32s(packed.right.elements(2 * len)).0.as_chunks_mut::<VECTORS>().0;
        let (mut present, mut next) = strips.split_at_mut(len / strip_width);
        let columns = |first: usize| first.min(n)..n.min(first + panel_width);
        Packing::new(right, columns(0), present, Pace::default()).finish(simd);
        for first in (0..n).step_by(panel_width) {
            // enough lines at a time that the next panel is packed once this one is multiplied
            let next_columns = columns(first + panel_width);
            let num_lines = next_columns.len().div_ceil(strip_width) * k;
            let num_tiles = m.div_ceil(ROWS) * columns(first).len().div_ceil(strip_width);
            let pace = |num_calls: usize| num_lines.div_ceil((num_calls * num_tiles).max(1));
            let [blocks, steps] = [order.num_blocks(), order.steps.len()];
            let pace = if PAIRS {
                Pace { fetched: pace(steps / 2), packed: pace(steps / 2) }
            } else {
                Pace { fetched: pace(blocks), packed: pace(steps) }
            };
            let mut packing = Packing::new(right, next_columns, next, pace);
            (0..FETCHED_BEFORE).for_each(|_| packing.fetch_some());
            let panel = Panel {
                order,
                columns: columns(first),
                stride: n,
                num_terms: k,
                strips: present,
                targets: &mut *targets,
                stack: &mut *stack,
                next: &mut packing,
            };
            if left.transposed {
                let num_unpacked = if first == 0 { num_packed_by_tiles } else { 0 };
                let rows = PackedRows { rows: left, strips: rows, num_unpacked };
                panel.multiply::<_, ROWS, PAIRS>(simd, m, rows);
            } else {
                panel.multiply::<_, ROWS, PAIRS>(simd, m, left);
            }
            packing.finish(simd);
            std::mem::swap(&mut present, &mut next);
        }
    }
}

/// Returns elements as rows of strips that may be read and written in turns.
fn as_cells<const ROWS: usize>(elements: &mut [f32]) -> &[Cell<[f32; ROWS]>] {
    Cell::from_mut(elements.as_chunks_mut().0).as_slice_of_cells()
}
