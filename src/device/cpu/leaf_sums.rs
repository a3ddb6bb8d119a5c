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
    /// Memory of sums that are not under way: one for each that begins inside of another. It holds the
    /// values on a stack for which the caller has no array.
    static STACKS: RefCell<Vec<Vec<f32>>> = const { RefCell::new(Vec::new()) };
}

/// Adds the `rows` of a section to the sums in `arrays`, the values on its stack: `add` continues the
/// chains of an array over some rows, counted from the first of the section. Arrays above those that the
/// stack has after the section end with arbitrary values.
///
/// # Panics
/// There are fewer arrays than values on the stack before the section, or after it.
pub(super) fn add_up(
    rows: Section,
    arrays: &mut [&mut [f32]],
    mut add: impl FnMut(Range<usize>, &mut [f32]),
) {
    let wanted = rows.depth_before().max(rows.depth_after());
    assert!(arrays.len() >= wanted, "{} arrays for {wanted} sums", arrays.len());
    let len = arrays.first().map_or(0, |array| array.len());
    if len == 0 {
        return;
    }
    let mut memory = STACKS.with_borrow_mut(Vec::pop).unwrap_or_default();
    memory.resize(rows.most_depth().saturating_sub(arrays.len()) * len, 0.0);
    let arrays = arrays.iter_mut().map(|array| &mut **array);
    let mut stack: SumArrays<'_> = arrays.chain(memory.chunks_exact_mut(len)).collect();
    let mut depth = rows.depth_before();
    for step in rows.steps() {
        if !step.continues {
            stack[depth].fill(0.0);
            depth += 1;
        }
        add(step.first..step.end, stack[depth - 1]);
        for _ in 0..step.num_merges {
            depth -= 1;
            let (left, right) = stack.split_at_mut(depth);
            left[depth - 1].iter_mut().zip(&*right[0]).for_each(|(left, right)| *left += *right);
        }
    }
    drop(stack);
    STACKS.with_borrow_mut(|stacks| stacks.push(memory));
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

#[cfg(test)]
mod tests {
    use super::{SumArrays, add_up};
    use crate::device::cpu::tests::random;
    use crate::sums::{Leaves, Section};

    #[test]
    fn micro_batches_add_up_in_place_to_the_canonical_sum() {
        const COLUMNS: usize = 3;
        for (len, num) in [(37, 8), (5, 8), (12, 3), (1, 1), (300, 13)] {
            let (left, right) = (random(len * COLUMNS, 1), random(len, 2));
            let leaves = Leaves { len, num };
            for num_micro_batches in [1, 2, 3, num, 2 * num] {
                let cut = |index| Section::whole(leaves).micro_batch(index, num_micro_batches);
                let sections: Vec<Section> = (0..num_micro_batches).map(cut).collect();
                let depths = sections.iter().map(|section| section.depth_after()).max().unwrap();
                let mut memory = vec![f32::NAN; depths * COLUMNS];
                for section in sections {
                    let start = section.terms().start;
                    let mut arrays: SumArrays<'_> = memory.chunks_exact_mut(COLUMNS).collect();
                    add_up(section, &mut arrays, |rows, sums| {
                        for row in start + rows.start..start + rows.end {
                            for (sum, factor) in sums.iter_mut().zip(&left[row * COLUMNS..]) {
                                *sum = factor.mul_add(right[row], *sum);
                            }
                        }
                    });
                }
                for (column, sum) in memory[..COLUMNS].iter().enumerate() {
                    let expected = leaves.sum(|row| (left[row * COLUMNS + column], right[row]));
                    assert_eq!(sum.to_bits(), expected.to_bits(), "{leaves:?}, {num_micro_batches}");
                }
            }
        }
    }
}
