//! The types of a plan: [`Algorithm`], [`Collective`], and the rounds of messages between two ranks
//! and of sums that make up a [`Plan`].

use std::fmt;
use std::ops::Range;
use std::rc::Rc;

use clap::ValueEnum;

use crate::sums::Subtrees;
use crate::trace::Name;

/// An algorithm by which a collective operation moves and combines values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, ValueEnum)]
pub enum Algorithm {
    /// MPI's own operation.
    Mpi,
    /// Every rank sends its whole buffer to every other, in one round. Sums are in the order of
    /// [`Subtrees`].
    Direct,
    /// Every part travels straight to its owner, and the sum straight to everyone, in two rounds
    /// (pairwise exchange: Thakur, Rabenseifner and Gropp, IJHPCA 19 (2005), §4.3). Sums are in
    /// the same order as those of [`Algorithm::Direct`].
    Pairwise,
    /// Parts travel round a ring: every rank exchanges messages with two others only (Patarasuk and
    /// Yuan, JPDC 69 (2009)).
    Ring,
    /// Recursive halving, then recursive doubling, with as many rounds as the logarithm of the
    /// number of ranks (Rabenseifner, ICCS 2004).
    Halving,
    /// Recursive doubling of whole buffers, for short buffers (Thakur, Rabenseifner and Gropp,
    /// §4.5).
    Doubling,
    /// Pairwise within every node, and among the ranks of different nodes that own the same parts, so that a
    /// value crosses from one node to another once. On nodes of a power of two of consecutive ranks, sums
    /// are in the same order as those of [`Algorithm::Direct`].
    TwoLevel,
    /// A binomial tree, for short broadcasts.
    Tree,
    /// Every rank sends to the next, chunk after chunk, for long broadcasts.
    Chain,
    /// Ranks of a node map each other's device memory (CUDA IPC), and one of each device reads and writes
    /// the buffers of all; between nodes, these exchange messages. Sums are in the same order as those of
    /// [`Algorithm::Direct`].
    Ipc,
}

impl Algorithm {
    /// Returns true if the algorithm has a plan for `collective`.
    pub fn plans(self, collective: Collective) -> bool {
        use Algorithm::*;
        match collective {
            Collective::AllReduce => matches!(self, Direct | Pairwise | Ring | Halving | Doubling | TwoLevel),
            Collective::ReduceScatter | Collective::AllGather => matches!(self, Pairwise | Ring | TwoLevel),
            Collective::Broadcast { .. } => matches!(self, Tree | Chain | Pairwise),
        }
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.to_possible_value().as_ref().map_or("", |value| value.get_name()))
    }
}

/// A collective operation in place that can follow a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Collective {
    /// Leaves the combination of all buffers in every buffer.
    AllReduce,
    /// Leaves part r of the combination in part r of the buffer of rank r.
    ReduceScatter,
    /// Leaves part r of the buffer of rank r in part r of every buffer.
    AllGather,
    /// Leaves the root's buffer in every buffer.
    Broadcast {
        /// The rank whose buffer is copied.
        root: usize,
    },
}

impl Collective {
    /// Returns the operation's name in traces.
    pub(in crate::comm) fn name(self) -> Name {
        match self {
            Collective::AllReduce => Name::AllReduce,
            Collective::ReduceScatter => Name::ReduceScatter,
            Collective::AllGather => Name::AllGather,
            Collective::Broadcast { .. } => Name::Broadcast,
        }
    }

    /// Returns true if part r belongs to rank r.
    pub(in crate::comm) fn is_owned(self) -> bool {
        matches!(self, Collective::ReduceScatter | Collective::AllGather)
    }

    /// Returns the elements that rank `rank` of `size` sends, and those that change there, of `len`.
    pub(in crate::comm) fn ranges(self, rank: usize, size: usize, len: usize) -> [Range<usize>; 2] {
        let part = len / size;
        let own = rank * part..(rank + 1) * part;
        match self {
            Collective::AllReduce => [0..len, 0..len],
            Collective::ReduceScatter => [0..len, own],
            Collective::AllGather => [own, 0..len],
            Collective::Broadcast { root } if root == rank => [0..len, 0..0],
            Collective::Broadcast { .. } => [0..0, 0..len],
        }
    }

    /// Returns the operation in which each node, of `on_node` consecutive ranks, is one rank.
    pub(in crate::comm) fn of_nodes(self, on_node: usize) -> Collective {
        match self {
            Collective::Broadcast { root } => Collective::Broadcast { root: root / on_node },
            other => other,
        }
    }
}

/// A rank of a group, with the node of every rank of the group.
#[derive(Debug, Clone, Copy)]
pub(in crate::comm) struct Ranks<'a> {
    pub(in crate::comm) rank: usize,
    /// The sums that the ranks add up.
    pub(in crate::comm) subtrees: Subtrees,
    /// The node of every rank.
    pub(in crate::comm) nodes: &'a [usize],
}

