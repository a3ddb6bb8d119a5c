//! Values from the host to the device: written into pinned memory, copied in a stream of their own while the device computes, and put
//! into their place when the computation gets there.
//!
//! A slot is pinned memory and device memory of the same size, for one write at a time. There are a few of each size, made when the
//! first is wanted, so that the host can run ahead of the device; with all under way it waits for the oldest. More values than the
//! largest slot holds go through in pieces.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::ops::Range;
use std::rc::Rc;

use cudarc::driver::{CudaEvent, CudaFunction, result};

use super::memory::{CudaViewMut, DeviceMemory, Format, Pinned};
use super::shared::{Shared, launch};
use crate::Result;

/// Slots of each size.
const NUM_SLOTS: usize = 3;

/// Values that a slot has room for at most.
const LARGEST_SLOT: usize = 1 << 20;

/// Values that travel as arguments of a kernel: a few, as an optimizer's constants, or as many as an argument may have, as the numbers
/// of samples.
const FEW: usize = 16;
const SOME: usize = 960;

/// All slots that are not being written.
pub(super) struct Uploads {
    slots: RefCell<VecDeque<Slot>>,
    /// Host memory for values that go through slots in pieces.
    wholes: RefCell<Vec<Vec<f32>>>,
}

struct Slot {
    pinned: Pinned,
    memory: DeviceMemory,
    capacity: usize,
    /// Out of the pinned memory.
    uploaded: CudaEvent,
    /// Out of the device memory.
    used: CudaEvent,
}

/// Values, by value.
#[derive(Clone, Copy)]
#[repr(C)]
struct Values<const LEN: usize> {
    at: [f32; LEN],
}

impl<const LEN: usize> super::shared::Argument for Values<LEN> {}

impl Uploads {
    pub(super) fn new() -> Uploads {
        Uploads { slots: RefCell::default(), wholes: RefCell::default() }
    }

    /// Lets `fill` write `into`.
    ///
    /// # Errors
    /// What `fill` returns, or there is no memory for a slot.
    pub(super) fn write(
        &self,
        shared: &Rc<Shared>,
        into: &CudaViewMut<'_>,
        fill: &mut dyn FnMut(&mut [f32]) -> Result<()>,
    ) -> Result<()> {
        let is_plain = into.format == Format::F32 && into.copy == 0;
        match into.len {
            0 => fill(&mut []),
            1..=FEW if is_plain => by_value::<FEW>(shared, &shared.kernels.store_few, into, fill),
            1..=SOME if is_plain => by_value::<SOME>(shared, &shared.kernels.store_some, into, fill),
            1..=LARGEST_SLOT => {
                let mut slot = self.take(shared, into.len)?;
                let outcome = fill(&mut slot.pinned.as_mut()[..into.len]);
                if outcome.is_ok() {
                    slot.send(shared, into, 0..into.len);
                }
                self.slots.borrow_mut().push_back(slot);
                outcome
            }
            len => {
                let mut whole = self.wholes.borrow_mut().pop().unwrap_or_default();
                whole.resize(len, 0.0);
                fill(&mut whole)?;
                for start in (0..len).step_by(LARGEST_SLOT) {
                    let piece = start..len.min(start + LARGEST_SLOT);
                    let mut slot = self.take(shared, LARGEST_SLOT)?;
                    slot.pinned.as_mut()[..piece.len()].copy_from_slice(&whole[piece.clone()]);
                    slot.send(shared, into, piece);
                    self.slots.borrow_mut().push_back(slot);
                }
                self.wholes.borrow_mut().push(whole);
                Ok(())
            }
        }
    }

    /// The slot of this size that has been under way for longest.
    fn take(&self, shared: &Rc<Shared>, len: usize) -> Result<Slot> {
        let capacity = len.next_power_of_two();
        let mut slots = self.slots.borrow_mut();
        let oldest = |slots: &VecDeque<Slot>| slots.iter().position(|slot| slot.capacity == capacity);
        if oldest(&slots).is_none() {
            for _ in 0..NUM_SLOTS {
                slots.push_back(Slot::new(shared, capacity)?);
            }
        }
        let slot = oldest(&slots)
            .and_then(|oldest| slots.remove(oldest))
            .expect("some were made if there were none");
        shared.wait_for(&slot.uploaded);
        Ok(slot)
    }
}

/// Stores values that `fill` writes as an argument of `kernel`.
fn by_value<const LEN: usize>(
    shared: &Shared,
    kernel: &CudaFunction,
    into: &CudaViewMut<'_>,
    fill: &mut dyn FnMut(&mut [f32]) -> Result<()>,
) -> Result<()> {
    let mut values = Values { at: [0.0; LEN] };
    fill(&mut values.at[..into.len])?;
    launch!(shared, kernel, shared.over(LEN, 1), values, into.len as u32, into.pointer);
    Ok(())
}

impl Slot {
    fn new(shared: &Rc<Shared>, capacity: usize) -> Result<Slot> {
        Ok(Slot {
            pinned: Pinned::new(shared, capacity)?,
            memory: DeviceMemory::new(shared, capacity, Format::F32)?,
            capacity,
            uploaded: shared.new_event()?,
            used: shared.new_event()?,
        })
    }

    /// Sends the values that have been written to `piece` of `into`.
    fn send(&mut self, shared: &Shared, into: &CudaViewMut<'_>, piece: Range<usize>) {
        let from = &self.pinned.as_ref()[..piece.len()];
        let outcome = shared.uploads.wait(&self.used).and_then(|()| {
            // SAFETY: the pinned memory is written again only after `uploaded`, and the device memory only after `used`.
            unsafe { result::memcpy_htod_async(self.memory.pointer(), from, shared.uploads.cu_stream()) }
        });
        shared.count(|counters| counters.launches += 1);
        shared.note("uploading", outcome);
        shared.order(&self.uploaded, &shared.uploads, &shared.compute);
        place(shared, self.memory.pointer(), into, piece);
        shared.note("uploading", self.used.record(&shared.compute));
    }
}

/// Copies `f32` values on the device to `piece` of `into`, in its format.
fn place(shared: &Shared, from: u64, into: &CudaViewMut<'_>, piece: Range<usize>) {
    let (len, launch, start) = (piece.len() as u64, shared.over(piece.len(), 1), piece.start as u64);
    match into.format {
        // SAFETY: both hold that many values.
        Format::F32 => unsafe { shared.copy(from, into.pointer + 4 * start, 4 * piece.len()) },
        Format::Bf16 => {
            launch!(shared, &shared.kernels.cast_to_bf16, launch, len, from, into.pointer + 2 * start);
        }
    }
    if into.copy != 0 {
        launch!(shared, &shared.kernels.cast_to_bf16, launch, len, from, into.copy + 2 * start);
    }
}
