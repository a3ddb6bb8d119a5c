//! Collective operations as data: the messages and sums of one rank, round by round, independent of
//! MPI.
//!
//! A buffer is cut into *parts*. A [`Plan`] lists for one rank, in terms of parts, the messages of
//! each round and the sums that follow them. It contains neither the length nor the address of the
//! buffer, so one plan serves host and device memory, and every chunk of a long buffer. The lengths
//! come from a [`Cut`], the memory from an [`Arena`](crate::memory::Arena), and `engine/rounds.rs`
//! runs a plan on them.
//!
//! Invariants, which the tests check for every algorithm on 1 to 17 ranks by running the plans of
//! all ranks against each other: every message that one rank sends in a round, another receives, in
//! the order of their rounds; within a round no part that is received is also sent; and the order
//! in which the terms of a sum are combined depends on the algorithm, the number of ranks, the
//! [`Subtrees`](crate::sums::Subtrees) that they add up and the cut, and in [`Algorithm::TwoLevel`] on the
//! node of each rank, but on nothing else, so a sum has the same bits on every rank and in every run.

mod choice;
mod cut;
mod doubling;
mod pairwise;
mod peers;
mod plan;
mod ring;
#[cfg(test)]
mod tests;
mod tree;
mod two_level;

pub use choice::{Call, Choice};
pub(super) use choice::{choose, choose_in_levels, choose_in_order};
pub(super) use cut::{Cut, common};
pub(super) use peers::{NodePlace, NodeWork, PeerWorks, has_one_leader, largest_share, node_work, peer_work};
use plan::Members;
pub use plan::{Algorithm, Collective};
pub(super) use plan::{Combine, Plan, Ranks, Round};

/// Returns the plan of rank `ranks.rank`; `algorithm` must have one for `collective`.
pub(super) fn plan(collective: Collective, algorithm: Algorithm, ranks: Ranks<'_>) -> Plan {
    let (rank, size) = (ranks.rank, ranks.nodes.len());
    let members = Members::all(rank, ranks.subtrees, size);
    let then = |mut first: Vec<Round>, second: Vec<Round>| {
        first.extend(second);
        first
    };
    let (mut parts, mut rounds) = (size, Vec::new());
    if size > 1 {
        rounds = match (collective, algorithm) {
            (Collective::AllReduce, Algorithm::Direct) => vec![pairwise::everything(&members)],
            (Collective::AllReduce, Algorithm::Pairwise) => {
                vec![pairwise::reduce_scatter(&members), pairwise::all_gather(&members)]
            }
            (Collective::AllReduce, Algorithm::Ring) => {
                then(ring::reduce_scatter(&members), ring::all_gather(&members))
            }
            (Collective::AllReduce, Algorithm::Halving) => {
                parts = doubling::power_of_two(size);
                doubling::with_power_of_two(rank, size, 0..parts, doubling::halving)
            }
            (Collective::AllReduce, Algorithm::Doubling) => {
                parts = 1;
                doubling::with_power_of_two(rank, size, 0..1, doubling::doubling)
            }
            (Collective::AllReduce, Algorithm::TwoLevel) => two_level::all_reduce(ranks),
            (Collective::ReduceScatter, Algorithm::TwoLevel) => two_level::reduce_scatter(ranks),
            (Collective::AllGather, Algorithm::TwoLevel) => two_level::all_gather(ranks),
            (Collective::ReduceScatter, Algorithm::Pairwise) => vec![pairwise::reduce_scatter(&members)],
            (Collective::ReduceScatter, Algorithm::Ring) => ring::reduce_scatter(&members),
            (Collective::AllGather, Algorithm::Pairwise) => vec![pairwise::all_gather(&members)],
            (Collective::AllGather, Algorithm::Ring) => ring::all_gather(&members),
            (Collective::Broadcast { root }, Algorithm::Tree) => {
                parts = 1;
                tree::binomial(rank, size, root)
            }
            (Collective::Broadcast { root }, Algorithm::Chain) => {
                parts = 1;
                tree::chain(rank, size, root)
            }
            (Collective::Broadcast { root }, Algorithm::Pairwise) => {
                vec![pairwise::scatter(&members, root), pairwise::all_gather(&members)]
            }
            (collective, algorithm) => unreachable!("there is no plan of {algorithm} for {collective:?}"),
        };
    }
    let inbox = rounds.iter().map(Round::inbox_len).max().unwrap_or_default();
    Plan { parts, inbox, rounds }
}
