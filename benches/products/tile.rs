//! The micro-kernel: one tile of a product, in registers.
//!
//! Each element of the tile is a canonical sum (see `leaves.rs`): a chain of fused
//! multiply-adds for each leaf of the inner dimension, and a tree over the leaves. The partial
//! tiles of the tree are on a stack of a few kilobytes in the first cache, so that a tree costs no
//! passes over memory. No element depends on its place in the tile or on the width of vectors.

use pulp::Simd;

use crate::ahead::{Ahead, fetch_run};
use crate::leaves::{Leaves, MOST_PENDING};

/// Vectors in a row of a tile, and of a strip of the right operand.
pub const VECTORS: usize = 3;

/// Terms that a step of a loop adds, one after the other.
const AT_ONCE: usize = 4;

/// A tile of `ROWS` rows of `WIDTH` vectors.
type Tile<S, const ROWS: usize, const WIDTH: usize> = [[<S as Simd>::f32s; WIDTH]; ROWS];

/// Partial tiles, aligned as vectors are read fastest.
#[repr(align(64))]
pub struct Stack<S: Simd, const ROWS: usize>([Tile<S, ROWS, VECTORS>; MOST_PENDING]);

impl<S: Simd, const ROWS: usize> Stack<S, ROWS> {
    #[inline(always)]
    pub fn new(simd: S) -> Stack<S, ROWS> {
        Stack([[[simd.splat_f32s(0.0); VECTORS]; ROWS]; MOST_PENDING])
    }
}

/// Returns the chains of a tile over consecutive terms, and fetches lines of `ahead` meanwhile.
#[inline(always)]
fn chains<S: Simd, const ROWS: usize, const WIDTH: usize>(
    simd: S,
    left: &[[f32; ROWS]],
    right: &[[S::f32s; VECTORS]],
    ahead: &mut Ahead<'_>,
) -> Tile<S, ROWS, WIDTH> {
    let mut sums = [[simd.splat_f32s(0.0); WIDTH]; ROWS];
    let (left, left_rest) = left.as_chunks::<AT_ONCE>();
    let (right, right_rest) = right.as_chunks::<AT_ONCE>();
    for (left, right) in left.iter().zip(right) {
        ahead.fetch();
        ahead.fetch();
        for term in 0..AT_ONCE {
            add_product(simd, &left[term], &right[term], &mut sums);
        }
    }
    for (left, right) in left_rest.iter().zip(right_rest) {
        add_product(simd, left, right, &mut sums);
    }
    sums
}

/// Adds the products of one term to the sums of a tile.
#[inline(always)]
fn add_product<S: Simd, const ROWS: usize, const WIDTH: usize>(
    simd: S,
    left: &[f32; ROWS],
    right: &[S::f32s; VECTORS],
    sums: &mut Tile<S, ROWS, WIDTH>,
) {
    for (left, sums) in left.iter().zip(sums) {
        let left = simd.splat_f32s(*left);
        for (right, sum) in right.iter().zip(sums) {
            *sum = simd.mul_add_f32s(left, *right, *sum);
        }
    }
}

/// Adds another tile to `sums`.
#[inline(always)]
fn add_tile<S: Simd, const ROWS: usize, const WIDTH: usize>(
    simd: S,
    other: &Tile<S, ROWS, VECTORS>,
    sums: &mut Tile<S, ROWS, WIDTH>,
) {
    for (other, sums) in other.iter().zip(sums) {
        for (other, sum) in other.iter().zip(sums) {
            *sum = simd.add_f32s(*other, *sum);
        }
    }
}

/// The section of a product that a tile is written to: `height` rows, `stride` apart, of `width`
/// elements.
pub struct Target<'a> {
    pub values: &'a mut [f32],
    pub stride: usize,
    pub height: usize,
    pub width: usize,
}

/// Computes a tile of `WIDTH` vectors from a strip of each operand, and writes what `target` has
/// room for.
#[inline(always)]
pub fn multiply<S: Simd, const ROWS: usize, const WIDTH: usize>(
    simd: S,
    leaves: Leaves,
    left: &[[f32; ROWS]],
    right: &[[S::f32s; VECTORS]],
    stack: &mut Stack<S, ROWS>,
    ahead: &mut Ahead<'_>,
    target: Target<'_>,
) {
    // written at the end, perhaps to lines that are in no cache
    for row in 0..target.height {
        fetch_run(&target.values[row * target.stride..][..target.width]);
    }
    let mut depth = 0;
    let mut result = [[simd.splat_f32s(0.0); WIDTH]; ROWS];
    for leaf in 0..leaves.num {
        let terms = leaves.terms(leaf);
        let mut sums: Tile<S, ROWS, WIDTH> = chains(simd, &left[terms.clone()], &right[terms], ahead);
        for _ in 0..leaves.num_merges(leaf) {
            depth -= 1;
            add_tile(simd, &stack.0[depth], &mut sums);
        }
        if leaf + 1 == leaves.num {
            result = sums;
        } else {
            for (pushed, sums) in stack.0[depth].iter_mut().zip(&sums) {
                pushed[..WIDTH].copy_from_slice(sums);
            }
            depth += 1;
        }
    }
    store(simd, &result, target);
}

#[inline(always)]
fn store<S: Simd, const ROWS: usize, const WIDTH: usize>(
    simd: S,
    tile: &Tile<S, ROWS, WIDTH>,
    target: Target<'_>,
) {
    let Target { values, stride, height, width } = target;
    for (row, sums) in tile.iter().enumerate().take(height) {
        let (whole, rest) = S::as_mut_simd_f32s(&mut values[row * stride..][..width]);
        for (v, sum) in sums.iter().enumerate() {
            if let Some(vector) = whole.get_mut(v) {
                *vector = *sum;
            } else if v == whole.len() {
                simd.partial_store_f32s(rest, *sum);
            }
        }
    }
}
