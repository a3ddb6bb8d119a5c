//! Buffers whose messages travel through pinned host memory, copied there and back beside the computation.
//!
//! The way of a buffer: an event of the computing stream says when its values are made; the stream of departures waits for it and copies
//! piece after piece, each with an event that the host looks at before MPI reads it. What MPI and sums have changed goes back in the stream
//! of arrivals, and the computing stream waits for the last of it when the buffer is given back.
#![allow(unsafe_code)]

use std::ops::Range;
use std::rc::Rc;

use cudarc::driver::{CudaEvent, result};

use super::memory::{CudaBuffer, Pinned};
use super::settled::{SettledBuffer, Settling};
use super::shared::launch;
use crate::Result;
use crate::device::portable::{Never, Portable, Staged};

/// What the messages of a buffer need.
pub(super) struct Staging {
    /// As long as the buffer, with values in its format.
    mirror: Pinned,
    /// The computation with the buffer before it left.
    computed: CudaEvent,
    /// The copies of each piece to the mirror.
    fetched: Vec<CudaEvent>,
    /// The last copy from the mirror.
    delivered: CudaEvent,
}

/// A buffer with a mirror on the host.
pub struct StagedBuffer {
    buffer: CudaBuffer,
    staging: Staging,
}

impl StagedBuffer {
    fn new(mut buffer: CudaBuffer, pieces: usize) -> Result<StagedBuffer> {
        let shared = Rc::clone(&buffer.shared);
        let mut staging = match buffer.staging.take() {
            Some(staging) => staging,
            None => Staging {
                mirror: Pinned::new(&shared, (buffer.len * buffer.format.bytes()).div_ceil(size_of::<f32>()))?,
                computed: shared.new_event()?,
                fetched: Vec::new(),
                delivered: shared.new_event()?,
            },
        };
        while staging.fetched.len() < pieces {
            staging.fetched.push(shared.new_event()?);
        }
        // with that, what was still on its way back from the mirror has come: the computing stream waited for it
        let ready = staging.computed.record(&shared.compute).and_then(|()| shared.departures.wait(&staging.computed));
        shared.note("computing what is to be sent", ready);
        Ok(StagedBuffer { buffer, staging })
    }

    /// Where the values in `range` are, on the host and on the device, and their bytes.
    fn places(&mut self, range: &Range<usize>) -> (&mut [u8], u64) {
        assert!(range.end <= self.buffer.len, "{range:?} of {} values", self.buffer.len);
        let bytes = self.buffer.format.bytes();
        let mirror = bytemuck::cast_slice_mut(self.staging.mirror.as_mut());
        (
            &mut mirror[range.start * bytes..range.end * bytes],
            self.buffer.memory.pointer() + (range.start * bytes) as u64,
        )
    }
}

// SAFETY: the mirror is memory of its own, as long as the buffer, and freed with the value.
unsafe impl Staged for StagedBuffer {
    fn values(&self) -> *mut u8 {
        self.staging.mirror.as_ref().as_ptr().cast_mut().cast()
    }

    fn fetch(&mut self, piece: usize, ranges: &mut dyn Iterator<Item = Range<usize>>) {
        let shared = Rc::clone(&self.buffer.shared);
        for range in ranges.filter(|range| !range.is_empty()) {
            let (into, from) = self.places(&range);
            // SAFETY: the memory stays where it is, and nobody looks at it until the piece is here.
            let outcome = unsafe { result::memcpy_dtoh_async(into, from, shared.departures.cu_stream()) };
            shared.note("copying a message to the host", outcome);
        }
        shared.note("copying a message to the host", self.staging.fetched[piece].record(&shared.departures));
    }

    fn is_here(&mut self, piece: usize) -> bool {
        self.buffer.shared.is_complete(&self.staging.fetched[piece])
    }

    fn deliver(&mut self, range: Range<usize>) {
        if range.is_empty() {
            return;
        }
        let shared = Rc::clone(&self.buffer.shared);
        let arrivals = &shared.arrivals;
        let (from, into) = self.places(&range);
        // SAFETY: the memory stays where it is; nobody writes there before the next piece is fetched, which waits for this copy. The
        // device is done with the buffer, or the piece would not have been here.
        let outcome = unsafe { result::memcpy_htod_async(into, from, arrivals.cu_stream()) };
        shared.note("copying a message to the device", outcome);
        shared.note("copying a message to the device", self.staging.delivered.record(arrivals));
    }
}

impl Portable for CudaBuffer {
    type Message = Never;
    type Settled = SettledBuffer;
    type Settling = Settling;
    type Staged = StagedBuffer;

    fn len(&self) -> usize {
        self.len
    }

    fn value_bytes(&self) -> usize {
        self.format.bytes()
    }

    fn into_message(self) -> std::result::Result<Never, CudaBuffer> {
        Err(self)
    }

    fn from_message(message: Never) -> CudaBuffer {
        match message {}
    }

    fn settle(self, inbox: usize) -> Result<Settling> {
        Settling::new(self, inbox)
    }

    fn resume(settled: SettledBuffer, range: Range<usize>) -> CudaBuffer {
        settled.resume(range)
    }

    fn stage(self, pieces: usize) -> Result<StagedBuffer> {
        StagedBuffer::new(self, pieces)
    }

    fn unstage(staged: StagedBuffer, range: Range<usize>) -> CudaBuffer {
        let StagedBuffer { mut buffer, staging } = staged;
        let shared = Rc::clone(&buffer.shared);
        shared.note("going on after a message", shared.compute.wait(&staging.delivered));
        buffer.staging = Some(staging);
        buffer.refresh_copy(range);
        buffer
    }
}

impl CudaBuffer {
    /// Makes the copy in bf16 that of the values in `range`.
    pub(super) fn refresh_copy(&self, range: Range<usize>) {
        if let (Some(copy), false) = (&self.copy, range.is_empty()) {
            let into = copy.pointer() + 2 * range.start as u64;
            let from = self.memory.pointer() + 4 * range.start as u64;
            let launch = self.shared.over(range.len(), 1);
            launch!(self.shared, &self.shared.kernels.cast_to_bf16, launch, range.len() as u64, from, into);
        }
    }
}
