//! The description of an operation: its task, the elements that it sends and changes, its name in
//! traces, and the MPI call that starts it if it follows no plan.
#![allow(unsafe_code)]

use std::ops::Range;
use std::rc::Rc;

use super::rounds::num_lanes;
use crate::comm::algorithm::{Collective, Cut, NodeWork, Plan};
use crate::comm::group::{Group, NodePeers};
use crate::comm::mpi::{Channel, Handle, Mode, Requests, Values};
use crate::memory::{Needs, Operation};
use crate::trace::{Flight, Name};

/// The work of an operation.
pub(in crate::comm) enum Task {
    /// A message to another rank.
    Send { to: usize, tag: i32 },
    /// A message from another rank.
    Receive { from: usize, tag: i32 },
    /// MPI's own collective operation, in place.
    Mpi(Collective),
    /// Work on device memory that the ranks of a node map, shared by those that lead a device. It may go
    /// `across` nodes.
    Peers { collective: Collective, peers: NodePeers, across: Option<AcrossNodes> },
    /// A message between ranks of a node that map each other's device memory: one copy, by the receiver.
    PeerCopy { from: usize, to: usize, tag: i32 },
    /// A plan in rounds.
    Rounds { collective: Collective, plan: Rc<Plan>, cut: Cut },
}

/// The part of an operation that goes across nodes.
pub(in crate::comm) struct AcrossNodes {
    /// The share of this rank, if it leads a device.
    pub(in crate::comm) share: Option<Rc<AcrossShare>>,
    /// The number of tags of the leader with the most elements.
    pub(in crate::comm) num_tags: usize,
}

/// A leader's work, and its messages with the leaders in its place on the other nodes.
pub(in crate::comm) struct AcrossShare {
    pub(in crate::comm) work: NodeWork,
    pub(in crate::comm) plan: Rc<Plan>,
    pub(in crate::comm) cut: Cut,
    /// The elements of the buffer that this node sends.
    pub(in crate::comm) send_range: Range<usize>,
    /// The elements of the buffer that messages change.
    pub(in crate::comm) receive_range: Range<usize>,
}

/// An operation on a buffer.
pub(in crate::comm) struct Request {
    pub(in crate::comm) task: Task,
    /// The reduction, if there is one.
    pub(in crate::comm) operation: Option<Operation>,
    /// The elements of the buffer that other ranks get.
    pub(in crate::comm) send_range: Range<usize>,
    /// The elements of the buffer that change.
    pub(in crate::comm) receive_range: Range<usize>,
}

impl Request {
    /// Returns true if the operation is a single MPI call, so that on host memory MPI alone
    /// advances it.
    pub(in crate::comm) fn is_one_call(&self) -> bool {
        let is_many = matches!(self.task, Task::Peers { .. } | Task::PeerCopy { .. } | Task::Rounds { .. });
        !is_many && !matches!(self.task, Task::Mpi(Collective::ReduceScatter))
    }

    /// Returns the plan of messages and the cut of the buffer, if there is one.
    fn plan(&self) -> Option<(&Rc<Plan>, Cut)> {
        match &self.task {
            Task::Rounds { plan, cut, .. } => Some((plan, *cut)),
            Task::Peers { across: Some(AcrossNodes { share: Some(share), .. }), .. } => {
                Some((&share.plan, share.cut))
            }
            _ => None,
        }
    }

    /// Returns the cut of a buffer of `len` elements.
    pub(super) fn cut(&self, len: usize) -> Cut {
        self.plan().map_or(Cut::whole(len), |(_, cut)| cut)
    }

    /// Returns the requirements of the operation on a buffer of `len` elements.
    pub(in crate::comm) fn needs(&self, len: usize, is_cuda_aware: bool) -> Needs {
        let inbox_len =
            self.plan().map_or(0, |(plan, cut)| plan.inbox * cut.largest_part() * num_lanes(&cut));
        let num_chunks = self.cut(len).chunks();
        Needs { num_chunks, inbox_len, operation: self.operation, is_cuda_aware }
    }

    /// Returns the next name for an operation of this kind in traces. Collective if the operation
    /// is.
    pub(in crate::comm) fn link(&self, group: &Group) -> i64 {
        match self.task {
            Task::Send { to, tag } => group.links.message(group.mpi.rank, to, tag),
            Task::Receive { from, tag } => group.links.message(from, group.mpi.rank, tag),
            Task::PeerCopy { from, to, tag } => group.links.message(from, to, tag),
            Task::Mpi(_) | Task::Peers { .. } | Task::Rounds { .. } => group.links.collective(),
        }
    }

    /// Begins the flight of the operation, which moves `bytes` on this rank.
    pub(in crate::comm) fn flight(&self, group: &Group, link: i64, bytes: usize) -> Flight {
        let (name, peer) = match &self.task {
            Task::Send { to, .. } => (Name::Send, group.in_job(*to)),
            Task::Receive { from, .. } => (Name::Receive, group.in_job(*from)),
            Task::PeerCopy { from, to, .. } if *from == group.mpi.rank => (Name::Send, group.in_job(*to)),
            Task::PeerCopy { from, .. } => (Name::Receive, group.in_job(*from)),
            Task::Mpi(collective) | Task::Peers { collective, .. } | Task::Rounds { collective, .. } => {
                (collective.name(), None)
            }
        };
        Flight::start(name, bytes, link, peer)
    }

    /// Starts the MPI call on `values`; a reduce-scatter writes its part to `sums`.
    ///
    /// # Safety
    /// Both are valid, and nobody else touches them, until the requests are complete.
    pub(in crate::comm) unsafe fn post(&self, mpi: &Handle, values: Values, sums: Values) -> Requests {
        let mut requests = mpi.requests();
        let mode = Mode::Started(&mut requests);
        let operation = self.operation.unwrap_or(Operation::Sum);
        // SAFETY: the caller keeps the values valid; ranks and lengths were checked before.
        unsafe {
            match self.task {
                Task::Send { to, tag } => mpi.send(&mut requests, Channel::Public, values, to, tag),
                Task::Receive { from, tag } => mpi.receive(&mut requests, Channel::Public, values, from, tag),
                Task::Mpi(Collective::AllReduce) => mpi.all_reduce(mode, None, values, operation),
                Task::Mpi(Collective::AllGather) => mpi.all_gather(mode, None, values),
                Task::Mpi(Collective::Broadcast { root }) => mpi.broadcast(mode, values, root),
                Task::Mpi(Collective::ReduceScatter) => mpi.reduce_scatter(mode, values, sums, operation),
                Task::Peers { .. } | Task::PeerCopy { .. } | Task::Rounds { .. } => {
                    unreachable!("these are many calls")
                }
            }
        }
        requests
    }
}
