//! A step's sums on their way to the host, while the device goes on with the next step.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use cudarc::driver::{CudaEvent, result};

use super::memory::{CudaView, Pinned};
use super::shared::Shared;
use crate::Result;
use crate::device::totals;

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
        let outcome = unsafe { result::memcpy_dtoh_async(pinned.as_mut(), sums.pointer, shared.compute.cu_stream()) };
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
