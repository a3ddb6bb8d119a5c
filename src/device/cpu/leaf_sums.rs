//! The sums of short arrays over the rows of a section, leaf by leaf.

use std::cell::RefCell;
use std::ops::Range;

use smallvec::SmallVec;

use super::Cpu;
use super::loops::LONG_PASS;
use crate::sums::{MOST_PENDING, Section};

/// The values on the stack of a section, an array each.
pub(super) type SumArrays<'a> = SmallVec<[&'a mut [f32]; MOST_PENDING]>;

thread_local! {
    /// Memory of sums that are not under way: one for each that begins inside of another.
    static STACKS: RefCell<Vec<Vec<f32>>> = const { RefCell::new(Vec::new()) };
}

/// Adds the `rows` of a section to the sums in `arrays`, the values on its stack: `add` continues the
/// chains of an array over some rows, counted from the first of the section.
pub(super) fn add_up(
    rows: Section,
    arrays: &mut [&mut [f32]],
    mut add: impl FnMut(Range<usize>, &mut [f32]),
) {
    let mut stack = STACKS.with_borrow_mut(Vec::pop).unwrap_or_default();
    let len = arrays.first().map_or(0, |array| array.len());
    let mut depth = rows.depth_before();
    stack.clear();
    arrays[..depth].iter().for_each(|array| stack.extend_from_slice(array));
    for step in rows.steps() {
        if !step.continues {
            depth += 1;
            stack.resize(depth * len, 0.0);
        }
        add(step.first..step.end, &mut stack[(depth - 1) * len..]);
        for _ in 0..step.num_merges {
            let (left, right) = stack[(depth - 2) * len..].split_at_mut(len);
            left.iter_mut().zip(right).for_each(|(left, right)| *left += *right);
            depth -= 1;
            stack.truncate(depth * len);
        }
    }
    arrays[..depth].iter_mut().zip(stack.chunks_exact(len.max(1))).for_each(|(array, sum)| {
        array.copy_from_slice(sum);
    });
    STACKS.with_borrow_mut(|stacks| stacks.push(stack));
}

/// Splits the first `len` elements off every array, or as many as it has.
pub(super) fn split_off<'a>(arrays: &mut SumArrays<'a>, len: usize) -> SumArrays<'a> {
    arrays
        .iter_mut()
        .map(|array| {
            let len = len.min(array.len());
            array.split_off_mut(..len).expect("the length is at most all")
        })
        .collect()
}

/// Columns that a thread takes whole: those of a cache line.
const COLUMN_MULTIPLE: usize = 16;

impl Cpu {
    /// Runs `work` on the columns of each thread and on their elements of `arrays`, for a sum over rows with
    /// `num_terms` terms in all: a thread adds all rows, whose order no division changes.
    pub(super) fn by_columns(
        &self,
        columns: usize,
        num_terms: usize,
        mut arrays: SumArrays<'_>,
        work: impl Fn(Range<usize>, SumArrays<'_>) + Sync,
    ) {
        let is_short = num_terms < LONG_PASS;
        let part = if is_short { columns } else { self.rows_per_thread(columns) };
        let part = part.max(1).next_multiple_of(COLUMN_MULTIPLE);
        let parts = (0..columns).step_by(part).map(|first| {
            let own = first..columns.min(first + part);
            let arrays = split_off(&mut arrays, own.len());
            (own, arrays)
        });
        self.for_each(parts, |(own, arrays)| work(own, arrays));
    }
}
