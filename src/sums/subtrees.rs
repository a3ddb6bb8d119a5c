//! The sums that ranks have before they are added up over the ranks: pure logic.

use std::ops::Range;

use super::leaves::Leaves;
use super::shard;

/// The division of a canonical sum among the ranks of an axis: rank r has leaves
/// `shard(num_leaves, r, num_ranks)` and adds them up as far as they are whole subtrees. If both
/// numbers are powers of two, every rank has at most one subtree. If there are more ranks than leaves,
/// consecutive ranks have one leaf each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Subtrees {
    num_leaves: usize,
    num_ranks: usize,
    /// The first rank that has a leaf.
    first_rank: usize,
}

impl Subtrees {
    /// Divides `num_leaves` leaves among `num_ranks` ranks.
    pub fn new(num_leaves: usize, num_ranks: usize) -> Subtrees {
        Subtrees { num_leaves, num_ranks, first_rank: 0 }
    }

    /// Returns the division of a sum to which each of `num_ranks` ranks has one term.
    pub fn one_each(num_ranks: usize) -> Subtrees {
        Subtrees::new(num_ranks, num_ranks)
    }

    /// Gives the leaves to ranks from `rank` on, as far as there are ranks without any.
    pub fn from_rank(self, rank: usize) -> Subtrees {
        Subtrees { first_rank: rank.min(self.num_ranks.saturating_sub(self.num_leaves)), ..self }
    }

    /// Returns the number of ranks.
    pub fn num_ranks(self) -> usize {
        self.num_ranks
    }

    /// Returns the number of leaves.
    pub fn num_leaves(self) -> usize {
        self.num_leaves
    }

    /// Returns the leaves of `rank`.
    pub fn leaves(self, rank: usize) -> Range<usize> {
        if self.num_ranks <= self.num_leaves {
            return shard(self.num_leaves, rank, self.num_ranks);
        }
        let leaf = rank.saturating_sub(self.first_rank).min(self.num_leaves);
        let has_leaf = rank >= self.first_rank && leaf < self.num_leaves;
        leaf..leaf + usize::from(has_leaf)
    }

    /// Returns the number of subtrees of `rank`.
    pub fn of_rank(self, rank: usize) -> usize {
        let leaves = Leaves { len: 0, num: self.num_leaves };
        let held = self.leaves(rank);
        held.clone().fold(0, |depth, leaf| depth + 1 - leaves.num_merges(leaf, held.start))
    }

    /// Returns the largest number of subtrees of a rank.
    pub fn most(self) -> usize {
        let Subtrees { num_leaves, num_ranks, .. } = self;
        if num_ranks >= num_leaves || num_leaves.is_power_of_two() && num_ranks.is_power_of_two() {
            return 1;
        }
        (0..num_ranks).map(|rank| self.of_rank(rank)).max().unwrap_or(1)
    }

    /// Returns true if every rank has one sum, and they are added up like those of
    /// [`Subtrees::one_each`], for ranks with equal blocks of a power of two of leaves.
    pub fn is_one_each(self) -> bool {
        let Subtrees { num_leaves, num_ranks, .. } = self;
        num_ranks == 1 || num_leaves.is_multiple_of(num_ranks) && (num_leaves / num_ranks).is_power_of_two()
    }

    /// Returns, for each subtree of all ranks in order, the number of sums before it that it is added
    /// to, the nearest first.
    pub fn merges(self) -> Vec<usize> {
        let leaves = Leaves { len: 0, num: self.num_leaves };
        let of_rank = |rank| {
            let first = self.leaves(rank).start;
            let rest = move |leaf| leaves.num_merges(leaf, 0) - leaves.num_merges(leaf, first);
            self.last_leaves(rank).into_iter().map(rest)
        };
        (0..self.num_ranks).flat_map(of_rank).collect()
    }

    /// Returns the last leaf of each subtree of `rank`.
    fn last_leaves(self, rank: usize) -> Vec<usize> {
        let leaves = Leaves { len: 0, num: self.num_leaves };
        let held = self.leaves(rank);
        let mut last = Vec::new();
        for leaf in held.clone() {
            last.truncate(last.len() - leaves.num_merges(leaf, held.start));
            last.push(leaf);
        }
        last
    }
}

#[cfg(test)]
mod tests {
    use super::Subtrees;

    /// Returns the sum of the leaves of each subtree, added up over the ranks and written with
    /// parentheses.
    fn total(subtrees: Subtrees) -> String {
        let Subtrees { num_leaves, num_ranks, .. } = subtrees;
        let one_rank = |rank| {
            let held = subtrees.leaves(rank);
            let whole = tree(0, num_leaves.next_power_of_two(), num_leaves);
            let last = subtrees.last_leaves(rank);
            let first = [held.start].into_iter().chain(last.iter().map(|leaf| leaf + 1));
            let written = |(first, last): (usize, &usize)| {
                let width = (last + 1 - first).next_power_of_two();
                let text = tree(first, width, num_leaves);
                assert!(whole.contains(&text) && last + 1 == num_leaves.min(first + width));
                text
            };
            first.zip(&last).map(written).collect::<Vec<_>>()
        };
        let mut stack: Vec<String> = Vec::new();
        for (mut sum, num) in (0..num_ranks).flat_map(one_rank).zip(subtrees.merges()) {
            for _ in 0..num {
                sum = format!("({}+{sum})", stack.pop().unwrap());
            }
            stack.push(sum);
        }
        assert_eq!(stack.len(), 1);
        stack.remove(0)
    }

    fn tree(first: usize, width: usize, end: usize) -> String {
        if width == 1 {
            return format!(" {first} ");
        }
        let middle = first + width / 2;
        let left = tree(first, width / 2, end);
        if middle < end { format!("({left}+{})", tree(middle, width / 2, end)) } else { left }
    }

    #[test]
    fn any_number_of_ranks_adds_up_the_tree() {
        for num_leaves in (1..=20_usize).chain([63, 64]) {
            let whole = tree(0, num_leaves.next_power_of_two(), num_leaves);
            for num_ranks in 1..=num_leaves + 3 {
                let subtrees = Subtrees::new(num_leaves, num_ranks);
                assert_eq!(total(subtrees.from_rank(1)), whole);
                assert_eq!(total(subtrees), whole);
                let nums: Vec<usize> = (0..num_ranks).map(|rank| subtrees.of_rank(rank)).collect();
                assert_eq!(nums.iter().sum::<usize>(), subtrees.merges().len());
                assert_eq!(nums.into_iter().max(), Some(subtrees.most()));
                let adds_one_each = subtrees.merges() == Subtrees::one_each(num_ranks).merges();
                let has_one_each = (0..num_ranks).all(|rank| subtrees.of_rank(rank) == 1);
                let is_one_each = adds_one_each && has_one_each;
                assert!(is_one_each || !subtrees.is_one_each(), "{subtrees:?}");
                // of blocks that are not equal it is not asked
                let are_equal = num_leaves.is_multiple_of(num_ranks);
                assert!(subtrees.is_one_each() || !is_one_each || !are_equal, "{subtrees:?}");
                if num_leaves.is_power_of_two() && num_ranks.is_power_of_two() {
                    assert_eq!(subtrees.most(), 1);
                }
            }
        }
    }
}
