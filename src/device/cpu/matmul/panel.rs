//! Panels of columns: the order in which the tiles of a product are computed.

use std::ops::Range;

use pulp::Simd;
use smallvec::SmallVec;

use super::operand::{LeftRows, PackedColumns};
use super::pack::Packing;
use super::tile::{self, SumOrder, Target};

/// Bytes of a strip that stays in the L1 cache for several tiles.
const SHORT_STRIP_BYTES: usize = 24 << 10;

/// Rows of the tiles that take turns with a short strip, at most.
const ROWS_OF_SHORT_STRIP: usize = 32;

/// A panel of columns of a product.
pub(super) struct Panel<'a, 'b, 'c, S: Simd, const VECTORS: usize> {
    pub(super) order: SumOrder<'a>,
    pub(super) columns: Range<usize>,
    /// Elements from a row of the product to the next.
    pub(super) stride: usize,
    pub(super) num_terms: usize,
    pub(super) strips: &'a [[S::f32s; VECTORS]],
    pub(super) targets: &'a mut [&'b mut [f32]],
    pub(super) stack: &'a mut [f32],
    /// The packing of the next panel.
    pub(super) next: &'a mut Packing<'c, S, VECTORS>,
}

impl<S: Simd, const VECTORS: usize> Panel<'_, '_, '_, S, VECTORS> {
    /// Goes along the rows of the product: written in columns of tiles, a large product takes up to
    /// 1.4 times as long. Only a short strip of the right operand is used for a few tiles in turn.
    #[inline(always)]
    pub(super) fn multiply<L: LeftRows<ROWS>, const ROWS: usize, const PAIRS: bool>(
        self,
        simd: S,
        num_rows: usize,
        rows: L,
    ) {
        let Panel { order, columns, stride, num_terms, strips, targets, stack, next } = self;
        let strip_width = VECTORS * S::F32_LANES;
        let is_short = strip_width * num_terms * size_of::<f32>() <= SHORT_STRIP_BYTES;
        let group = if is_short { ROWS_OF_SHORT_STRIP / ROWS * ROWS } else { ROWS };
        for first_row in (0..num_rows).step_by(group) {
            let own_rows = (first_row..num_rows.min(first_row + group)).step_by(ROWS);
            let lefts: SmallVec<[(usize, L::Strip); 8]> =
                own_rows.map(|row| (row, rows.strip(row))).collect();
            for (strip, column) in columns.clone().step_by(strip_width).enumerate() {
                let width = strip_width.min(columns.end - column);
                let right = PackedColumns::<S, VECTORS>(&strips[strip * num_terms..][..num_terms]);
                for &(row, left) in &lefts {
                    let (at, height) = (row * stride + column, ROWS.min(num_rows - row));
                    let target = Target { targets: &mut *targets, at, stride, height, width };
                    let (stack, next) = (&mut *stack, &mut *next);
                    if strip == 0
                        && let Some(left) = rows.first_strip(row)
                    {
                        tile::multiply::<S, _, _, ROWS, VECTORS, VECTORS, PAIRS>(
                            simd, order, left, right, stack, next, target,
                        );
                        continue;
                    }
                    match width.div_ceil(S::F32_LANES) {
                        1 => tile::multiply::<S, _, _, ROWS, 1, VECTORS, PAIRS>(
                            simd, order, left, right, stack, next, target,
                        ),
                        2 if VECTORS > 2 => tile::multiply::<S, _, _, ROWS, 2, VECTORS, PAIRS>(
                            simd, order, left, right, stack, next, target,
                        ),
                        _ => tile::multiply::<S, _, _, ROWS, VECTORS, VECTORS, PAIRS>(
                            simd, order, left, right, stack, next, target,
                        ),
                    }
                }
            }
        }
    }
}
