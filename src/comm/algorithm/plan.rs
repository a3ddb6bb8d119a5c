//! The parts of a plan: rounds of messages between two ranks, and sums of what they bring.

use std::fmt;
use std::ops::Range;

use crate::trace::Name;

/// How a collective operation moves and combines values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Algorithm {
    /// MPI's own.
    Mpi,
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
    pub const ALL: [(Algorithm, &'static str); 9] = [
        (Algorithm::Mpi, "mpi"),
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
    pub(in crate::comm) fn name(self) -> Name {
        match self {
            Collective::AllReduce => Name::AllReduce,
            Collective::ReduceScatter => Name::ReduceScatter,
            Collective::AllGather => Name::AllGather,
            Collective::Broadcast { .. } => Name::Broadcast,
        }
    }

    /// True if part r belongs to rank r.
    pub(in crate::comm) fn is_owned(self) -> bool {
        matches!(self, Collective::ReduceScatter | Collective::AllGather)
    }
}

/// The ranks of a group, and where they are.
#[derive(Debug, Clone, Copy)]
pub(in crate::comm) struct Ranks<'a> {
    pub(in crate::comm) rank: usize,
    /// The node of every rank.
    pub(in crate::comm) nodes: &'a [usize],
}

/// What one rank does in a collective operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::comm) struct Plan {
    /// Into how many parts the buffer is cut.
    pub(in crate::comm) parts: usize,
    /// How much memory there must be for what arrives, in parts.
    pub(in crate::comm) inbox: usize,
    pub(in crate::comm) rounds: Vec<Round>,
}

/// Messages that travel at once, and what is combined when all have come.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(in crate::comm) struct Round {
    pub(in crate::comm) receives: Vec<Receive>,
    pub(in crate::comm) sends: Vec<Send>,
    pub(in crate::comm) combine: Option<Combine>,
}

/// Parts of the buffer for another rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::comm) struct Send {
    pub(in crate::comm) to: usize,
    pub(in crate::comm) parts: Range<usize>,
}

/// Parts of another rank's buffer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::comm) struct Receive {
    pub(in crate::comm) from: usize,
    pub(in crate::comm) parts: Range<usize>,
    /// Where in the inbox they go, in parts; into the buffer itself if nowhere.
    pub(in crate::comm) inbox: Option<usize>,
}

/// Parts of the buffer become their combination with as many in the inbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::comm) struct Combine {
    pub(in crate::comm) parts: Range<usize>,
    /// The terms are one after the other in the inbox, each as many parts.
    pub(in crate::comm) terms: usize,
    /// The place of this rank's own term among them.
    pub(in crate::comm) own: usize,
}

impl Round {
    /// The round in which `parts` come from `from`, to be combined with this rank's own.
    pub(super) fn combine_from(from: usize, parts: Range<usize>) -> Round {
        let receive = Receive { from, parts: parts.clone(), inbox: Some(0) };
        Round {
            receives: vec![receive],
            sends: Vec::new(),
            combine: Some(Combine { parts, terms: 1, own: 0 }),
        }
    }

    /// The round in which `parts` come from `from` to stay.
    pub(super) fn receive_from(from: usize, parts: Range<usize>) -> Round {
        Round { receives: vec![Receive { from, parts, inbox: None }], ..Round::default() }
    }

    /// This round, with `parts` going to `to` meanwhile.
    pub(super) fn and_send(mut self, to: usize, parts: Range<usize>) -> Round {
        self.sends.push(Send { to, parts });
        self
    }
}

/// The ranks that take part in some rounds, and the parts that each of them owns, one after the other.
#[derive(Debug, Clone)]
pub(super) struct Members {
    pub(super) ranks: Vec<usize>,
    /// This rank's place among them.
    pub(super) me: usize,
    pub(super) owned: Vec<Range<usize>>,
}

impl Members {
    /// All ranks, each with the part of its number.
    pub(super) fn all(rank: usize, size: usize) -> Members {
        Members {
            ranks: (0..size).collect(),
            me: rank,
            owned: (0..size).map(|part| part..part + 1).collect(),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.ranks.len()
    }
}
