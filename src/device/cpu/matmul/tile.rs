//! The micro-kernel: one tile of a product, in registers.
//!
//! Each element of the tile is a canonical sum (see [`crate::sums::Section`]): a chain of fused
//! multiply-adds for each leaf of the inner dimension, and a tree over the leaves. The partial
//! tiles of the tree are on a stack of a few kilobytes in the L1 cache, so a tree costs no
//! passes over memory; only what a section leaves incomplete is in the targets. No element depends
//! on its place in the tile or on the width of vectors.

use std::ops::Range;

use pulp::Simd;

use super::operand::{LeftStrip, RightStrip};
use super::pack::Packing;
use crate::device::cpu::fetch::fetch_near;
use crate::sums::{MOST_PENDING, Section, Step};

/// A tile of `ROWS` rows of `WIDTH` vectors.
type Sums<S, const ROWS: usize, const WIDTH: usize> = [[<S as Simd>::f32s; WIDTH]; ROWS];

/// Returns the elements of a stack of tiles of `rows` rows of `vectors` vectors.
pub(super) fn stack_len<S: Simd>(rows: usize, vectors: usize) -> usize {
    MOST_PENDING * rows * vectors * S::F32_LANES
}

/// The leaves of a product's inner dimension.
#[derive(Clone, Copy)]
pub(super) struct SumOrder<'a> {
    pub(super) steps: &'a [Step],
    /// The values on the stack before the first step, which are in the targets.
    pub(super) depth: usize,
    /// The first of the targets that are read or written, and the one after the last.
    pub(super) used: [usize; 2],
}

impl<'a> SumOrder<'a> {
    /// Returns the order of `terms`, whose steps are `steps`.
    pub(super) fn new(steps: &'a [Step], terms: Section) -> SumOrder<'a> {
        let (before, after) = (terms.depth_before(), terms.depth_after());
        let depths = steps.iter().scan(before, |depth, step| {
            *depth = *depth + usize::from(!step.continues) - step.num_merges;
            Some(*depth - 1)
        });
        SumOrder { steps, depth: before, used: [depths.min().unwrap_or_default(), before.max(after)] }
    }

    /// Returns true if leaves can be formed two at a time, which pays for short ones.
    pub(super) fn has_short_leaves(self) -> bool {
        let has_partner = |pair: &[Step]| matches!(pair, [first, second] if are_partners(first, second));
        self.steps.chunks(2).all(has_partner) && self.steps[0].end - self.steps[0].first <= SHORT_LEAF
    }

    /// Returns the number of blocks of a tile.
    pub(super) fn num_blocks(self) -> usize {
        self.steps.iter().map(|step| (step.end - step.first).div_ceil(BLOCK)).sum()
    }
}

/// The part of a product that a tile is written to: `height` rows, `stride` apart, of `width`
/// elements from `at` on.
pub(super) struct Target<'a, 'b> {
    /// A product for each value on the stack.
    pub(super) targets: &'a mut [&'b mut [f32]],
    pub(super) at: usize,
    pub(super) stride: usize,
    pub(super) height: usize,
    pub(super) width: usize,
}

impl Target<'_, '_> {
    /// Asks for the lines of the targets that `order` reads and writes. Between two tiles nothing else is
    /// calculated, so this has to be short: it checks no lengths.
    #[inline(always)]
    fn fetch<S: Simd, const ROWS: usize, const WIDTH: usize>(&self, order: SumOrder<'_>) {
        let [first, end] = order.used;
        for target in &self.targets[first..end] {
            let tile = target.as_ptr().wrapping_add(self.at);
            for row in 0..ROWS {
                fetch_near(tile.wrapping_add(row * self.stride), WIDTH * S::F32_LANES);
            }
        }
    }

    /// Returns true if a tile of `WIDTH` vectors is written whole.
    #[inline(always)]
    fn is_whole<S: Simd, const ROWS: usize, const WIDTH: usize>(&self) -> bool {
        self.height == ROWS && self.width == WIDTH * S::F32_LANES
    }

    /// Returns a row of a target as vectors, and the elements after the last whole one.
    #[inline(always)]
    fn line<S: Simd>(&mut self, target: usize, row: usize, width: usize) -> (&mut [S::f32s], &mut [f32]) {
        S::as_mut_simd_f32s(&mut self.targets[target][self.at + row * self.stride..][..width])
    }

