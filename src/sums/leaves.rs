//! The canonical order of a sum: its terms are cut into leaves at fixed places. A leaf is one chain
//! of fused multiply-adds in the order of its terms, from +0. The leaves are added by one binary
//! tree over all of them, whose nodes cover `j·2ᵗ..(j + 1)·2ᵗ`, cut off at the last leaf. A node's
//! value depends on its terms alone, so a rank that holds whole leaves computes whole nodes.
//!
//! A tree is added up with a stack, as a binary counter counts: a leaf that is complete is added to
//! the nodes on top of the stack of which it is the last part. A call that adds some of a rank's
//! terms leaves the nodes that are not complete yet, and perhaps a chain that is not, on the stack.

use std::ops::Range;

use super::shard;

/// The number of leaves of a sum that a layout may divide.
pub const NUM_LEAVES: usize = 8;

/// The most leaves that a sum can have.
pub const MOST_LEAVES: usize = 256;

/// The most values on the stack that adds up the leaves of a rank: nodes that grow up to the middle
/// of the tree and shrink after it, and a chain.
pub const MOST_PENDING: usize = 2 * MOST_LEAVES.ilog2() as usize;

/// A sum of `len` terms, cut into `num` leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Leaves {
    /// The number of terms.
    pub len: usize,
    /// The number of leaves, from 1 to [`MOST_LEAVES`].
    pub num: usize,
}

impl Leaves {
    /// Returns the terms of a leaf. Lengths differ by at most 1, and longer leaves are spread among the
    /// others, so that ranks with equally many leaves have as many terms, but for one. The first leaf has a
    /// term if there is one.
    pub fn terms(self, leaf: usize) -> Range<usize> {
        // the product may exceed 64 bits, the quotient is at most `len`
        let start = |leaf: usize| (self.len as u128 * leaf as u128).div_ceil(self.num as u128) as usize;
        start(leaf)..start(leaf + 1)
    }

    /// Returns the sum of the products of the factors of each term, by plain loops.
    pub fn sum(self, factors: impl Fn(usize) -> (f32, f32)) -> f32 {
        self.sum_from(0.0, factors)
    }

    /// Returns the sum whose first leaf begins with `start`, by plain loops.
    pub fn sum_from(self, start: f32, factors: impl Fn(usize) -> (f32, f32)) -> f32 {
        let chain = |sum: f32, (left, right): (f32, f32)| left.mul_add(right, sum);
        let first = |leaf| if leaf == 0 { start } else { 0.0 };
        let value = |leaf| self.terms(leaf).map(&factors).fold(first(leaf), chain);
        let mut nodes: Vec<f32> = (0..self.num).map(value).collect();
        while nodes.len() > 1 {
            nodes = nodes
                .chunks(2)
                .map(|pair| pair.iter().copied().reduce(|a, b| a + b).unwrap_or(0.0))
                .collect();
        }
        nodes[0]
    }

    /// Returns the number of nodes on top of the stack that `leaf` completes, where the stack has
    /// the nodes of the leaves from `first` on.
    pub fn num_merges(self, leaf: usize, first: usize) -> usize {
        let is_last = leaf + 1 == self.num;
        let (mut num, mut width) = (0, 1);
        // the nodes that may be to the left are those of the bits of `leaf`
        while width <= leaf {
            if leaf & width != 0 {
                let start = leaf & !(2 * width - 1);
                if start < first {
                    break;
                }
                num += 1;
            } else if !is_last {
                break;
            }
            width *= 2;
        }
        num
    }
}

