//! What can be done with a buffer of a device.

use super::algorithm::{Algorithm, Collective};
use super::direct::{Layout, Order};
use super::{Communicator, Operation, choice};
use crate::{Error, Result};

/// What is to be done with a message.
#[derive(Clone, Copy)]
pub(super) enum Action {
    Send { to: usize, tag: i32 },
    Receive { from: usize, tag: i32 },
    Broadcast { root: usize },
    AllReduce(Operation),
    AllReduceInPlace(Operation),
    ReduceScatter(Operation),
    AllGather,
}

impl Action {
    /// What the host's operation would check, and that reductions are sums: a device forms no others.
    pub(super) fn check(self, communicator: &Communicator, len: usize) -> Result<()> {
        match self {
            Action::Send { to, tag } => communicator.check_peer("sending", to, tag),
            Action::Receive { from, tag } => communicator.check_peer("receiving", from, tag),
            Action::Broadcast { root } => communicator.check_root("broadcasting", root),
            Action::ReduceScatter(operation) => {
                communicator.part_length("reduce-scattering", len)?;
                is_sum(operation)
            }
            Action::AllGather => communicator.part_length("all-gathering", len).map(drop),
            Action::AllReduce(operation) | Action::AllReduceInPlace(operation) => is_sum(operation),
        }
    }

    /// How it is done on `len` values of `bytes` each in the device's own memory.
    pub(super) fn direct(self, communicator: &Communicator, len: usize, bytes: usize) -> Order {
        let collective = match self {
            Action::Send { to, tag } => return Order::Send { to, tag },
            Action::Receive { from, tag } => return Order::Receive { from, tag },
            Action::Broadcast { root } => Collective::Broadcast { root },
            Action::AllReduce(_) | Action::AllReduceInPlace(_) => Collective::AllReduce,
            Action::ReduceScatter(_) => Collective::ReduceScatter,
            Action::AllGather => Collective::AllGather,
        };
        // MPI has no sums of bfloat16, and puts what it has reduced and scattered elsewhere
        let has_own = bytes == size_of::<f32>() && collective != Collective::ReduceScatter;
        if let (Some(call), true) = (communicator.raw.wants_mpi(), has_own) {
            communicator.raw.last_algorithm.set(call);
            return Order::Mpi { collective, is_blocking: call == Algorithm::MpiBlocking };
        }
        let choice = choice::on_device(collective, len * bytes, communicator.size());
        let choice = communicator.raw.override_plan(collective, choice);
        Order::Plan(Layout::new(communicator, collective, choice, len, bytes))
    }
}

fn is_sum(operation: Operation) -> Result<()> {
    let why = "on a device there are sums only";
    if operation == Operation::Sum { Ok(()) } else { Err(Error::failed(format!("reducing by {operation:?}"), why)) }
}
