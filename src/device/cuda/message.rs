//! Device buffers in messages: [`AwareArena`] lends their memory to MPI, [`StagedArena`] copies
//! them through the host.
//!
//! A CUDA-aware MPI is lent the device memory itself ([`AwareArena`]): an event of the computing
//! stream says when its values are there; from then on only MPI and the additions touch it,
//! alternately. The host observes each completion, including the last, so the computing stream has
//! to wait for nothing. MPI may map the memory in other processes of the node, and keep it mapped: so it is
//! exported, and never freed (see [`ipc`](super::runtime::ipc)).
//!
//! Otherwise the values are staged through pinned host memory ([`StagedArena`]): the stream of
//! copies to the host waits for that event and copies chunk after chunk, each with an event that
//! the host checks before MPI reads it. A chunk that is only received waits only for the previous
//! copy back to finish. Values that MPI and sums have changed go back in the stream of copies to
//! the device, and the computing stream waits for the last of these copies when the buffer is given
//! back.
#![allow(unsafe_code)]

use std::ops::Range;
use std::rc::Rc;

use cudarc::driver::result;
use cudarc::driver::sys::CUdeviceptr;

use super::runtime::buffer::CudaBuffer;
use super::runtime::format::Format;
use super::runtime::launch::{launch, launch_in, size32};
use super::runtime::message_memory::{AwareMemory, StagedMemory};
use super::runtime::streams::Streams;
use crate::memory::{
    Arena, Buffer, ElementType, HostArena, Loan, Needs, Operation, PeerBuffer, Places, Terms,
};
use crate::sums::Subtrees;
use crate::{Error, Result};

/// A buffer on loan.
struct Lent {
    streams: Rc<Streams>,
    pointer: CUdeviceptr,
    len: usize,
    format: Format,
}

impl Lent {
    /// Returns the address of the values in `range`, and their size in bytes.
    fn place(&self, range: &Range<usize>) -> (CUdeviceptr, usize) {
        assert!(range.end <= self.len, "{range:?} of {} values", self.len);
        (self.pointer + (range.start * self.format.bytes()) as u64, range.len() * self.format.bytes())
    }
}

/// Device memory that MPI reads and writes, with an inbox there.
struct AwareArena {
    lent: Lent,
    memory: Rc<AwareMemory>,
    is_here: bool,
}

// SAFETY: the values are the buffer's, which outlives the loan; the inbox is kept by the `Rc`. Both
// are plain device memory, which does not move.
unsafe impl Arena for AwareArena {
    fn values(&self) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.lent.pointer as usize)
    }

    fn inbox(&self) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.memory.inbox.pointer() as usize)
    }

    fn is_here(&mut self, _chunk: usize) -> bool {
        self.is_here = self.is_here || self.lent.streams.is_complete(&self.memory.computed);
        self.is_here
    }

    fn combine(&mut self, lane: usize, terms: &Terms<'_>) {
        let (streams, format) = (&self.lent.streams, self.lent.format);
        let Terms { range, first, num_received: count, stride, own, merges, .. } = terms;
        let end = first + count * stride;
        assert!(range.len() <= *stride && end <= self.memory.inbox_len && own.start <= *count, "{terms:?}");
        // the order of the kernel
        debug_assert_eq!(*merges, Subtrees::one_each(count + 1).merges(), "a term of each rank");
        if !range.is_empty() {
            let (values, _) = self.lent.place(range);
            let inbox = self.memory.inbox.pointer() + (first * format.bytes()) as u64;
            let kernel = streams.kernels.add_terms.of(format);
            let launch = streams.over(range.len(), format.values_at_once());
            let (len, stride, count) = (range.len() as u64, *stride as u64, size32(*count));
            let own = size32(own.start);
            launch_in!(streams, streams.h2d, kernel, launch, len, values, inbox, stride, count, own);
        }
        streams.note("adding what arrived", self.memory.added[lane].record(&streams.h2d));
    }

    fn is_combined(&mut self, lane: usize) -> bool {
        self.lent.streams.is_complete(&self.memory.added[lane])
    }
}

/// Pinned host memory that mirrors a device buffer, with an inbox and sums on the host.
struct StagedArena {
    lent: Lent,
    memory: Rc<StagedMemory>,
    host: HostArena,
    /// True once no earlier contents of the mirror are on their way back.
    is_free: bool,
}

// SAFETY: the mirror is kept by the `Rc` and does not move; it is as long as the buffer. The inbox
// is the host arena's own.
unsafe impl Arena for StagedArena {
    fn values(&self) -> *mut u8 {
        self.host.values()
    }

    fn inbox(&self) -> *mut u8 {
        self.host.inbox()
    }

    fn fetch(&mut self, chunk: usize, ranges: &mut dyn Iterator<Item = Range<usize>>) {
        let (streams, doing) = (&self.lent.streams, "copying a message to the host");
        let mut is_copied = false;
        for range in ranges.filter(|range| !range.is_empty()) {
            if !is_copied {
                // then earlier contents of the mirror are back as well, because the computing
                // stream waited for them
                streams.note(doing, streams.d2h.wait(&self.memory.computed));
                is_copied = true;
            }
            let (from, bytes) = self.lent.place(&range);
            let into = self.host.values().wrapping_add(range.start * self.lent.format.bytes());
            // SAFETY: the place is within the mirror, which stays where it is, and nobody reads it
            // until the chunk is here.
            let outcome = unsafe {
                let into = std::slice::from_raw_parts_mut(into, bytes);
                result::memcpy_dtoh_async(into, from, streams.d2h.cu_stream())
            };
            streams.note(doing, outcome);
        }
        let fetched = &mut self.memory.fetched.borrow_mut()[chunk];
        fetched.is_copied = is_copied;
        if is_copied {
            streams.note(doing, fetched.event.record(&streams.d2h));
        }
    }

