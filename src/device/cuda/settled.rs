//! Buffers that MPI reads and writes where they are, on the device, and the sums of what it brought.
//!
//! The way of a buffer: an event of the computing stream says when its values are there; from then on only MPI and the stream of
//! arrivals touch it, in turns that the host sees the ends of, the last one too: so the computing stream has to wait for nothing.
#![allow(unsafe_code)]

use std::ops::Range;
use std::rc::Rc;

use cudarc::driver::CudaEvent;

use super::runtime::buffer::CudaBuffer;
use super::runtime::launch::launch_in;
use super::runtime::memory::DeviceMemory;
use crate::Result;
use crate::device::portable::{self, Addition, Settled};

/// What messages straight from and to a buffer need.
pub(crate) struct Direct {
    inbox: DeviceMemory,
    /// Of how many values.
    room: usize,
    /// The computation with the buffer before it left.
    computed: CudaEvent,
    /// The last addition of each slot.
    added: [CudaEvent; 2],
}

/// A buffer whose work of the device is still under way.
pub struct Settling {
    buffer: CudaBuffer,
    direct: Direct,
}

/// A buffer that only messages and their sums touch.
pub struct SettledBuffer {
    buffer: CudaBuffer,
    direct: Direct,
}

impl Settling {
    pub(super) fn new(mut buffer: CudaBuffer, inbox: usize) -> Result<Settling> {
        let shared = Rc::clone(&buffer.streams);
        let direct = match buffer.direct.take() {
            Some(direct) if direct.room >= inbox => direct,
            _ => Direct {
                inbox: DeviceMemory::new(&shared, inbox, buffer.format)?,
                room: inbox,
                computed: shared.new_event()?,
                added: [shared.new_event()?, shared.new_event()?],
            },
        };
        shared.note("computing what is to be sent", direct.computed.record(&shared.compute));
        Ok(Settling { buffer, direct })
    }
}

impl portable::Settling for Settling {
    type Settled = SettledBuffer;

    fn is_complete(&mut self) -> bool {
        self.buffer.streams.is_complete(&self.direct.computed)
    }

    fn wait(self) -> SettledBuffer {
        self.buffer.streams.wait_for(&self.direct.computed);
        SettledBuffer { buffer: self.buffer, direct: self.direct }
    }
}

// SAFETY: the memory is the device's own, of that length, and freed with the value.
unsafe impl Settled for SettledBuffer {
    fn values(&self) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.buffer.memory.pointer() as usize)
    }

    fn inbox(&self) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.direct.inbox.pointer() as usize)
    }

    fn add(&mut self, slot: usize, addition: &Addition) {
        let (shared, format) = (&self.buffer.streams, self.buffer.format);
        let Addition { into, first, terms, stride, own } = addition;
        let end = first + terms * stride;
        let fits =
            into.end <= self.buffer.len && into.len() <= *stride && end <= self.direct.room && own <= terms;
        assert!(fits, "{addition:?}");
        if !into.is_empty() {
            let values = self.buffer.memory.pointer() + (into.start * format.bytes()) as u64;
            let inbox = self.direct.inbox.pointer() + (first * format.bytes()) as u64;
            let (kernel, launch) = (shared.kernels.add_terms.of(format), shared.over(into.len(), 4));
            let (len, stride, terms, own) = (into.len() as u64, *stride as u64, *terms as u32, *own as u32);
            launch_in!(shared, shared.h2d, kernel, launch, len, values, inbox, stride, terms, own);
        }
        shared.note("adding what arrived", self.direct.added[slot].record(&shared.h2d));
    }

    fn is_added(&mut self, slot: usize) -> bool {
        self.buffer.streams.is_complete(&self.direct.added[slot])
    }
}

impl SettledBuffer {
    /// The buffer, with which the computation goes on; the values in `range` have changed.
    pub(super) fn resume(self, range: Range<usize>) -> CudaBuffer {
        let SettledBuffer { mut buffer, direct } = self;
        buffer.direct = Some(direct);
        buffer.refresh_copy(range);
        buffer
    }
}
