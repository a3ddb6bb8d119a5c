//! Direct and pairwise exchange, in which every message goes straight to its destination. The one
//! or two rounds need no attention from the sender, so they overlap with computation, and sums are
//! formed in the order of [`Subtrees`](crate::sums::Subtrees), where all terms arrive.

use std::ops::Range;
use std::rc::Rc;

use super::plan::{Combine, Members, Receive, Round, Send};

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
    round.combines.push(Combine { parts, inbox: 0, num_received, own, merges });
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