/// One rank's messages and sums in a collective operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::comm) struct Plan {
    /// The number of parts into which the buffer is cut.
    pub(in crate::comm) parts: usize,
    /// The length of the inbox, in parts.
    pub(in crate::comm) inbox: usize,
    pub(in crate::comm) rounds: Vec<Round>,
}

/// Messages that travel at the same time, and the combinations that follow when all have arrived.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(in crate::comm) struct Round {
    pub(in crate::comm) receives: Vec<Receive>,
    pub(in crate::comm) sends: Vec<Send>,
    pub(in crate::comm) combines: Vec<Combine>,
}

/// Parts of the buffer for another rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::comm) struct Send {
    pub(in crate::comm) to: usize,
    /// The subtree of this rank whose sum is sent.
    pub(in crate::comm) subtree: usize,
    pub(in crate::comm) parts: Range<usize>,
}

/// Parts of another rank's buffer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::comm) struct Receive {
    pub(in crate::comm) from: usize,
    pub(in crate::comm) parts: Range<usize>,
    /// The position in the inbox, in parts; `None` if the parts are received into the buffer
    /// itself.
    pub(in crate::comm) inbox: Option<usize>,
}

/// The combination of parts of the buffer with terms in the inbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::comm) struct Combine {
    pub(in crate::comm) parts: Range<usize>,
    /// The position of the first term in the inbox, in parts.
    pub(in crate::comm) inbox: usize,
    /// The number of terms in the inbox, which follow each other and have equal numbers of parts.
    pub(in crate::comm) num_received: usize,
    /// The positions of this rank's own terms among all.
    pub(in crate::comm) own: Range<usize>,
    /// For each term, the number of sums before it that it is combined with, the nearest first.
    pub(in crate::comm) merges: Rc<[usize]>,
}

impl Plan {
    /// Returns the plan with rank `rank(r)` in the place of rank r.
    pub(in crate::comm) fn with_ranks(mut self, rank: impl Fn(usize) -> usize) -> Plan {
        for round in &mut self.rounds {
            round.receives.iter_mut().for_each(|receive| receive.from = rank(receive.from));
            round.sends.iter_mut().for_each(|send| send.to = rank(send.to));
        }
        self
    }
}

impl Round {
    /// Makes a round in which `parts` arrive from `from` and are combined with this rank's own.
    pub(super) fn combine_from(from: usize, parts: Range<usize>) -> Round {
        let receive = Receive { from, parts: parts.clone(), inbox: Some(0) };
        Round {
            receives: vec![receive],
            sends: Vec::new(),
            combines: vec![Combine { parts, inbox: 0, num_received: 1, own: 0..1, merges: Rc::new([0, 1]) }],
        }
    }

    /// Makes a round in which `parts` arrive from `from` in the buffer.
    pub(super) fn receive_from(from: usize, parts: Range<usize>) -> Round {
        Round { receives: vec![Receive { from, parts, inbox: None }], ..Round::default() }
    }

    /// Makes one round of several, whose terms then have places of their own in the inbox.
    pub(super) fn merged(rounds: impl IntoIterator<Item = Round>) -> Round {
        let (mut merged, mut inbox) = (Round::default(), 0);
        for mut round in rounds {
            let len = round.inbox_len();
            round
                .receives
                .iter_mut()
                .filter_map(|receive| receive.inbox.as_mut())
                .for_each(|at| *at += inbox);
            round.combines.iter_mut().for_each(|combine| combine.inbox += inbox);
            inbox += len;
            merged.receives.append(&mut round.receives);
            merged.sends.append(&mut round.sends);
            merged.combines.append(&mut round.combines);
        }
        merged
    }

    /// Returns the length of the inbox, in parts.
    pub(super) fn inbox_len(&self) -> usize {
        let ends = self.receives.iter().filter_map(|receive| Some(receive.inbox? + receive.parts.len()));
        ends.max().unwrap_or_default()
    }

    /// Adds a message of `parts` to `to`.
    pub(super) fn and_send(mut self, to: usize, parts: Range<usize>) -> Round {
        self.sends.push(Send { to, subtree: 0, parts });
        self
    }
}

/// The ranks that take part in some rounds, and the consecutive parts that each of them owns.
#[derive(Debug, Clone)]
pub(super) struct Members {
    pub(super) ranks: Vec<usize>,
    /// This rank's position among the members.
    pub(super) me: usize,
    pub(super) owned: Vec<Range<usize>>,
    /// The sums that the members add up.
    pub(super) subtrees: Subtrees,
}

impl Members {
    /// Returns all ranks, each with the part of its number.
    pub(super) fn all(rank: usize, subtrees: Subtrees, size: usize) -> Members {
        Members {
            subtrees,
            ranks: (0..size).collect(),
            me: rank,
            owned: (0..size).map(|part| part..part + 1).collect(),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.ranks.len()
    }
}
