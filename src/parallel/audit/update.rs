//! The part of an optimizer's update that an audit repeats: pure logic.

use std::ops::Range;

use crate::parallel::batch::BatchDivision;
use crate::parallel::zero::Partition;

/// The most elements of a block.
const MOST_ELEMENTS: usize = 1 << 16;

/// Returns the segment and the block in it of audit `number`, of the part that `replica` owns of
/// segments of `lengths`: another of the `audited` segments each time, and then the next block of each.
pub fn block(
    number: u64,
    lengths: &[usize],
    audited: &[usize],
    replica: usize,
    num_replicas: usize,
) -> (usize, Range<usize>) {
    if audited.is_empty() {
        return (0, 0..0);
    }
    let segment = audited[(number % audited.len() as u64) as usize];
    let owned = Partition::new(lengths, replica, num_replicas).owned(segment);
    let len = owned.len().min(MOST_ELEMENTS);
    let num_places = (owned.len() - len) as u64 + 1;
    let start = owned.start + (number / audited.len() as u64 * len as u64 % num_places) as usize;
    (segment, start..start + len)
}

/// Returns the sums over the replicas of the gradient of a block of `len` elements, in the order of
/// `division`: one for each reduction of `micro_batches`, then that of all of them. The `terms` are, of
/// each replica and for each reduction, its arrays.
pub fn sums(
    division: BatchDivision,
    micro_batches: &[usize],
    terms: &[Vec<Vec<f32>>],
    len: usize,
) -> Vec<f32> {
    let mut stack: Vec<Vec<f32>> = Vec::new();
    let mut sums = Vec::with_capacity((micro_batches.len() + 1) * len);
    for (number, &micro_batch) in micro_batches.iter().enumerate() {
        let Some(subtrees) = division.canonical_subtrees(micro_batch) else { continue };
        let mut nodes: Vec<Vec<f32>> = Vec::new();
        let arrays = terms.iter().enumerate().flat_map(|(replica, terms)| {
            terms[number].chunks_exact(len.max(1)).take(subtrees.of_rank(replica))
        });
        for (array, num_merges) in arrays.zip(subtrees.merges()) {
            nodes.push(array.to_vec());
            merge(&mut nodes, num_merges);
        }
        stack.push(nodes.pop().unwrap_or_else(|| vec![0.0; len]));
        sums.extend_from_slice(&stack[stack.len() - 1]);
        merge(&mut stack, division.num_merges(micro_batch));
    }
    sums.extend(stack.pop().unwrap_or_else(|| vec![0.0; len]));
    sums
}

/// Adds the last array to the one before it, `num` times.
fn merge(stack: &mut Vec<Vec<f32>>, num: usize) {
    for _ in 0..num {
        if let (Some(right), Some(left)) = (stack.pop(), stack.last_mut()) {
            left.iter_mut().zip(right).for_each(|(left, right)| *left += right);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::GridShape;
    use crate::parallel::batch::Summation;

    #[test]
    fn blocks_go_over_all_that_a_replica_owns() {
        let lengths = [3 * 200_000, 3 * 10, 3 * 65_536];
        let mut seen = [vec![false; lengths[0]], vec![false; lengths[1]], vec![false; lengths[2]]];
        for number in 0..400_000 {
            let (segment, block) = block(number, &lengths, &[0, 1, 2], 1, 3);
            assert!(block.start >= lengths[segment] / 3 && block.end <= 2 * lengths[segment] / 3);
            seen[segment][block.start] = true;
        }
        assert_eq!(block(7, &lengths, &[1], 0, 3).0, 1, "only audited segments");
        let starts = seen.map(|seen| seen.into_iter().filter(|seen| *seen).count());
        assert!(starts[0] > 10_000 && starts[1..] == [1, 1], "{starts:?}");
    }

    #[test]
    fn terms_of_replicas_are_added_in_the_order_of_the_tree() {
        let summation = Summation::canonical(Some(8), GridShape::data(3)).unwrap();
        let division = BatchDivision::new(summation, 3, 1, false);
        // ranks have leaves 0 to 2, 3 to 5, 6 and 7: ((0 1)(2 . 3))((4 5)(6 7))
        let [a, b, c, d, e] = [1e8, 1.5, -1e8, 3.25, 7.0_f32];
        let terms = [vec![vec![a, b]], vec![vec![c, d]], vec![vec![e, 0.0]]];
        let expected = (a + (b + c)) + (d + e);
        assert_eq!(sums(division, &[0], &terms, 1), [expected; 2]);
    }
}
