//! Sums, products, minima and maxima of a buffer's elements and the terms that have arrived.

use half::bf16;
use smallvec::SmallVec;

use super::element::{Element, Operation};

/// Combines `terms` with a stack, as [`Terms`](super::Terms) says, block by block so that a block
/// stays in the cache. Returns the term that has the result, which is `own` if that is a term; the
/// others are overwritten.
pub(super) fn fold_terms<T: Element>(
    terms: &mut [&mut [T]],
    own: usize,
    merges: &[usize],
    operation: Operation,
) -> usize {
    const BLOCK: usize = 4096;
    let len = terms.first().map_or(0, |term| term.len());
    let mut result = own;
    // a stack of a tree is not deep
    let mut stack = SmallVec::<[usize; 16]>::new();
    for start in (0..len).step_by(BLOCK) {
        let block = start..len.min(start + BLOCK);
        for (term, num_merges) in merges.iter().enumerate() {
            let mut right = term;
            for _ in 0..*num_merges {
                let Some(left) = stack.pop() else { break };
                // a + b has the bits of b + a, so the value may be left in either term
                let (into, from) = if right == own { (right, left) } else { (left, right) };
                let [into, from] = terms.get_disjoint_mut([into, from]).expect("terms are different");
                T::fold(operation, &mut into[block.clone()], &from[block.clone()]);
                right = if right == own { right } else { left };
            }
            stack.push(right);
        }
        result = stack.pop().expect("there are terms");
        assert!(stack.is_empty(), "the last value contains all terms");
    }
    result
}

/// Adds `terms` in `f32` in the order of [`fold_terms`], and rounds each sum once to the nearest
/// bfloat16, ties to even; leaves them in term `own`.
pub(super) fn add_bf16_terms(terms: &mut [&mut [bf16]], own: usize, merges: &[usize]) {
    const BLOCK: usize = 1024;
    let len = terms[own].len();
    let mut stack: Vec<[f32; BLOCK]> = Vec::with_capacity(terms.len());
    for start in (0..len).step_by(BLOCK) {
        let block = start..len.min(start + BLOCK);
        for (term, num_merges) in terms.iter().zip(merges) {
            let mut right = [0.0; BLOCK];
            right.iter_mut().zip(&term[block.clone()]).for_each(|(into, value)| *into = value.to_f32());
            for _ in 0..*num_merges {
                let Some(left) = stack.pop() else { break };
                right.iter_mut().zip(left).for_each(|(right, left)| *right += left);
            }
            stack.push(right);
        }
        let sums = stack.pop().expect("there are terms");
        assert!(stack.is_empty(), "the last value contains all terms");
        terms[own][block].iter_mut().zip(sums).for_each(|(own, sum)| *own = bf16::from_f32(sum));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the order of a binary tree over `num` terms, cut off at the last.
    fn merges(num: usize) -> Vec<usize> {
        let of = |term: usize| if term + 1 < num { term.trailing_ones() } else { term.count_ones() };
        (0..num).map(|term| of(term) as usize).collect()
    }

    fn sums_of_bf16(terms: &[&[f32]], own: usize) -> Vec<f32> {
        let mut terms: Vec<Vec<bf16>> =
            terms.iter().map(|term| term.iter().map(|value| bf16::from_f32(*value)).collect()).collect();
        let mut all: Vec<&mut [bf16]> = terms.iter_mut().map(|term| &mut term[..]).collect();
        let merges = merges(all.len());
        add_bf16_terms(&mut all, own, &merges);
        terms[own].iter().map(|value| value.to_f32()).collect()
    }

    #[test]
    fn sums_of_bfloat16_are_rounded_once_to_even_and_nan_stays_where_it_is() {
        // 1 + 1/256 + 1/256 is representable, 1 + 1/256 is half way between two numbers
        let small = 1.0 / 256.0;
        let terms: [&[f32]; 3] =
            [&[small, 1.0, -0.0, small], &[1.0, f32::NAN, -0.0, 1.0], &[small, 1.0, -0.0, 0.0]];
        let sums = sums_of_bf16(&terms, 1);
        assert_eq!(sums[0], 1.0 + 1.0 / 128.0);
        assert!(sums[1].is_nan());
        assert_eq!(sums[2].to_bits(), (-0.0_f32).to_bits());
        assert_eq!(sums[3], 1.0);
    }

    #[test]
    fn sums_of_bfloat16_are_not_rounded_between_terms() {
        // one after the other in bfloat16, 256 + 1 would stay 256 each time
        let (one, large) = (vec![1.0; 3000], vec![256.0; 3000]);
        for own in 0..4 {
            // 259 is halfway between 258 and 260
            assert_eq!(sums_of_bf16(&[&large, &one, &one, &one], own), vec![260.0; 3000]);
        }
    }

    #[test]
    fn sums_of_any_rank_follow_the_tree() {
        let value = |term: usize, at: usize| ((term * 7919 + at * 104_729) % 1009) as f32 / 7.0;
        for num in 1..=9 {
            let merges = merges(num);
            for own in 0..num {
                let mut terms: Vec<Vec<f32>> =
                    (0..num).map(|term| (0..5000).map(|at| value(term, at)).collect()).collect();
                let mut all: Vec<&mut [f32]> = terms.iter_mut().map(|term| &mut term[..]).collect();
                fold_terms(&mut all, own, &merges, Operation::Sum);
                for (at, found) in terms[own].iter().enumerate() {
                    let mut sums: Vec<f32> = (0..num).map(|term| value(term, at)).collect();
                    while sums.len() > 1 {
                        sums = sums.chunks(2).map(|pair| pair.iter().sum()).collect();
                    }
                    assert_eq!(found.to_bits(), sums[0].to_bits(), "{num} terms");
                }
            }
        }
    }
}