/// Consecutive terms of canonical sums that one call adds: some leaves, of which the first may be
/// continued and the last left incomplete.
///
/// The rows of a batch are divided among ranks and micro-batches by leaves, so that who holds which
/// leaf does not depend on the number of rows; a leaf may be empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Section {
    leaves: Leaves,
    /// The first leaf of the rank, on which the stack was empty.
    held_from: usize,
    /// The leaves of this section.
    first: usize,
    end: usize,
    /// The terms of this section among all of the sum.
    first_term: usize,
    end_term: usize,
    /// True if the first chain continues a value that is there, instead of +0.
    continues: bool,
    /// True if the last leaf is complete after this section.
    is_complete: bool,
    /// The number of terms that each of the above stands for, such as the positions of a sample.
    times: usize,
}

/// A leaf of a section, or a part of one.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Step {
    /// The first term, counted from the first of the section.
    pub first: usize,
    /// The first term after the last.
    pub end: usize,
    /// Whether the chain on top of the stack is continued; otherwise a chain begins at +0.
    pub continues: bool,
    /// The number of nodes on top of the stack that the chain is added to, one after the other.
    pub num_merges: usize,
}

impl Section {
    /// Returns all terms of a sum.
    pub fn whole(leaves: Leaves) -> Section {
        Section::of_leaves(leaves, 0..leaves.num)
    }

    /// Returns `len` terms of one chain, which goes on if it `continues`.
    pub fn of_chain(len: usize, continues: bool) -> Section {
        let (first_term, is_complete) = (if continues { len } else { 0 }, false);
        let whole = Section::whole(Leaves { len: 2 * len, num: 1 });
        Section { first_term, end_term: first_term + len, continues, is_complete, ..whole }
    }

    /// Returns the terms of rank `rank` of `num_ranks`: whole leaves, or none if there are fewer
    /// leaves.
    pub fn of_rank(leaves: Leaves, rank: usize, num_ranks: usize) -> Section {
        Section::of_leaves(leaves, shard(leaves.num, rank, num_ranks))
    }

    /// Returns the terms of some leaves, which are added to an empty stack.
    pub fn of_leaves(leaves: Leaves, own: Range<usize>) -> Section {
        let Range { start: first, end } = own;
        let terms = if first == end { 0..0 } else { leaves.terms(first).start..leaves.terms(end - 1).end };
        let (first_term, end_term) = (terms.start, terms.end);
        let (continues, is_complete) = (false, true);
        Section {
            leaves,
            held_from: first,
            first,
            end,
            first_term,
            end_term,
            continues,
            is_complete,
            times: 1,
        }
    }

    /// Returns some of the leaves of a section of whole leaves.
    fn some_leaves(self, own: Range<usize>) -> Section {
        Section { held_from: self.held_from, times: self.times, ..Section::of_leaves(self.leaves, own) }
    }

    /// Returns this section with `times` terms in place of each, as for the positions of samples.
    pub fn times(self, times: usize) -> Section {
        Section { times: self.times * times, ..self }
    }

    /// Returns the section with a value on the stack with which its first chain begins.
    ///
    /// # Panics
    /// There are sums of earlier sections on the stack.
    pub fn with_start(self) -> Section {
        assert_eq!(self.depth_before(), 0, "a start belongs to the first leaf");
        Section { continues: true, ..self }
    }

    /// Returns micro-batch `index` of the `num` that this section is divided into: whole leaves, or
    /// where micro-batches are more than leaves, a part of one.
    ///
    /// # Panics
    /// The section is a part of a leaf already.
    pub fn micro_batch(self, index: usize, num: usize) -> Section {
        assert!(!self.continues && self.is_complete, "a micro-batch is not divided again");
        let num_leaves = self.end - self.first;
        if num_leaves == 0 {
            return self;
        }
        if num <= num_leaves {
            let range = shard(num_leaves, index, num);
            return self.some_leaves(self.first + range.start..self.first + range.end);
        }
        let parts = |leaf: usize| shard(num, leaf, num_leaves);
        let leaf = (0..num_leaves).find(|leaf| parts(*leaf).contains(&index)).unwrap_or(0);
        let (part, num_parts) = (index - parts(leaf).start, parts(leaf).len());
        let whole = self.some_leaves(self.first + leaf..self.first + leaf + 1);
        let terms = shard(whole.end_term - whole.first_term, part, num_parts);
        Section {
            first_term: whole.first_term + terms.start,
            end_term: whole.first_term + terms.end,
            continues: part > 0,
            is_complete: part + 1 == num_parts,
            ..whole
        }
    }

