//! Values from the host to the device: written into pinned memory, copied in a stream of their own while the device computes, and put
//! into their place when the computation gets there.
//!
//! A slot is pinned memory and device memory of the same size, for one write at a time. There are a few of each size, so that the
//! host can run ahead of the device; with all under way it waits for the oldest.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

use cudarc::driver::{CudaEvent, result};

use super::machine::explain;
use super::memory::{CudaViewMut, DeviceMemory, Format, Pinned};
use super::shared::{Shared, launch};
use crate::{Error, Result};

/// Slots of one size.
const MOST_SLOTS: usize = 3;

/// Values that a slot has room for at most; more are rare, and take the slow way.
const LARGEST_SLOT: usize = 1 << 24;

/// Values that travel as arguments of a kernel.
const FEW: usize = 16;

/// All slots that are not being written.
pub(super) struct Uploads {
    slots: RefCell<VecDeque<Slot>>,
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

/// A few values, by value.
#[derive(Clone, Copy)]
#[repr(C)]
struct Few {
    at: [f32; FEW],
}

impl super::shared::Argument for Few {}

impl Uploads {
    pub(super) fn new() -> Uploads {
        Uploads { slots: RefCell::default() }
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
        match into.len {
            0 => fill(&mut []),
            1..=FEW if into.format == Format::F32 && into.copy == 0 => {
                let mut few = Few { at: [0.0; FEW] };
                fill(&mut few.at[..into.len])?;
                let launch = shared.over(1, 1);
                launch!(shared, &shared.kernels.store_few, launch, few, into.len as u32, into.pointer);
                Ok(())
            }
            1..=LARGEST_SLOT => {
                let mut slot = self.take(shared, into.len)?;
                let outcome = fill(&mut slot.pinned.as_mut()[..into.len]);
                if outcome.is_ok() {
                    slot.send(shared, into);
                }
                self.slots.borrow_mut().push_back(slot);
                outcome
            }
            _ => write_slowly(shared, into, fill),
        }
    }

    /// The slot that has been under way for longest, or a new one.
    fn take(&self, shared: &Rc<Shared>, len: usize) -> Result<Slot> {
        let capacity = len.next_power_of_two();
        let mut slots = self.slots.borrow_mut();
        let num = slots.iter().filter(|slot| slot.capacity == capacity).count();
        let oldest = slots.iter().position(|slot| slot.capacity == capacity);
        if let Some(oldest) = oldest
            && (num >= MOST_SLOTS || slots[oldest].uploaded.is_complete())
            && let Some(slot) = slots.remove(oldest)
        {
            shared.wait_for(&slot.uploaded);
            return Ok(slot);
        }
        Ok(Slot {
            pinned: Pinned::new(shared, capacity)?,
            memory: DeviceMemory::new(shared, capacity, Format::F32)?,
            capacity,
            uploaded: shared.new_event()?,
            used: shared.new_event()?,
        })
    }
}

impl Slot {
    fn send(&mut self, shared: &Shared, into: &CudaViewMut<'_>) {
        let from = &self.pinned.as_ref()[..into.len];
        let outcome = shared.uploads.wait(&self.used).and_then(|()| {
            // SAFETY: the pinned memory is written again only after `uploaded`, and the device memory only after `used`.
            unsafe { result::memcpy_htod_async(self.memory.pointer(), from, shared.uploads.cu_stream()) }
        });
        shared.count(|counters| counters.launches += 1);
        shared.note("uploading", outcome);
        shared.order(&self.uploaded, &shared.uploads, &shared.compute);
        place(shared, self.memory.pointer(), into);
        shared.note("uploading", self.used.record(&shared.compute));
    }
}

/// Copies `f32` values on the device to `into`, in its format.
fn place(shared: &Shared, from: u64, into: &CudaViewMut<'_>) {
    let (len, launch) = (into.len as u64, shared.over(into.len, 1));
    match into.format {
        // SAFETY: both hold that many values.
        Format::F32 => unsafe { shared.copy(from, into.pointer, 4 * into.len) },
        Format::Bf16 => launch!(shared, &shared.kernels.cast_to_bf16, launch, len, from, into.pointer),
    }
    if into.copy != 0 {
        launch!(shared, &shared.kernels.cast_to_bf16, launch, len, from, into.copy);
    }
}

/// More values than a slot has room for, through memory that is there for this only.
fn write_slowly(
    shared: &Rc<Shared>,
    into: &CudaViewMut<'_>,
    fill: &mut dyn FnMut(&mut [f32]) -> Result<()>,
) -> Result<()> {
    let mut values = vec![0.0; into.len];
    fill(&mut values)?;
    let memory = DeviceMemory::new(shared, into.len, Format::F32)?;
    // SAFETY: the memory is as long as the values; the call returns when they have been read.
    let outcome = unsafe { result::memcpy_htod_sync(memory.pointer(), &values) };
    outcome.map_err(|error| Error::failed("copying to the device", explain(error)))?;
    place(shared, memory.pointer(), into);
    shared.synchronise();
    Ok(())
}
