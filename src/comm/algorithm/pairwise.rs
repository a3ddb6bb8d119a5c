//! Direct and pairwise exchange, in which every message goes straight to its destination. The one
//! or two rounds need no attention from the sender, so they overlap with computation, and sums are
//! formed in the order of [`Subtrees`], where all terms arrive. The two-level all-reduce is made of
//! pairwise exchanges.

use std::ops::Range;
use std::rc::Rc;

use super::plan::{Combine, Members, Ranks, Receive, Round, Send};
use crate::sums::Subtrees;

/// Returns the destination and the source of each step of an exchange with everyone, rotated so
/// that the ranks do not all send to the same one at once.
fn partners(me: usize, size: usize) -> impl Iterator<Item = (usize, usize)> {
    (1..size).map(move |step| ((me + step) % size, (me + size - step) % size))
}

/// Sends whole buffers to everyone.
pub(super) fn everything(members: &Members) -> Round {
    let all = 0..members.len();
    exchange_terms(members, |_| all.clone())
}

/// Sends every part to its owner, who sums the terms.
pub(super) fn reduce_scatter(members: &Members) -> Round {
    exchange_terms(members, |member| members.owned[member].clone())
}

/// Sends to every member the parts that it combines, a message for each sum of this rank.
fn exchange_terms(members: &Members, parts_of: impl Fn(usize) -> Range<usize>) -> Round {
    let Members { me, subtrees, .. } = *members;
    let parts = parts_of(me);
    let first_of = |member: usize| (0..member).map(|before| subtrees.of_rank(before)).sum::<usize>();
    let own = first_of(me)..first_of(me + 1);
    let merges: Rc<[usize]> = subtrees.merges().into();
    let num_received = merges.len() - own.len();
    let mut round = Round::default();
    for (to, from) in partners(me, members.len()) {
        let (to, parts_there) = (members.ranks[to], parts_of(to));
        for term in first_of(from)..first_of(from + 1) {
            let slot = if from < me { term } else { term - own.len() };
            let (from, inbox) = (members.ranks[from], Some(slot * parts.len()));
            round.receives.push(Receive { from, parts: parts.clone(), inbox });
        }
        for subtree in 0..own.len() {
            round.sends.push(Send { to, subtree, parts: parts_there.clone() });
        }
    }
    round.combine = Some(Combine { parts, num_received, own, merges });
    round
}

/// Sends every owner's parts to everyone.
pub(super) fn all_gather(members: &Members) -> Round {
    let mut round = Round::default();
    for (to, from) in partners(members.me, members.len()) {
        round.receives.push(Receive {
            from: members.ranks[from],
            parts: members.owned[from].clone(),
            inbox: None,
        });
        let parts = members.owned[members.me].clone();
        round.sends.push(Send { to: members.ranks[to], subtree: 0, parts });
    }
    round
}

/// Sends the root's parts, each to its owner.
pub(super) fn scatter(members: &Members, root: usize) -> Round {
    if members.me != root {
        return Round::receive_from(root, members.owned[members.me].clone());
    }
    let send = |(to, _): (usize, usize)| Send { to, subtree: 0, parts: members.owned[to].clone() };
    Round { sends: partners(root, members.len()).map(send).collect(), ..Round::default() }
}

/// All-reduces within every node, among the owners of the same parts on all nodes, and within the
/// node again. If nodes have different numbers of ranks, all ranks are treated as one node.
pub(super) fn two_level(ranks: Ranks<'_>) -> Vec<Round> {
    let Ranks { rank, nodes, .. } = ranks;
    let size = nodes.len();
    let of_node = |node: usize| -> Vec<usize> { (0..size).filter(|&rank| nodes[rank] == node).collect() };
    let mut names: Vec<usize> = nodes.to_vec();
    names.sort_unstable();
    names.dedup();
    let mut groups: Vec<Vec<usize>> = names.into_iter().map(of_node).collect();
    if groups.iter().any(|group| group.len() != groups[0].len()) {
        groups = vec![(0..size).collect()];
    }
    let (num_nodes, per_node) = (groups.len(), groups[0].len());
    let node = groups.iter().position(|group| group.contains(&rank)).unwrap_or_default();
    let local = groups[node].iter().position(|&other| other == rank).unwrap_or_default();
    let block = |local: usize| -> Range<usize> { local * num_nodes..(local + 1) * num_nodes };
    let within = Members {
        ranks: groups[node].clone(),
        me: local,
        owned: (0..per_node).map(block).collect(),
        subtrees: Subtrees::one_each(per_node),
    };
    let peers = groups.iter().map(|group| group[local]).collect();
    let across = Members {
        ranks: peers,
        me: node,
        owned: block(local).map(|part| part..part + 1).collect(),
        subtrees: Subtrees::one_each(num_nodes),
    };
    let rounds = [reduce_scatter(&within), reduce_scatter(&across), all_gather(&across), all_gather(&within)];
    rounds.into_iter().filter(|round| !round.receives.is_empty()).collect()
}
