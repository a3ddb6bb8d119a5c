//! [`MeasuredOperation`]: the data and functions of an operation that can be measured.

use std::ops::Range;

use super::buffers::{DeviceBuffers, DevicePending, Geometry, HostBuffers};
use super::{CallForm, Meanwhile};
use crate::Result;
use crate::comm::{Collective, Communicator, Transfers};

/// One of [`OPERATIONS`](super::OPERATIONS).
pub type Measured = &'static MeasuredOperation;

/// An operation that can be measured. Its functions that communicate are collective and fail if
/// there is no memory for messages.
#[derive(Debug)]
pub struct MeasuredOperation {
    /// The name on the command line and in results.
    pub name: &'static str,
    /// The description in a few words.
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

    /// Returns the most buffers of a rank on host memory: one for a result in place, or two.
    pub fn num_buffers(&self) -> usize {
        let is_beside = |form: &CallForm| !form.is_in_place && (self.exists)(*form);
        if CallForm::ALL.iter().any(is_beside) { 2 } else { 1 }
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
pub(super) fn others(size: usize) -> f64 {
    (size as f64 - 1.0) / size as f64
}