    /// Reads the tile of a target.
    #[inline(always)]
    fn load<S: Simd, const ROWS: usize, const WIDTH: usize>(
        &mut self,
        simd: S,
        target: usize,
        tile: &mut Sums<S, ROWS, WIDTH>,
    ) {
        if self.is_whole::<S, ROWS, WIDTH>() {
            for (row, vectors) in tile.iter_mut().enumerate() {
                let line = self.line::<S>(target, row, WIDTH * S::F32_LANES).0;
                vectors.copy_from_slice(line);
            }
            return;
        }
        for (row, vectors) in tile.iter_mut().enumerate().take(self.height) {
            let (whole, rest) = self.line::<S>(target, row, self.width);
            vectors[..whole.len()].copy_from_slice(whole);
            if !rest.is_empty() {
                vectors[whole.len()] = simd.partial_load_f32s(rest);
            }
        }
    }

    /// Writes the tile of a target, all of which is there.
    #[inline(always)]
    fn store_whole<S: Simd, const ROWS: usize, const WIDTH: usize>(
        &mut self,
        target: usize,
        tile: &Sums<S, ROWS, WIDTH>,
    ) {
        for (row, sums) in tile.iter().enumerate() {
            let line = self.line::<S>(target, row, WIDTH * S::F32_LANES).0;
            for (v, sum) in sums.iter().enumerate() {
                line[v] = *sum;
            }
        }
    }

    /// Writes what there is of the tile of a target.
    #[inline(always)]
    fn store<S: Simd, const ROWS: usize, const WIDTH: usize>(
        &mut self,
        simd: S,
        target: usize,
        tile: &Sums<S, ROWS, WIDTH>,
    ) {
        for (row, sums) in tile.iter().enumerate().take(self.height) {
            let (whole, rest) = self.line::<S>(target, row, self.width);
            whole.copy_from_slice(&sums[..whole.len()]);
            if !rest.is_empty() {
                simd.partial_store_f32s(rest, sums[whole.len()]);
            }
        }
    }
}

/// The most terms of a leaf of which two are formed at a time. For longer ones, a tile of twice the rows is
/// faster, for it reads the right operand half as often.
const SHORT_LEAF: usize = 24;

/// Returns true for two leaves of one length that are added to each other before anything else.
fn are_partners(first: &Step, second: &Step) -> bool {
    first.num_merges == 0 && second.num_merges > 0 && first.end - first.first == second.end - second.first
}

/// Terms after which a few lines of the next panel are fetched.
const BLOCK: usize = 64;

/// Continues the chains of a tile over some terms.
#[inline(always)]
fn chains<S, L, R, const ROWS: usize, const WIDTH: usize, const VECTORS: usize>(
    simd: S,
    terms: Range<usize>,
    left: L,
    right: R,
    next: &mut Packing<'_, S, VECTORS>,
    sums: &mut Sums<S, ROWS, WIDTH>,
) where
    S: Simd,
    L: LeftStrip<ROWS>,
    R: RightStrip<S, WIDTH>,
{
    let mut block = terms.start..terms.start;
    while block.end < terms.end {
        block = block.end..terms.end.min(block.end + BLOCK);
        next.fetch_some();
        if S::REGISTER_COUNT < 32 {
            unrolled(simd, block.clone(), left, right, sums);
            continue;
        }
        let left = left.part(block.start, block.end);
        let right = right.part(block.start, block.end);
        for term in 0..block.len() {
            right.fetch_ahead(term);
            add_products(simd, left, right, term, sums);
        }
    }
}

/// Continues the chains of a tile over some terms, four in a turn of the loop. A tile for 16 registers is so
/// small that branches and addresses would take up to a tenth of the time otherwise.
#[inline(always)]
fn unrolled<S, L, R, const ROWS: usize, const WIDTH: usize>(
    simd: S,
    terms: Range<usize>,
    left: L,
    right: R,
    sums: &mut Sums<S, ROWS, WIDTH>,
) where
    S: Simd,
    L: LeftStrip<ROWS>,
    R: RightStrip<S, WIDTH>,
{
    const UNROLLED: usize = 4;
    let mut term = terms.start;
    while term + UNROLLED <= terms.end {
        let (left, right) = (left.part(term, term + UNROLLED), right.part(term, term + UNROLLED));
        for at in 0..UNROLLED {
            right.fetch_ahead(at);
            add_products(simd, left, right, at, sums);
        }
        term += UNROLLED;
    }
    for term in term..terms.end {
        add_products(simd, left.part(term, term + 1), right.part(term, term + 1), 0, sums);
    }
}

