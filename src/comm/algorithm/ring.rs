//! The ring: a part of every rank is on its way at any time, and every rank talks to its two
//! neighbours only.

use super::plan::{Members, Round};

/// Leaves the sum of the parts that a member owns with it: a part starts at the member after its
/// owner, and each member on its way adds its own.
pub(super) fn reduce_scatter(members: &Members) -> Vec<Round> {
    let (me, size) = (members.me, members.len());
    let (next, previous) = (members.ranks[(me + 1) % size], members.ranks[(me + size - 1) % size]);
    let of = |distance: usize| members.owned[(me + size - distance) % size].clone();
    (1..size).map(|round| Round::combine_from(previous, of(round + 1)).and_send(next, of(round))).collect()
}

/// Leaves the parts that each member owns with all.
pub(super) fn all_gather(members: &Members) -> Vec<Round> {
    let (me, size) = (members.me, members.len());
    let (next, previous) = (members.ranks[(me + 1) % size], members.ranks[(me + size - 1) % size]);
    let of = |distance: usize| members.owned[(me + size - distance) % size].clone();
    (1..size).map(|round| Round::receive_from(previous, of(round)).and_send(next, of(round - 1))).collect()
}
