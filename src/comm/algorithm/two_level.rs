//! Operations in two levels: within every node, through its memory, and among the ranks with the same
//! position on their nodes. A value, or the sum of a node, crosses from one node to another once, not once
//! for each rank there. Both levels are pairwise exchanges.

use std::ops::Range;

use super::pairwise;
use super::plan::{Members, Ranks, Round};
use crate::sums::Subtrees;

/// A group's ranks by node, and this rank's place among them.
struct Levels {
    /// The ranks of each node, equally many, in the order of the nodes' first ranks.
    groups: Vec<Vec<usize>>,
    node: usize,
    /// This rank's position on its node.
    local: usize,
}

impl Levels {
    /// Sorts the ranks by node. If nodes have different numbers of ranks, all ranks are treated as one node.
    fn new(ranks: Ranks<'_>) -> Levels {
        let Ranks { rank, nodes, .. } = ranks;
        let size = nodes.len();
        let of_node = |node: usize| (0..size).filter(|&rank| nodes[rank] == node).collect();
        // in the order of ranks, so that sums of nodes follow each other as those of their ranks do
        let mut names: Vec<usize> = Vec::new();
        for node in nodes {
            if !names.contains(node) {
                names.push(*node);
            }
        }
        let mut groups: Vec<Vec<usize>> = names.into_iter().map(of_node).collect();
        if groups.iter().any(|group| group.len() != groups[0].len()) {
            groups = vec![(0..size).collect()];
        }
        let node = groups.iter().position(|group| group.contains(&rank)).unwrap_or_default();
        let local = groups[node].iter().position(|&other| other == rank).unwrap_or_default();
        Levels { groups, node, local }
    }

    /// Returns the ranks of this node, which own the parts that `owned` returns for their positions there.
    fn within(&self, owned: impl Fn(usize) -> Range<usize>) -> Members {
        let ranks = self.groups[self.node].clone();
        let subtrees = Subtrees::one_each(ranks.len());
        Members { owned: (0..ranks.len()).map(owned).collect(), ranks, me: self.local, subtrees }
    }

    /// Returns the ranks with this position on all nodes, which own the parts that `owned` returns for their
    /// nodes.
    fn across(&self, owned: impl Fn(usize) -> Range<usize>) -> Members {
        let ranks: Vec<usize> = self.groups.iter().map(|group| group[self.local]).collect();
        let subtrees = Subtrees::one_each(ranks.len());
        Members { owned: (0..ranks.len()).map(owned).collect(), ranks, me: self.node, subtrees }
    }

    /// Returns the ranks of this node, which own the parts of the ranks in their positions on another.
    fn within_for(&self, node: usize) -> Members {
        self.within(|local| one_part(self.groups[node][local]))
    }

    /// Returns the ranks with this position on all nodes, each with the part of its number.
    fn across_by_rank(&self) -> Members {
        self.across(|node| one_part(self.groups[node][self.local]))
    }
}

fn one_part(number: usize) -> Range<usize> {
    number..number + 1
}

/// Sums within every node, each rank the parts of its position, then among the owners of the same parts on
/// all nodes, and copies the sums to all ranks the same way back.
pub(super) fn all_reduce(ranks: Ranks<'_>) -> Vec<Round> {
    let levels = Levels::new(ranks);
    let num_nodes = levels.groups.len();
    let within = levels.within(|local| local * num_nodes..(local + 1) * num_nodes);
    let across = levels.across(|node| one_part(levels.local * num_nodes + node));
    let first = [pairwise::reduce_scatter(&within), pairwise::reduce_scatter(&across)];
    with_messages(first.into_iter().chain([pairwise::all_gather(&across), pairwise::all_gather(&within)]))
}

/// Sums within every node: each rank the parts of the ranks in its position on all nodes, to which it then
/// sends them.
pub(super) fn reduce_scatter(ranks: Ranks<'_>) -> Vec<Round> {
    let levels = Levels::new(ranks);
    let for_nodes = (0..levels.groups.len()).map(|node| pairwise::reduce_scatter(&levels.within_for(node)));
    with_messages([Round::merged(for_nodes), pairwise::reduce_scatter(&levels.across_by_rank())])
}

/// Copies every part to the ranks in its owner's position on all nodes, and from these within the nodes.
pub(super) fn all_gather(ranks: Ranks<'_>) -> Vec<Round> {
    let levels = Levels::new(ranks);
    let of_nodes = (0..levels.groups.len()).map(|node| pairwise::all_gather(&levels.within_for(node)));
    with_messages([pairwise::all_gather(&levels.across_by_rank()), Round::merged(of_nodes)])
}

/// Leaves out the rounds of a level with one rank.
fn with_messages(rounds: impl IntoIterator<Item = Round>) -> Vec<Round> {
    rounds.into_iter().filter(|round| !round.receives.is_empty()).collect()
}
