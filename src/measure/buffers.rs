//! The buffers of measured operations, and their division among the ranks.

use std::ops::Range;

use super::{Meanwhile, sum_of_values};
use crate::Result;
use crate::comm::{Communicator, Pending};
use crate::device::CudaBuffer;
use crate::memory::{HostBuffer, Memory};

/// The position of a rank among the ranks of a measurement, and the length of its buffer.
#[derive(Debug, Clone, Copy)]
pub struct Geometry {
    /// This rank.
    pub rank: usize,
    /// The number of ranks.
    pub size: usize,
    /// The number of elements of the buffer.
    pub len: usize,
}

impl Geometry {
    /// Returns the geometry of buffers of `len` elements on the ranks of `all`.
    pub fn new(all: &Communicator, len: usize) -> Geometry {
        Geometry { rank: all.rank(), size: all.size(), len }
    }

    /// Returns the length of a rank's part.
    pub fn part(&self) -> usize {
        self.len / self.size
    }

    /// Returns the range of all elements.
    pub fn whole(&self) -> Range<usize> {
        0..self.len
    }

    /// Returns the range of all elements on rank 0, and an empty one elsewhere.
    pub fn whole_on_root(&self) -> Range<usize> {
        if self.rank == 0 { 0..self.len } else { 0..0 }
    }

    /// Returns the range of this rank's part.
    pub fn own(&self) -> Range<usize> {
        self.rank * self.part()..(self.rank + 1) * self.part()
    }

    /// Returns the next rank around the ring.
    pub fn next(&self) -> usize {
        (self.rank + 1) % self.size
    }

    /// Returns the previous rank around the ring.
    pub fn previous(&self) -> usize {
        (self.rank + self.size - 1) % self.size
    }

    /// Returns the sum over all ranks of element `at`.
    pub fn sum(&self, at: usize) -> f32 {
        sum_of_values(self.size, at)
    }
}

/// The buffers of an operation on host memory.
pub struct HostBuffers {
    /// The values that are sent and, in place, the result.
    pub send: Memory<f32>,
    /// The result; empty in place.
    pub receive: Memory<f32>,
}

impl HostBuffers {
    /// Returns the send buffer's range `send` and the receive buffer's range `receive`.
    pub fn ranges(self, send: Range<usize>, receive: Range<usize>) -> (HostRange, HostRange) {
        (HostRange { memory: self.send, range: send }, HostRange { memory: self.receive, range: receive })
    }

    /// Returns these two buffers.
    pub fn of_pair(pair: (Memory<f32>, Memory<f32>)) -> HostBuffers {
        HostBuffers { send: pair.0, receive: pair.1 }
    }

    /// Returns the buffers of the two ranges.
    pub fn of_ranges(ranges: (HostRange, HostRange)) -> HostBuffers {
        HostBuffers { send: ranges.0.memory, receive: ranges.1.memory }
    }
}

/// A range of a host buffer that a message reads or writes.
pub struct HostRange {
    memory: Memory<f32>,
    range: Range<usize>,
}

impl AsRef<[f32]> for HostRange {
    fn as_ref(&self) -> &[f32] {
        &self.memory[self.range.clone()]
    }
}

impl AsMut<[f32]> for HostRange {
    fn as_mut(&mut self) -> &mut [f32] {
        &mut self.memory[self.range.clone()]
    }
}

// SAFETY: the elements lie in a memory map, which stays where it is when the value is moved or
// leaked, and nothing changes the range.
#[allow(unsafe_code)]
unsafe impl HostBuffer for HostRange {
    type Element = f32;
}

/// Runs `meanwhile` while `pending` is under way, then waits for it and returns its buffers.
///
/// # Errors
/// Those of `meanwhile`.
pub fn during<B>(mut pending: Pending<B>, meanwhile: Meanwhile<'_>) -> Result<B> {
    meanwhile(&mut || {
        pending.test();
        Ok(())
    })?;
    Ok(pending.wait())
}

/// The buffers of an operation on device memory.
pub struct DeviceBuffers {
    /// The values that are sent and, in place, the result.
    pub values: CudaBuffer,
    /// The result; `None` in place.
    pub received: Option<CudaBuffer>,
}

/// A started operation on [`DeviceBuffers`].
pub struct DevicePending {
    /// The operation on the values that are sent.
    pub values: Pending<CudaBuffer>,
    /// The operation on the result; `None` in place.
    pub received: Option<Pending<CudaBuffer>>,
}

impl DevicePending {
    /// Wraps an operation whose result replaces the values that are sent.
    pub fn in_place(values: Pending<CudaBuffer>) -> DevicePending {
        DevicePending { values, received: None }
    }
}
