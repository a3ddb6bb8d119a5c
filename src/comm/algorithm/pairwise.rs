//! Direct and pairwise exchange, in which every message goes straight to its destination. The one
//! or two rounds need no attention from the sender, so they overlap with computation, and sums are
//! formed in rank order, where all terms arrive. The two-level all-reduce is made of pairwise
//! exchanges.

use std::ops::Range;

use super::plan::{Combine, Members, Ranks, Receive, Round, Send};

/// Returns the destination and the source of each step of an exchange with everyone, rotated so
/// that the ranks do not all send to the same one at once.
fn partners(me: usize, size: usize) -> impl Iterator<Item = (usize, usize)> {
    (1..size).map(move |step| ((me + step) % size, (me + size - step) % size))
}

/// Sends whole buffers to everyone.
pub(super) fn everything(rank: usize, size: usize) -> Round {
    let mut round =
        Round { combine: Some(Combine { parts: 0..size, terms: size - 1, own: rank }), ..Round::default() };
    for (to, from) in partners(rank, size) {
        let slot = if from < rank { from } else { from - 1 };
        round.receives.push(Receive { from, parts: 0..size, inbox: Some(slot * size) });
        round.sends.push(Send { to, parts: 0..size });
    }
    round
}

/// Sends every part to its owner, who sums the terms.
pub(super) fn reduce_scatter(members: &Members) -> Round {
    let (me, own) = (members.me, members.owned[members.me].clone());
    let combine = Combine { parts: own.clone(), terms: members.len() - 1, own: me };
    let mut round = Round { combine: Some(combine), ..Round::default() };
    for (to, from) in partners(me, members.len()) {
        let slot = if from < me { from } else { from - 1 };
        let inbox = Some(slot * own.len());
        round.receives.push(Receive { from: members.ranks[from], parts: own.clone(), inbox });
        round.sends.push(Send { to: members.ranks[to], parts: members.owned[to].clone() });
    }
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
        round.sends.push(Send { to: members.ranks[to], parts: members.owned[members.me].clone() });
    }
    round
}

/// Sends the root's parts, each to its owner.
pub(super) fn scatter(members: &Members, root: usize) -> Round {
    if members.me != root {
        return Round::receive_from(root, members.owned[members.me].clone());
    }
    let send = |(to, _): (usize, usize)| Send { to, parts: members.owned[to].clone() };
    Round { sends: partners(root, members.len()).map(send).collect(), ..Round::default() }
}

/// All-reduces within every node, among the owners of the same parts on all nodes, and within the
/// node again. If nodes have different numbers of ranks, all ranks are treated as one node.
pub(super) fn two_level(ranks: Ranks<'_>) -> Vec<Round> {
    let Ranks { rank, nodes } = ranks;
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
    let within =
        Members { ranks: groups[node].clone(), me: local, owned: (0..per_node).map(block).collect() };
    let peers = groups.iter().map(|group| group[local]).collect();
    let across = Members { ranks: peers, me: node, owned: block(local).map(|part| part..part + 1).collect() };
    let rounds = [reduce_scatter(&within), reduce_scatter(&across), all_gather(&across), all_gather(&within)];
    rounds.into_iter().filter(|round| !round.receives.is_empty()).collect()
}