    fn is_here(&mut self, chunk: usize) -> bool {
        let (streams, fetched) = (&self.lent.streams, &self.memory.fetched.borrow()[chunk]);
        let is_here = match fetched.is_copied {
            true => streams.is_complete(&fetched.event),
            false => self.is_free || streams.is_complete(&self.memory.delivered),
        };
        self.is_free |= is_here;
        is_here
    }

    fn combine(&mut self, lane: usize, terms: &Terms<'_>) {
        self.host.combine(lane, terms);
    }

    fn deliver(&mut self, ranges: &mut dyn Iterator<Item = Range<usize>>) {
        let (streams, doing) = (&self.lent.streams, "copying a message to the device");
        let mut is_copied = false;
        for range in ranges.filter(|range| !range.is_empty()) {
            if !is_copied {
                // the device may still read the old values
                streams.note(doing, streams.h2d.wait(&self.memory.computed));
                is_copied = true;
            }
            let (into, bytes) = self.lent.place(&range);
            let from = self.host.values().wrapping_add(range.start * self.lent.format.bytes());
            // SAFETY: the place is within the mirror, which stays where it is; MPI is done with it,
            // and nobody writes there before the copy is over, which the next operation's chunks
            // wait for.
            let outcome = unsafe {
                let from = std::slice::from_raw_parts(from, bytes);
                result::memcpy_htod_async(into, from, streams.h2d.cu_stream())
            };
            streams.note(doing, outcome);
        }
        if is_copied {
            streams.note(doing, self.memory.delivered.record(&streams.h2d));
        }
    }
}

/// Refuses reductions other than sums.
pub(super) fn sums_only(operation: Option<Operation>) -> Result<()> {
    match operation {
        None | Some(Operation::Sum) => Ok(()),
        Some(operation) => {
            Err(Error::failed(format!("reducing by {operation:?}"), "a device supports sums only"))
        }
    }
}

// SAFETY: device memory and pinned memory do not move, and the events order the device's work
// before and after the loan.
unsafe impl Buffer for CudaBuffer {
    const IS_ON_HOST: bool = false;

    fn len(&self) -> usize {
        self.len
    }

    fn element_type(&self) -> ElementType {
        match self.format {
            Format::F32 => ElementType::F32,
            Format::Bf16 => ElementType::Bf16,
        }
    }

    unsafe fn lend(&mut self, needs: &Needs) -> Result<Loan> {
        sums_only(needs.operation)?;
        let (streams, pointer) = (Rc::clone(&self.streams), self.memory.pointer());
        let lent = Lent { streams, pointer, len: self.len, format: self.format };
        let doing = "computing what is to be sent";
        let arena: Box<dyn Arena> = if needs.is_cuda_aware {
            self.memory.keep();
            let memory = self.messages.aware(&self.streams, self.format, needs.inbox_len)?;
            self.streams.note(doing, memory.computed.record(&self.streams.compute));
            Box::new(AwareArena { lent, memory, is_here: false })
        } else {
            let memory =
                self.messages.staged(&self.streams, self.len * self.format.bytes(), needs.num_chunks)?;
            self.streams.note(doing, memory.computed.record(&self.streams.compute));
            let values = memory.mirror.pointer().cast();
            let places = Places { values, sums: values };
            // SAFETY: the mirror holds all values, is kept with the arena, and nobody else touches
            // it meanwhile.
            let host =
                unsafe { HostArena::new(places, self.element_type(), Operation::Sum, needs.inbox_len)? };
            Box::new(StagedArena { lent, memory, host, is_free: false })
        };
        Ok(Loan::Device(arena))
    }

    unsafe fn lend_to_peers(
        &mut self,
        operation: Option<Operation>,
        is_mapped: bool,
    ) -> Result<Box<dyn PeerBuffer>> {
        Ok(Box::new(self.lent_to_peers(operation, is_mapped)?))
    }

    fn restore(&mut self, changed: Range<usize>) {
        if let Some(memory) = self.messages.last_staged() {
            // an event that was never recorded, or is long complete, costs nothing
            self.streams.note("continuing after a message", self.streams.compute.wait(&memory.delivered));
        }
        self.refresh_copy(changed);
    }
}

impl CudaBuffer {
    /// Renews the copy in bf16 of the values in `range`.
    pub(super) fn refresh_copy(&self, range: Range<usize>) {
        if let (Some(copy), false) = (&self.copy, range.is_empty()) {
            let into = copy.pointer() + 2 * range.start as u64;
            let from = self.memory.pointer() + 4 * range.start as u64;
            let launch = self.streams.over(range.len(), 1);
            launch!(self.streams, &self.streams.kernels.cast_to_bf16, launch, range.len() as u64, from, into);
        }
    }
}