    /// Returns this section and the `next` one of the same rank as one.
    ///
    /// # Panics
    /// `next` is another.
    pub fn join(self, next: Section) -> Section {
        if self.first == self.end {
            return next;
        }
        let is_next = next.first == if self.is_complete { self.end } else { self.end - 1 };
        assert!(is_next && next.continues != self.is_complete, "sections are joined in their order");
        Section { end: next.end, end_term: next.end_term, is_complete: next.is_complete, ..self }
    }

    /// Returns the terms of the section that belong to the first leaf of the rank, if there is that leaf.
    /// It is complete on an empty stack, so its value is on the stack alone.
    pub fn in_first_leaf(self) -> Option<Section> {
        let is_here = self.first == self.held_from && self.first < self.end;
        let is_complete = self.is_complete || self.end > self.first + 1;
        let end_term = self.end_term.min(self.leaves.terms(self.first.min(self.leaves.num - 1)).end);
        is_here.then_some(Section { end: self.first + 1, end_term, is_complete, ..self })
    }

    /// Returns the terms of the section after the first leaf of the rank, if it has other leaves.
    pub fn after_first_leaf(self) -> Option<Section> {
        match self.in_first_leaf() {
            None => Some(self).filter(|rest| rest.first < rest.end),
            Some(leaf) if leaf.end == self.end => None,
            Some(leaf) => {
                let (first, first_term) = (leaf.end, leaf.end_term);
                Some(Section { first, first_term, continues: false, ..self })
            }
        }
    }

    /// Returns true if the last leaf of the section is complete after it.
    pub fn is_complete(self) -> bool {
        self.is_complete
    }

    /// Returns the terms of the section among all of the sum.
    pub fn terms(self) -> Range<usize> {
        self.first_term * self.times..self.end_term * self.times
    }

    /// Returns the number of terms.
    pub fn len(self) -> usize {
        (self.end_term - self.first_term) * self.times
    }

    /// Returns true if there are no terms.
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// Returns the number of values on the stack before the section.
    pub fn depth_before(self) -> usize {
        self.depth(self.first) + usize::from(self.continues)
    }

    /// Returns the number of values on the stack after the section.
    pub fn depth_after(self) -> usize {
        if self.is_complete { self.depth(self.end) } else { self.depth(self.end - 1) + 1 }
    }

    /// Returns the most values that are on the stack at a time while the section is added.
    pub fn most_depth(self) -> usize {
        let (mut depth, mut most) = (self.depth(self.first), 0);
        for leaf in self.first..self.end {
            most = most.max(depth + 1);
            depth = depth + 1 - self.leaves.num_merges(leaf, self.held_from);
        }
        most.max(depth)
    }

    /// Returns the number of nodes on the stack before `leaf` begins.
    fn depth(self, leaf: usize) -> usize {
        let num_merges = |leaf| self.leaves.num_merges(leaf, self.held_from);
        (self.held_from..leaf).fold(0, |depth, leaf| depth + 1 - num_merges(leaf))
    }

