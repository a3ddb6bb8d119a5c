//! Buffers whose messages travel through pinned host memory, copied there and back beside the computation.
//!
//! The way of a buffer: an event of the computing stream says when its values are made; the stream of departures waits for it and copies
//! piece after piece, each with an event that the host looks at before MPI reads it. What is only to be received waits for no work of the
//! device but the way back of what was in the mirror before. What MPI and sums have changed goes back in the stream of arrivals, and the
//! computing stream waits for the last of it when the buffer is given back.
#![allow(unsafe_code)]

use std::ops::Range;
use std::rc::Rc;

use cudarc::driver::{CudaEvent, result};

use super::runtime::buffer::CudaBuffer;
use super::runtime::launch::launch;
use super::runtime::memory::Pinned;
use super::settled::{SettledBuffer, Settling};
use crate::Result;
use crate::device::portable::{Never, Portable, Staged};

/// What the messages of a buffer need.
pub(crate) struct Staging {
    /// As long as the buffer, with values in its format.
    mirror: Pinned,
    /// The computation with the buffer before it left.
    computed: CudaEvent,
    /// The copies of each piece to the mirror.
    fetched: Vec<Fetched>,
    /// The last copy from the mirror.
    delivered: CudaEvent,
}

/// The copies of a piece to the mirror.
struct Fetched {
    event: CudaEvent,
    /// There are none where nothing is to be sent.
    is_copied: bool,
}

/// A buffer with a mirror on the host.
pub struct StagedBuffer {
    buffer: CudaBuffer,
    staging: Staging,
    /// Nothing that was in the mirror before is still on its way back.
    is_free: bool,
}

impl StagedBuffer {
    fn new(mut buffer: CudaBuffer, pieces: usize) -> Result<StagedBuffer> {
        let shared = Rc::clone(&buffer.streams);
        let mut staging = match buffer.staging.take() {
            Some(staging) => staging,
            None => Staging {
                mirror: Pinned::new(
                    &shared,
                    (buffer.len * buffer.format.bytes()).div_ceil(size_of::<f32>()),
                )?,
                computed: shared.new_event()?,
                fetched: Vec::new(),
                delivered: shared.new_event()?,
            },
        };
        while staging.fetched.len() < pieces {
            staging.fetched.push(Fetched { event: shared.new_event()?, is_copied: false });
        }
        shared.note("computing what is to be sent", staging.computed.record(&shared.compute));
        Ok(StagedBuffer { buffer, staging, is_free: false })
    }

    /// Where the values in `range` are in the mirror and on the device, and how many bytes they are.
    fn places(&self, range: &Range<usize>) -> (*mut u8, u64, usize) {
        assert!(range.end <= self.buffer.len, "{range:?} of {} values", self.buffer.len);
        let (value, start) = (self.buffer.format.bytes(), range.start * self.buffer.format.bytes());
        (self.values().wrapping_add(start), self.buffer.memory.pointer() + start as u64, range.len() * value)
    }
}

// SAFETY: the mirror is memory of its own, as long as the buffer, and freed with the value.
unsafe impl Staged for StagedBuffer {
    fn values(&self) -> *mut u8 {
        self.staging.mirror.pointer().cast()
    }

    fn fetch(&mut self, piece: usize, ranges: &mut dyn Iterator<Item = Range<usize>>) {
        let (shared, doing) = (Rc::clone(&self.buffer.streams), "copying a message to the host");
        let departures = &shared.d2h;
        let mut is_copied = false;
        for range in ranges.filter(|range| !range.is_empty()) {
            if !is_copied {
                // with that, what was in the mirror before is back as well: the computing stream waited for it
                shared.note(doing, departures.wait(&self.staging.computed));
                is_copied = true;
            }
            let (into, from, bytes) = self.places(&range);
            // SAFETY: the place is within the mirror, which stays where it is, and nobody looks at it until the piece is here.
            let outcome = unsafe {
                let into = std::slice::from_raw_parts_mut(into, bytes);
                result::memcpy_dtoh_async(into, from, departures.cu_stream())
            };
            shared.note(doing, outcome);
        }
        let fetched = &mut self.staging.fetched[piece];
        fetched.is_copied = is_copied;
        if is_copied {
            shared.note(doing, fetched.event.record(departures));
        }
    }

    fn is_here(&mut self, piece: usize) -> bool {
        let (shared, fetched) = (&self.buffer.streams, &self.staging.fetched[piece]);
        let is_here = match fetched.is_copied {
            true => shared.is_complete(&fetched.event),
            false => self.is_free || shared.is_complete(&self.staging.delivered),
        };
        self.is_free |= is_here;
        is_here
    }

    fn deliver(&mut self, ranges: &mut dyn Iterator<Item = Range<usize>>) {
        let (shared, doing) = (Rc::clone(&self.buffer.streams), "copying a message to the device");
        let arrivals = &shared.h2d;
        let mut is_copied = false;
        for range in ranges.filter(|range| !range.is_empty()) {
            if !is_copied {
                // the device may still read what is in the buffer
                shared.note(doing, arrivals.wait(&self.staging.computed));
                is_copied = true;
            }
            let (from, into, bytes) = self.places(&range);
            // SAFETY: the place is within the mirror, which stays where it is; MPI is done with it, and nobody writes there before the copy
            // is over, which the next operation's pieces wait for.
            let outcome = unsafe {
                let from = std::slice::from_raw_parts(from, bytes);
                result::memcpy_htod_async(into, from, arrivals.cu_stream())
            };
            shared.note(doing, outcome);
        }
        if is_copied {
            shared.note(doing, self.staging.delivered.record(arrivals));
        }
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
        let StagedBuffer { mut buffer, staging, .. } = staged;
        let shared = Rc::clone(&buffer.streams);
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
            let launch = self.streams.over(range.len(), 1);
            launch!(self.streams, &self.streams.kernels.cast_to_bf16, launch, range.len() as u64, from, into);
        }
    }
}
