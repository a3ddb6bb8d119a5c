//! What can be done with a buffer of a device.

use crate::comm::algorithm::{Algorithm, Collective};
use crate::comm::ongoing::{Layout, Order};
use crate::comm::{Communicator, Operation, Pending, Transfers, choice};
use crate::memory::HostBuffer;
use crate::{Error, Result};

/// What is to be done with a message.
#[derive(Clone, Copy)]
pub(super) enum Action {
    Send { to: usize, tag: i32 },
    Receive { from: usize, tag: i32 },
    Broadcast { root: usize },
    AllReduce(Operation),
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
            Action::AllReduce(operation) => is_sum(operation),
        }
    }

    /// Starts it on the processor's memory.
    pub(super) fn start<B: HostBuffer<f32>>(
        self,
        communicator: &Communicator,
        values: B,
    ) -> Result<Pending<B>> {
        match self {
            Action::Send { to, tag } => communicator.start_send(values, to, tag),
            Action::Receive { from, tag } => communicator.start_receive(values, from, tag),
            Action::Broadcast { root } => communicator.start_broadcast(values, root),
            Action::AllReduce(operation) => communicator.start_all_reduce_in_place(values, operation),
            Action::ReduceScatter(operation) => communicator.start_reduce_scatter(values, operation),
            Action::AllGather => communicator.start_all_gather_in_place(values),
        }
    }

    /// How it is done on `len` values of `bytes` each, in the device's own memory or in the host's.
    pub(super) fn order(
        self,
        communicator: &Communicator,
        transfers: Transfers,
        len: usize,
        bytes: usize,
    ) -> Order {
        let collective = match self {
            Action::Send { to, tag } => return Order::Send { to, tag },
            Action::Receive { from, tag } => return Order::Receive { from, tag },
            Action::Broadcast { root } => Collective::Broadcast { root },
            Action::AllReduce(_) => Collective::AllReduce,
            Action::ReduceScatter(_) => Collective::ReduceScatter,
            Action::AllGather => Collective::AllGather,
        };
        // MPI has no sums of bfloat16, and puts what it has reduced and scattered elsewhere
        let has_own = bytes == size_of::<f32>() && collective != Collective::ReduceScatter;
        if let (Some(call), true) = (communicator.raw.wants_mpi(), has_own) {
            communicator.raw.last_algorithm.set(call);
            // in the host's memory the call that does not block does as well
            let is_blocking = call == Algorithm::MpiBlocking && transfers == Transfers::Aware;
            return Order::Mpi { collective, is_blocking };
        }
        let choose = match transfers {
            Transfers::Aware => choice::on_device,
            Transfers::Staged => choice::staged,
        };
        let choice = choose(collective, len * bytes, communicator.size());
        let choice = communicator.raw.override_plan(collective, choice);
        Order::Plan(Layout::new(communicator, collective, choice, len, bytes))
    }
}

fn is_sum(operation: Operation) -> Result<()> {
    let why = "on a device there are sums only";
    if operation == Operation::Sum {
        Ok(())
    } else {
        Err(Error::failed(format!("reducing by {operation:?}"), why))
    }
}
