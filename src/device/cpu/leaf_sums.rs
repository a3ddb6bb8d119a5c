//! The sums of short arrays over the rows of a section, leaf by leaf.

use std::ops::Range;

use crate::sums::Section;

/// The memory of a stack of arrays.
#[derive(Default)]
pub(super) struct LeafSums(Vec<f32>);

/// Adds the `rows` of a section to the sums in `arrays`, the values on its stack: `add` continues the
/// chains of an array over some rows, counted from the first of the section.
pub(super) fn add_up(
    rows: Section,
    LeafSums(stack): &mut LeafSums,
    arrays: &mut [&mut [f32]],
    mut add: impl FnMut(Range<usize>, &mut [f32]),
) {
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
}
