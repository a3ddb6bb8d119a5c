//! Reduce-scatter and all-gather around a ring: at any time every rank sends one part, and every
//! rank exchanges messages with its two neighbours only.

use super::plan::{Members, Round};

/// Leaves with each member the sum of the parts that it owns: a part starts at the member after its
/// owner, and each member that it passes adds its own term.
pub(super) fn reduce_scatter(members: &Members) -> Vec<Round> {
    let (me, size) = (members.me, members.len());
    let (next, previous) = (members.ranks[(me + 1) % size], members.ranks[(me + size - 1) % size]);
    let of = |distance: usize| members.owned[(me + size - distance) % size].clone();
    (1..size).map(|round| Round::combine_from(previous, of(round + 1)).and_send(next, of(round))).collect()
}

/// Leaves the parts that each member owns with all members.
pub(super) fn all_gather(members: &Members) -> Vec<Round> {
    let (me, size) = (members.me, members.len());
    let (next, previous) = (members.ranks[(me + 1) % size], members.ranks[(me + size - 1) % size]);
    let of = |distance: usize| members.owned[(me + size - distance) % size].clone();
    (1..size).map(|round| Round::receive_from(previous, of(round)).and_send(next, of(round - 1))).collect()
}