    /// Returns the leaves of the section in order.
    pub fn steps(self) -> impl Iterator<Item = Step> {
        let (own, times) = (self.first_term..self.end_term, self.times);
        (self.first..self.end).map(move |leaf| {
            let terms = self.leaves.terms(leaf);
            let is_complete = self.is_complete || leaf + 1 < self.end;
            Step {
                first: times * (terms.start.max(own.start) - own.start),
                end: times * (terms.end.min(own.end) - own.start),
                continues: self.continues && leaf == self.first,
                num_merges: if is_complete { self.leaves.num_merges(leaf, self.held_from) } else { 0 },
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::{Leaves, MOST_PENDING, Section};

    /// Adds a section to a stack on which each value is written as its terms and nodes.
    fn add(section: Section, stack: &mut Vec<String>) {
        assert_eq!(stack.len(), section.depth_before());
        let (start, mut most) = (section.terms().start, stack.len());
        for step in section.steps() {
            let mut value = if step.continues { stack.pop().unwrap() } else { String::new() };
            (step.first..step.end).for_each(|term| value += &format!(" {}", start + term));
            most = most.max(stack.len() + 1);
            for _ in 0..step.num_merges {
                value = format!("({}+{value})", stack.pop().unwrap());
            }
            stack.push(value);
        }
        assert_eq!(stack.len(), section.depth_after());
        assert_eq!(most, section.most_depth());
        assert!(stack.len() <= MOST_PENDING);
    }

    /// Returns the whole tree, written in that way.
    fn tree(leaves: Leaves) -> String {
        let mut nodes: Vec<String> = (0..leaves.num)
            .map(|leaf| leaves.terms(leaf).map(|term| format!(" {term}")).collect::<String>())
            .collect();
        while nodes.len() > 1 {
            nodes = nodes
                .chunks(2)
                .map(|pair| match pair {
                    [left, right] => format!("({left}+{right})"),
                    _ => pair[0].clone(),
                })
                .collect();
        }
        nodes.remove(0)
    }

    #[test]
    fn micro_batches_add_up_to_the_tree() {
        for num in 1..=17 {
            for len in [0, 1, 5, 8, 16, 37] {
                let leaves = Leaves { len, num };
                for num_micro_batches in 1..=20 {
                    let one = |index| Section::whole(leaves).micro_batch(index, num_micro_batches);
                    let all: Vec<Section> = (0..num_micro_batches).map(one).collect();
                    for num_joined in [1, 2, 3, num_micro_batches] {
                        let mut stack = Vec::new();
                        for some in all.chunks(num_joined) {
                            let joined = some.iter().copied().reduce(Section::join).unwrap();
                            // the first leaf of the rank, and the rest
                            joined.in_first_leaf().into_iter().for_each(|leaf| add(leaf, &mut stack));
                            joined.after_first_leaf().into_iter().for_each(|rest| add(rest, &mut stack));
                        }
                        assert_eq!(stack, [tree(leaves)], "{leaves:?}, {num_joined} of {num_micro_batches}");
                    }
                }
            }
        }
    }

    #[test]
    fn the_nodes_of_ranks_are_nodes_of_the_tree() {
        for num in (1..=17).chain([50, 63, 64]) {
            let leaves = Leaves { len: 40, num };
            let whole = tree(leaves);
            for num_ranks in 1..=num {
                let mut end = 0;
                for rank in 0..num_ranks {
                    let mut stack = Vec::new();
                    let section = Section::of_rank(leaves, rank, num_ranks);
                    assert_eq!(section.terms().start, end);
                    end = section.terms().end;
                    (0..9).for_each(|index| add(section.micro_batch(index, 9), &mut stack));
                    assert!(stack.iter().all(|node| whole.contains(node.as_str())), "{stack:?} in {whole}");
                    if num.is_power_of_two() && num_ranks.is_power_of_two() {
                        assert_eq!(stack.len(), 1);
                    }
                }
                assert_eq!(end, 40);
            }
        }
    }

    #[test]
    fn plain_sums_follow_the_tree() {
        let leaves = Leaves { len: 11, num: 3 };
        let value = |term: usize| 1.0 + term as f32 * 1e-4;
        let chain = |terms: std::ops::Range<usize>| terms.fold(0.0_f32, |sum, t| value(t).mul_add(0.3, sum));
        let expected = (chain(0..4) + chain(4..8)) + chain(8..11);
        assert_eq!(leaves.sum(|term| (value(term), 0.3)).to_bits(), expected.to_bits());
    }
}
