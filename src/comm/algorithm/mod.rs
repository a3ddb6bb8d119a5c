//! Collective operations as data: what one rank sends, receives and combines, round by round, without a word of MPI.
//!
//! A buffer is cut into *parts*. A [`Plan`] says for one rank, in terms of parts, which messages each round has and what is
//! combined when they have come; it knows neither the length of the buffer nor where it is, so one plan serves host and device
//! memory, and every chunk of a long buffer. The lengths come from a [`Cut`], the memory from who runs it
//! ([`progress`](super::progress)).
//!
//! Invariants, which the tests check for every algorithm on 1 to 17 ranks by running the plans of all ranks against each other:
//! what one rank sends in a round, another receives, in the order of their rounds; within a round nothing is sent from where
//! something is received; and the order in which the terms of a sum are combined depends on the algorithm, the number of ranks and
//! the cut alone, so a sum has the same bits on every rank and in every run.

mod cut;
mod doubling;
mod pairwise;
mod ring;
#[cfg(test)]
mod tests;
mod tree;

use std::fmt;
use std::ops::Range;

pub(super) use cut::Cut;

use crate::trace::Name;

/// How a collective operation moves and combines values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Algorithm {
    /// MPI's own.
    Mpi,
    /// MPI's own call that blocks, where on a device's memory the other one crashes: to compare with.
    MpiBlocking,
    /// Everything straight to where it is wanted, in one round: for an all-reduce, everything to everyone. Sums are in rank order.
    Direct,
    /// Every part straight to its owner and the sum straight to everyone, in two rounds (pairwise exchange: Thakur, Rabenseifner and
    /// Gropp, IJHPCA 19 (2005), §4.3). Sums are in rank order: the same bits as [`Algorithm::Direct`].
    Pairwise,
    /// Round the ring, a part at a time: every rank talks to two others only (Patarasuk and Yuan, JPDC 69 (2009)).
    Ring,
    /// Recursive halving, then recursive doubling, with as many rounds as the logarithm of the number of ranks (Rabenseifner, ICCS
    /// 2004).
    Halving,
    /// Recursive doubling of whole buffers, for short ones (Thakur, Rabenseifner and Gropp, §4.5).
    Doubling,
    /// Pairwise within every node, then among the ranks of different nodes that own the same parts, then within the node again.
    TwoLevel,
    /// A binomial tree, for short broadcasts.
    Tree,
    /// From each rank to the next, chunk after chunk, for long broadcasts.
    Chain,
}

impl Algorithm {
    /// All, with their names on the command line.
    pub const ALL: [(Algorithm, &'static str); 10] = [
        (Algorithm::Mpi, "mpi"),
        (Algorithm::MpiBlocking, "mpi-blocking"),
        (Algorithm::Direct, "direct"),
        (Algorithm::Pairwise, "pairwise"),
        (Algorithm::Ring, "ring"),
        (Algorithm::Halving, "halving"),
        (Algorithm::Doubling, "doubling"),
        (Algorithm::TwoLevel, "two-level"),
        (Algorithm::Tree, "tree"),
        (Algorithm::Chain, "chain"),
    ];

    /// True if there is a plan of it for `collective`.
    pub fn plans(self, collective: Collective) -> bool {
        use Algorithm::*;
        match collective {
            Collective::AllReduce => matches!(self, Direct | Pairwise | Ring | Halving | Doubling | TwoLevel),
            Collective::ReduceScatter | Collective::AllGather => matches!(self, Pairwise | Ring),
            Collective::Broadcast { .. } => matches!(self, Tree | Chain | Pairwise),
        }
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(Algorithm::ALL[*self as usize].1)
    }
}

/// What is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Collective {
    /// The combination of all buffers, in every buffer.
    AllReduce,
    /// Part r of the combination, in part r of the buffer of rank r.
    ReduceScatter,
    /// Part r of the buffer of rank r, in part r of every buffer.
    AllGather,
    /// The root's buffer, in every buffer.
    Broadcast {
        /// Whose it is.
        root: usize,
    },
}

