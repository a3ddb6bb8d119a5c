//! The operations that can be measured, one file for each: its name, the bytes that it moves, the
//! values that it should give, and the calls that run it.

mod all_gather;
mod all_reduce;
mod all_to_all;
mod broadcast;
mod gather;
mod reduce;
mod reduce_scatter;
mod scatter;
mod send_receive;

use std::ops::Range;

use super::buffers::{DeviceBuffers, DevicePending, Geometry, HostBuffers};
use super::{CallForm, Meanwhile};
use crate::Result;
use crate::comm::{Collective, Communicator, Transfers};

/// All operations, in the order in which they are measured.
pub static OPERATIONS: [Measured; 9] = [
    &send_receive::SEND_RECEIVE,
    &broadcast::BROADCAST,
    &scatter::SCATTER,
    &gather::GATHER,
    &all_gather::ALL_GATHER,
    &all_to_all::ALL_TO_ALL,
    &reduce::REDUCE,
    &all_reduce::ALL_REDUCE,
    &reduce_scatter::REDUCE_SCATTER,
];

/// One of [`OPERATIONS`].
pub type Measured = &'static MeasuredOperation;

/// Returns the operation called `name`.
pub fn operation_named(name: &str) -> Option<Measured> {
    OPERATIONS.into_iter().find(|operation| operation.name == name)
}

/// An operation that can be measured. Its functions that communicate are collective and fail if
/// there is no memory for messages.
#[derive(Debug)]
pub struct MeasuredOperation {
    /// The name on the command line and in results.
    pub name: &'static str,
    /// The purpose in a few words.
    pub description: &'static str,
    /// Returns, for a number of ranks, the bus bandwidth over the algorithm bandwidth, as
    /// nccl-tests define them (doc/PERFORMANCE.md there): the bytes that the busiest link must
    /// carry, over the size of the buffer.
    pub(super) bus_factor: fn(usize) -> f64,
    /// True if the buffer consists of a part for each rank.
    pub(super) has_parts: bool,
    /// Returns the elements of the buffer that this rank sends.
    pub(super) sent: fn(&Geometry) -> Range<usize>,
    /// Returns the elements of the result that MPI defines on this rank.
    pub(super) received: fn(&Geometry) -> Range<usize>,
    /// Returns the expected value of an element of the result.
    pub(super) expected: fn(&Geometry, usize) -> f32,
    /// Returns true if the operation has this form on host memory.
    pub(super) exists: fn(CallForm) -> bool,
    /// Returns the collective operation whose algorithm can be chosen, if this form has any but
    /// MPI's own.
    pub(super) planned: fn(CallForm) -> Option<Collective>,
    /// Runs the operation with the blocking call.
    pub(super) run: fn(&Communicator, &Geometry, &mut HostBuffers) -> Result<()>,
    /// Starts the operation, does other work meanwhile, and waits for it.
    pub(super) start: StartOnHost,
    /// The operation on device memory, if it exists there.
    pub(super) on_device: Option<OnDevice>,
}

type StartOnHost = fn(&Communicator, &Geometry, CallForm, HostBuffers, Meanwhile<'_>) -> Result<HostBuffers>;

type StartOnDevice = fn(&Communicator, &Geometry, DeviceBuffers) -> Result<DevicePending>;

/// A measured operation on device memory.
#[derive(Debug)]
pub(super) struct OnDevice {
    /// True if the result replaces the values that are sent.
    pub is_in_place: bool,
    /// Returns true if MPI's own call can do the operation instead of a plan, where device memory
    /// becomes messages in this way.
    pub compares_with_mpi: fn(Transfers) -> bool,
    /// Returns true if programs could use MPI's own call, blocking (true) or not, so that `probe`
    /// tries it.
    pub is_tried: fn(bool) -> bool,
    /// Starts the operation.
    pub start: StartOnDevice,
}

impl MeasuredOperation {
    /// Returns the least number of elements that is at least `len` and can be divided as the
    /// operation demands on `size` ranks.
    pub fn round_up(&self, len: usize, size: usize) -> usize {
        if self.has_parts { len.next_multiple_of(size) } else { len }
    }

    /// Returns true if programs could use MPI's own call, blocking or not, on device memory.
    pub fn is_tried_on_device(&self, is_blocking: bool) -> bool {
        self.on_device.as_ref().is_some_and(|on_device| (on_device.is_tried)(is_blocking))
    }
}

impl PartialEq for MeasuredOperation {
    fn eq(&self, other: &MeasuredOperation) -> bool {
        self.name == other.name
    }
}

impl Eq for MeasuredOperation {}

/// Returns the fraction of the ranks that are not this one: the bus factor where each rank sends
/// all but its own part.
fn others(size: usize) -> f64 {
    (size as f64 - 1.0) / size as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_busiest_link_carries_what_nccl_tests_say() {
        let factors = |size| OPERATIONS.map(|operation| (operation.bus_factor)(size));
        assert_eq!(factors(4), [1.0, 1.0, 0.75, 0.75, 0.75, 0.75, 1.0, 1.5, 0.75]);
        assert_eq!((all_reduce::ALL_REDUCE.bus_factor)(1), 0.0);
    }

    #[test]
    fn every_rank_knows_what_to_expect() {
        let of = |name: &str, rank: usize| {
            let (operation, geometry) = (operation_named(name).unwrap(), Geometry { rank, size: 2, len: 4 });
            let expected = |at| (operation.expected)(&geometry, at);
            (operation.received)(&geometry).map(expected).collect::<Vec<f32>>()
        };
        // rank 0 has 1 2 3 4, rank 1 has 4 5 6 7
        assert_eq!(of("send-receive", 1), [1.0, 2.0, 3.0, 4.0]);
        assert_eq!(of("scatter", 1), [3.0, 4.0]);
        assert_eq!(of("gather", 0), [1.0, 2.0, 6.0, 7.0]);
        assert_eq!(of("all-to-all", 1), [3.0, 4.0, 6.0, 7.0]);
        assert_eq!(of("all-reduce", 0), [5.0, 7.0, 9.0, 11.0]);
        assert_eq!(of("reduce-scatter", 1), [9.0, 11.0]);
        assert!(of("reduce", 1).is_empty());
    }
}
