//! Transfers from the host to the device.
//!
//! A few values travel as arguments of a kernel. More are written into pinned memory, copied in a
//! stream of their own while the device computes, and copied to their destination when the
//! computation gets there. An upload slot is pinned memory and device memory of the same size, for
//! one write at a time. There are a few of each size, created when the first is needed, so that the
//! host can run ahead of the device; when all are in use, it waits for the oldest. More values than
//! the largest slot holds are sent in pieces.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::ops::Range;
use std::rc::Rc;

use cudarc::driver::{CudaEvent, result};

use super::buffer::CudaViewMut;
use super::format::Format;
use super::kernels::Kernel;
use super::launch::{KernelArgument, launch};
use super::memory::{DeviceMemory, Pinned};
use super::streams::Streams;
use crate::Result;

/// Slots of each size.
const NUM_SLOTS: usize = 3;

/// Largest number of values of a slot.
const LARGEST_SLOT: usize = 1 << 20;

/// Number of values that travel as arguments of a kernel: a few, such as an optimizer's constants,
/// or as many as arguments may have, such as the numbers of samples.
const FEW: usize = 16;
const SOME: usize = 960;

/// The slots that are not being written by the host, the one in use for longest first.
pub(crate) struct Uploads {
    slots: RefCell<VecDeque<UploadSlot>>,
    /// Host memory for values that are sent in pieces.
    large: RefCell<Vec<Vec<f32>>>,
}

struct UploadSlot {
    pinned: Pinned,
    memory: DeviceMemory,
    capacity: usize,
    /// The copy out of the pinned memory.
    uploaded: CudaEvent,
    /// The copy out of the device memory.
    used: CudaEvent,
}

/// `struct Few` and `struct Some` of the kernels.
#[derive(Clone, Copy)]
#[repr(C)]
struct ArgumentValues<const LEN: usize> {
    at: [f32; LEN],
}

impl<const LEN: usize> KernelArgument for ArgumentValues<LEN> {}

impl Uploads {
    pub(crate) fn new() -> Uploads {
        Uploads { slots: RefCell::default(), large: RefCell::default() }
    }

    /// Writes the values that `fill` puts into host memory to `into`.
    ///
    /// # Errors
    /// `fill` failed, or there is no memory for a slot.
    pub(crate) fn write(
        &self,
        streams: &Rc<Streams>,
        into: &CudaViewMut<'_>,
        fill: &mut dyn FnMut(&mut [f32]) -> Result<()>,
    ) -> Result<()> {
        let is_plain = into.format == Format::F32 && into.copy == 0;
        match into.len {
            0 => fill(&mut []),
            1..=FEW if is_plain => by_value::<FEW>(streams, &streams.kernels.store_few, into, fill),
            1..=SOME if is_plain => by_value::<SOME>(streams, &streams.kernels.store_some, into, fill),
            1..=LARGEST_SLOT => {
                let mut slot = self.take(streams, into.len)?;
                let outcome = fill(&mut slot.pinned.as_mut()[..into.len]);
                if outcome.is_ok() {
                    slot.send(streams, into, 0..into.len);
                }
                self.slots.borrow_mut().push_back(slot);
                outcome
            }
            len => {
                let mut whole = self.large.borrow_mut().pop().unwrap_or_default();
                whole.resize(len, 0.0);
                fill(&mut whole)?;
                for start in (0..len).step_by(LARGEST_SLOT) {
                    let piece = start..len.min(start + LARGEST_SLOT);
                    let mut slot = self.take(streams, LARGEST_SLOT)?;
                    slot.pinned.as_mut()[..piece.len()].copy_from_slice(&whole[piece.clone()]);
                    slot.send(streams, into, piece);
                    self.slots.borrow_mut().push_back(slot);
                }
                self.large.borrow_mut().push(whole);
                Ok(())
            }
        }
    }

    /// Takes the slot for `len` values that has been in use for longest, and waits for it.
    fn take(&self, streams: &Rc<Streams>, len: usize) -> Result<UploadSlot> {
        let capacity = len.next_power_of_two();
        let mut slots = self.slots.borrow_mut();
        let oldest = |slots: &VecDeque<UploadSlot>| slots.iter().position(|slot| slot.capacity == capacity);
        if oldest(&slots).is_none() {
            for _ in 0..NUM_SLOTS {
                slots.push_back(UploadSlot::new(streams, capacity)?);
            }
        }
        let slot = oldest(&slots)
            .and_then(|oldest| slots.remove(oldest))
            .expect("slots of each size are created together");
        streams.wait_for(&slot.uploaded);
        Ok(slot)
    }
}

/// Writes the values that `fill` gives, as an argument of `kernel`.
fn by_value<const LEN: usize>(
    streams: &Streams,
    kernel: &Kernel,
    into: &CudaViewMut<'_>,
    fill: &mut dyn FnMut(&mut [f32]) -> Result<()>,
) -> Result<()> {
    let mut values = ArgumentValues { at: [0.0; LEN] };
    fill(&mut values.at[..into.len])?;
    launch!(streams, kernel, streams.over(LEN, 1), values, into.len as u32, into.pointer);
    Ok(())
}

impl UploadSlot {
    fn new(streams: &Rc<Streams>, capacity: usize) -> Result<UploadSlot> {
        Ok(UploadSlot {
            pinned: Pinned::new(streams, capacity)?,
            memory: DeviceMemory::new(streams, capacity, Format::F32)?,
            capacity,
            uploaded: streams.new_event()?,
            used: streams.new_event()?,
        })
    }

    /// Sends the values in pinned memory to the elements `piece` of `into`.
    fn send(&mut self, streams: &Streams, into: &CudaViewMut<'_>, piece: Range<usize>) {
        let from = &self.pinned.as_ref()[..piece.len()];
        let outcome = streams.upload.wait(&self.used).and_then(|()| {
            // SAFETY: both hold that many values. The host writes the pinned memory again only
            // after `uploaded`, and the upload stream the device memory only after `used`.
            unsafe { result::memcpy_htod_async(self.memory.pointer(), from, streams.upload.cu_stream()) }
        });
        streams.count(|counters| counters.launches += 1);
        streams.note("uploading", outcome);
        streams.order(&self.uploaded, &streams.upload, &streams.compute);
        place(streams, self.memory.pointer(), into, piece);
        streams.note("uploading", self.used.record(&streams.compute));
    }
}

/// Copies `f32` values on the device to the elements `piece` of `into`, in its format.
fn place(streams: &Streams, from: u64, into: &CudaViewMut<'_>, piece: Range<usize>) {
    let (len, launch, start) = (piece.len() as u64, streams.over(piece.len(), 1), piece.start as u64);
    match into.format {
        // SAFETY: the slot and `into` hold that many values of 4 bytes.
        Format::F32 => unsafe { streams.copy(from, into.pointer + 4 * start, 4 * piece.len()) },
        Format::Bf16 => {
            launch!(streams, &streams.kernels.cast_to_bf16, launch, len, from, into.pointer + 2 * start);
        }
    }
    if into.copy != 0 {
        launch!(streams, &streams.kernels.cast_to_bf16, launch, len, from, into.copy + 2 * start);
    }
}