/// Continues the chains of a tile over a leaf, and adds another leaf of the same length. Both are formed at
/// the same time, so that their sum costs no passage through the stack.
#[inline(always)]
fn pair<S, L, R, const ROWS: usize, const WIDTH: usize, const VECTORS: usize>(
    simd: S,
    [first, second]: [&Step; 2],
    left: L,
    right: R,
    next: &mut Packing<'_, S, VECTORS>,
    sums: &mut Sums<S, ROWS, WIDTH>,
) where
    S: Simd,
    L: LeftStrip<ROWS>,
    R: RightStrip<S, WIDTH>,
{
    let mut others = [[simd.splat_f32s(0.0); WIDTH]; ROWS];
    next.fetch_some();
    let lefts = [left.part(first.first, first.end), left.part(second.first, second.end)];
    let rights = [right.part(first.first, first.end), right.part(second.first, second.end)];
    for term in 0..first.end - first.first {
        add_products(simd, lefts[0], rights[0], term, sums);
        add_products(simd, lefts[1], rights[1], term, &mut others);
    }
    for (sums, others) in sums.iter_mut().zip(&others) {
        for (sum, other) in sums.iter_mut().zip(others) {
            *sum = simd.add_f32s(*sum, *other);
        }
    }
}

/// Adds the products of one term to a tile.
#[inline(always)]
fn add_products<S, L, R, const ROWS: usize, const WIDTH: usize>(
    simd: S,
    left: L,
    right: R,
    term: usize,
    sums: &mut Sums<S, ROWS, WIDTH>,
) where
    S: Simd,
    L: LeftStrip<ROWS>,
    R: RightStrip<S, WIDTH>,
{
    left.pack(term);
    let vectors = right.vectors(term);
    for (row, sums) in sums.iter_mut().enumerate() {
        let left = simd.splat_f32s(left.factor(term, row));
        for (right, sum) in vectors.iter().zip(sums) {
            *sum = simd.mul_add_f32s(left, *right, *sum);
        }
    }
}

/// Adds another tile to `sums`.
#[inline(always)]
fn add_tile<S: Simd, const ROWS: usize, const WIDTH: usize>(
    simd: S,
    other: &Sums<S, ROWS, WIDTH>,
    sums: &mut Sums<S, ROWS, WIDTH>,
) {
    for (other, sums) in other.iter().zip(sums) {
        for (other, sum) in other.iter().zip(sums) {
            *sum = simd.add_f32s(*other, *sum);
        }
    }
}

/// Computes a tile of `WIDTH` vectors from a strip of each operand, and writes what `into` has
/// room for.
///
/// The sums are in registers while loops have fixed lengths; what depends on the target's size goes
/// through `stack`, memory of [`stack_len`] elements whose contents do not matter. With `PAIRS`, all leaves
/// are partners. The panel that is packed meanwhile has strips of `VECTORS` vectors.
#[inline(always)]
pub(super) fn multiply<
    S,
    L,
    R,
    const ROWS: usize,
    const WIDTH: usize,
    const VECTORS: usize,
    const PAIRS: bool,
>(
    simd: S,
    order: SumOrder<'_>,
    left: L,
    right: R,
    stack: &mut [f32],
    next: &mut Packing<'_, S, VECTORS>,
    mut into: Target<'_, '_>,
) where
    S: Simd,
    L: LeftStrip<ROWS>,
    R: RightStrip<S, WIDTH>,
{
    into.fetch::<S, ROWS, WIDTH>(order);
    let is_whole = into.is_whole::<S, ROWS, WIDTH>();
    let stack: &mut [Sums<S, ROWS, WIDTH>] = S::as_mut_simd_f32s(stack).0.as_chunks_mut().0.as_chunks_mut().0;
    let mut depth = order.depth;
    // values of the stack before this one are in the targets
    let mut base = depth;
    let leaves = if PAIRS { 2 } else { 1 };
    let last = order.steps.len() / leaves - 1;
    for (i, steps) in order.steps.chunks_exact(leaves).enumerate() {
        let step = &steps[leaves - 1];
        let mut sums = [[simd.splat_f32s(0.0); WIDTH]; ROWS];
        if steps[0].continues {
            depth -= 1;
            base = depth;
            into.load::<S, ROWS, WIDTH>(simd, depth, &mut stack[depth]);
            sums = stack[depth];
        }
        if PAIRS {
            pair(simd, [&steps[0], step], left, right, next, &mut sums);
        } else {
            chains(simd, step.first..step.end, left, right, next, &mut sums);
        }
        for _ in 0..step.num_merges + 1 - leaves {
            depth -= 1;
            if depth < base {
                base = depth;
                into.load::<S, ROWS, WIDTH>(simd, depth, &mut stack[depth]);
            }
            add_tile(simd, &stack[depth], &mut sums);
        }
        if i == last && is_whole {
            into.store_whole::<S, ROWS, WIDTH>(depth, &sums);
        } else {
            stack[depth] = sums;
            depth += 1;
        }
        // between two steps, the vector registers are free
        next.pack_some();
    }
    for (target, tile) in stack.iter().enumerate().take(depth).skip(base) {
        into.store(simd, target, tile);
    }
}