impl Collective {
    /// As traces call it.
    pub(super) fn name(self) -> Name {
        match self {
            Collective::AllReduce => Name::AllReduce,
            Collective::ReduceScatter => Name::ReduceScatter,
            Collective::AllGather => Name::AllGather,
            Collective::Broadcast { .. } => Name::Broadcast,
        }
    }

    /// True if part r belongs to rank r.
    pub(super) fn is_owned(self) -> bool {
        matches!(self, Collective::ReduceScatter | Collective::AllGather)
    }
}

/// The ranks of a group, and where they are.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ranks<'a> {
    pub(super) rank: usize,
    /// The node of every rank.
    pub(super) nodes: &'a [usize],
}

/// What one rank does in a collective operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Plan {
    /// Into how many parts the buffer is cut.
    pub(super) parts: usize,
    /// How much memory there must be for what arrives, in parts.
    pub(super) inbox: usize,
    pub(super) rounds: Vec<Round>,
}

/// Messages that travel at once, and what is combined when all have come.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Round {
    pub(super) receives: Vec<Receive>,
    pub(super) sends: Vec<Send>,
    pub(super) combine: Option<Combine>,
}

/// Parts of the buffer for another rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Send {
    pub(super) to: usize,
    pub(super) parts: Range<usize>,
}

/// Parts of another rank's buffer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Receive {
    pub(super) from: usize,
    pub(super) parts: Range<usize>,
    /// Where in the inbox they go, in parts; into the buffer itself if nowhere.
    pub(super) inbox: Option<usize>,
}

/// Parts of the buffer become their combination with as many in the inbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Combine {
    pub(super) parts: Range<usize>,
    /// The terms are one after the other in the inbox, each as many parts.
    pub(super) terms: usize,
    /// The place of this rank's own term among them.
    pub(super) own: usize,
}

impl Round {
    /// The round in which `parts` come from `from`, to be combined with this rank's own.
    fn combine_from(from: usize, parts: Range<usize>) -> Round {
        let receive = Receive { from, parts: parts.clone(), inbox: Some(0) };
        Round {
            receives: vec![receive],
            sends: Vec::new(),
            combine: Some(Combine { parts, terms: 1, own: 0 }),
        }
    }

    /// The round in which `parts` come from `from` to stay.
    fn receive_from(from: usize, parts: Range<usize>) -> Round {
        Round { receives: vec![Receive { from, parts, inbox: None }], ..Round::default() }
    }

    /// This round, with `parts` going to `to` meanwhile.
    fn and_send(mut self, to: usize, parts: Range<usize>) -> Round {
        self.sends.push(Send { to, parts });
        self
    }
}

/// The ranks that take part in some rounds, and the parts that each of them owns, one after the other.
#[derive(Debug, Clone)]
struct Members {
    ranks: Vec<usize>,
    /// This rank's place among them.
    me: usize,
    owned: Vec<Range<usize>>,
}

impl Members {
    /// All ranks, each with the part of its number.
    fn all(rank: usize, size: usize) -> Members {
        Members {
            ranks: (0..size).collect(),
            me: rank,
            owned: (0..size).map(|part| part..part + 1).collect(),
        }
    }

    fn len(&self) -> usize {
        self.ranks.len()
    }
}

/// What rank `ranks.rank` does; `algorithm` must have a plan for `collective`.
pub(super) fn plan(collective: Collective, algorithm: Algorithm, ranks: Ranks<'_>) -> Plan {
    let (rank, size) = (ranks.rank, ranks.nodes.len());
    let members = Members::all(rank, size);
    let then = |mut first: Vec<Round>, second: Vec<Round>| {
        first.extend(second);
        first
    };
    let (mut parts, mut rounds) = (size, Vec::new());
    if size > 1 {
        rounds = match (collective, algorithm) {
            (Collective::AllReduce, Algorithm::Direct) => vec![pairwise::everything(rank, size)],
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
            (Collective::AllReduce, Algorithm::TwoLevel) => pairwise::two_level(ranks),
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
    let room = |round: &Round| round.receives.iter().filter_map(|r| Some(r.inbox? + r.parts.len())).max();
    let inbox = rounds.iter().filter_map(room).max().unwrap_or_default();
    Plan { parts, inbox, rounds }
}
