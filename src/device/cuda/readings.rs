//! From the device to the host: values that the host waits for, and a step's sums, which come while the device goes on with the next.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use cudarc::driver::{CudaEvent, result};

use super::Cuda;
use super::machine::explain;
use super::memory::{CudaView, Format, Pinned};
use super::shared::Shared;
use crate::device::{Device, Role, totals};
use crate::{Error, Result};

/// Up to this many values come by a short way, through memory that is there for it.
pub(super) const MAILBOX_LEN: usize = 1024;

/// Readings that may be under way at the same time.
const MOST: usize = 4;

/// Places for the sums of the last few steps, taken in turn.
pub(super) struct Readings {
    places: Vec<RefCell<(Pinned, CudaEvent)>>,
    next: Cell<usize>,
}

/// Sums on their way to the host.
#[derive(Debug)]
pub struct TotalsReading {
    place: usize,
}

impl Readings {
    pub(super) fn new(shared: &Rc<Shared>) -> Result<Readings> {
        let place = |_| Ok(RefCell::new((Pinned::new(shared, totals::LEN)?, shared.new_event()?)));
        Ok(Readings { places: (0..MOST).map(place).collect::<Result<_>>()?, next: Cell::new(0) })
    }

    pub(super) fn start(&self, shared: &Shared, sums: CudaView<'_>) -> Result<TotalsReading> {
        assert_eq!(sums.len, totals::LEN);
        let place = self.next.replace((self.next.get() + 1) % MOST);
        let (pinned, event) = &mut *self.places[place].borrow_mut();
        // SAFETY: both hold that many values, and nobody looks at the host's before the event is complete.
        let outcome =
            unsafe { result::memcpy_dtoh_async(pinned.as_mut(), sums.pointer, shared.compute.cu_stream()) };
        shared.note("copying from the device", outcome);
        shared.note("copying from the device", event.record(&shared.compute));
        shared.check()?;
        Ok(TotalsReading { place })
    }

    pub(super) fn finish(&self, shared: &Shared, reading: TotalsReading) -> Result<[f32; totals::LEN]> {
        let (pinned, event) = &*self.places[reading.place].borrow();
        shared.wait_for(event);
        shared.check()?;
        Ok(std::array::from_fn(|total| pinned.as_ref()[total]))
    }
}

impl Cuda {
    /// See [`Device::read`].
    pub(super) fn read_values(
        &self,
        from: CudaView<'_>,
        look: &mut dyn FnMut(&[f32]) -> Result<()>,
    ) -> Result<()> {
        if from.format == Format::Bf16 {
            let mut wide = self.allocate(from.len, Role::Exact)?;
            self.copy(from, wide.view_mut(0..from.len));
            return self.read(wide.view(0..from.len), look);
        }
        if from.len > MAILBOX_LEN {
            self.shared.synchronise();
            self.shared.check()?;
            let mut values = vec![0.0; from.len];
            // SAFETY: both hold that many values; the call returns when they have arrived.
            let outcome = unsafe { result::memcpy_dtoh_sync(&mut values, from.pointer) };
            outcome.map_err(|error| Error::failed("copying from the device", explain(error)))?;
            return look(&values);
        }
        let mut mailbox = self.mailbox.borrow_mut();
        let values = &mut mailbox.as_mut()[..from.len];
        if !values.is_empty() {
            // SAFETY: as above; the stream is waited for before anyone looks.
            let outcome =
                unsafe { result::memcpy_dtoh_async(values, from.pointer, self.shared.compute.cu_stream()) };
            self.shared.note("copying from the device", outcome);
            self.shared.synchronise();
        }
        self.shared.check()?;
        look(values)
    }
}
