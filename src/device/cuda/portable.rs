//! How a buffer's values travel to pinned host memory and back, beside the computation.

use std::ops::Range;
use std::rc::Rc;

use cudarc::driver::{CudaEvent, result};

use super::memory::{CudaBuffer, DeviceMemory, Format, Pinned};
use super::settled::{SettledBuffer, Settling};
use super::shared::launch;
use crate::Result;
use crate::device::{Departure, Portable};

/// What the messages of a buffer need.
pub(super) struct Staging {
    /// Not there while a message is away.
    message: Option<Pinned>,
    /// The values in `f32`, where the buffer has them in another format.
    wide: Option<DeviceMemory>,
    /// The last copy between the buffer and its message.
    copied: CudaEvent,
    /// The computation with the buffer before its message left.
    computed: CudaEvent,
}

/// A buffer whose values are on their way to the host.
pub struct Departing {
    buffer: CudaBuffer,
}

impl CudaBuffer {
    fn staging(&mut self) -> Result<&mut Staging> {
        if self.staging.is_none() {
            let wide = match self.format {
                Format::F32 => None,
                Format::Bf16 => Some(DeviceMemory::new(&self.shared, self.len, Format::F32)?),
            };
            let message = Some(Pinned::new(&self.shared, self.len)?);
            let [copied, computed] = [self.shared.new_event()?, self.shared.new_event()?];
            self.staging = Some(Staging { message, wide, copied, computed });
        }
        Ok(self.staging.as_mut().expect("it was made just now"))
    }

    /// Casts the values in `range` from or to where messages are copied from and to, if that is another place.
    fn cast(&self, range: &Range<usize>, to_wide: bool) {
        let Some(wide) = self.staging.as_ref().and_then(|staging| staging.wide.as_ref()) else { return };
        let (kernels, launch) = (&self.shared.kernels, self.shared.over(range.len(), 1));
        let narrow = self.memory.pointer() + 2 * range.start as u64;
        let wide = wide.pointer() + 4 * range.start as u64;
        if to_wide {
            launch!(self.shared, &kernels.cast_to_f32, launch, range.len() as u64, narrow, wide);
        } else {
            launch!(self.shared, &kernels.cast_to_bf16, launch, range.len() as u64, wide, narrow);
        }
    }

    /// Where messages are copied from and to, as `f32`.
    fn wide_pointer(&self) -> u64 {
        let wide = self.staging.as_ref().and_then(|staging| staging.wide.as_ref());
        wide.unwrap_or(&self.memory).pointer()
    }
}

impl Portable for CudaBuffer {
    type Message = Pinned;
    type Rest = CudaBuffer;
    type Departure = Departing;
    type Settled = SettledBuffer;
    type Settling = Settling;

    const IS_ON_DEVICE: bool = true;

    fn len(&self) -> usize {
        self.len
    }

    fn value_bytes(&self) -> usize {
        self.format.bytes()
    }

    fn settle(self, inbox: usize) -> Result<Settling> {
        Settling::new(self, inbox)
    }

    fn resume(settled: SettledBuffer, range: Range<usize>) -> CudaBuffer {
        settled.resume(range)
    }

    fn depart(mut self, range: Range<usize>) -> Result<Departing> {
        self.staging()?;
        let shared = Rc::clone(&self.shared);
        if !range.is_empty() {
            self.cast(&range, true);
        }
        let from = self.wide_pointer() + 4 * range.start as u64;
        if let Some(Staging { message: Some(message), copied, computed, .. }) = &mut self.staging {
            shared.note("copying a message to the host", computed.record(&shared.compute));
            // with nothing to copy, `copied` is still that of the message before, which the host must not overwrite sooner
            if !range.is_empty() {
                let into = &mut message.as_mut()[range];
                let stream = &shared.departures;
                let outcome = stream.wait(computed).and_then(|()| stream.wait(copied)).and_then(|()| {
                    // SAFETY: the memory stays where it is, and nobody looks at it until `copied` is complete.
                    unsafe { result::memcpy_dtoh_async(into, from, stream.cu_stream()) }
                });
                shared.note("copying a message to the host", outcome.and_then(|()| copied.record(stream)));
            }
        }
        Ok(Departing { buffer: self })
    }

    fn arrive(rest: CudaBuffer, message: Pinned, range: Range<usize>) -> CudaBuffer {
        let mut buffer = rest;
        let shared = Rc::clone(&buffer.shared);
        let into = buffer.wide_pointer() + 4 * range.start as u64;
        if let Some(staging) = &mut buffer.staging {
            if !range.is_empty() {
                let from = &message.as_ref()[range.clone()];
                let stream = &shared.arrivals;
                let outcome = stream.wait(&staging.computed).and_then(|()| {
                    // SAFETY: the memory stays where it is, and the next departure waits for this copy before anyone writes there.
                    unsafe { result::memcpy_htod_async(into, from, stream.cu_stream()) }
                });
                shared.note("copying a message to the device", outcome);
                shared.order(&staging.copied, stream, &shared.compute);
            }
            staging.message = Some(message);
        }
        if !range.is_empty() {
            buffer.cast(&range, false);
            buffer.refresh_copy(range);
        }
        buffer
    }
}

impl CudaBuffer {
    /// Makes the copy in bf16 that of the values in `range`.
    pub(super) fn refresh_copy(&self, range: Range<usize>) {
        if let Some(copy) = &self.copy {
            let into = copy.pointer() + 2 * range.start as u64;
            let from = self.memory.pointer() + 4 * range.start as u64;
            let launch = self.shared.over(range.len(), 1);
            launch!(self.shared, &self.shared.kernels.cast_to_bf16, launch, range.len() as u64, from, into);
        }
    }
}

impl Departure for Departing {
    type Message = Pinned;
    type Rest = CudaBuffer;

    fn is_complete(&mut self) -> bool {
        self.buffer.staging.as_ref().is_none_or(|staging| self.buffer.shared.is_complete(&staging.copied))
    }

    fn wait(mut self) -> (Pinned, CudaBuffer) {
        let staging = self.buffer.staging.as_mut().expect("a buffer that departs has what messages need");
        self.buffer.shared.wait_for(&staging.copied);
        let message = staging.message.take().expect("a buffer travels once at a time");
        (message, self.buffer)
    }
}
