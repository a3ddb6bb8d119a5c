//! Transfers from the device to the host: values that the host waits for, and a step's totals,
//! which arrive while the device runs the next step.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use cudarc::driver::{CudaEvent, result};

use super::buffer::{CudaView, CudaViewMut};
use super::launch::{Launch, launch};
use super::machine::explain;
use super::memory::Pinned;
use super::streams::Streams;
use crate::device::{StepTotals, totals};
use crate::{Error, Result};

/// The most values that are read through the pinned memory kept for readings.
const MAX_PINNED: usize = 1024;

/// Readings of totals that may be under way at the same time.
const MAX_READINGS: usize = 4;

/// Pinned memory for readings: of a few values, and of the totals of the last steps, used in
/// rotation.
pub(crate) struct Readings {
    values: RefCell<Pinned>,
    totals: Vec<RefCell<PendingTotals>>,
    next: Cell<usize>,
}

struct PendingTotals {
    pinned: Pinned,
    copied: CudaEvent,
}

/// A step's totals on their way to the host.
#[derive(Debug)]
pub struct TotalsReading {
    index: usize,
}

impl Readings {
    pub(crate) fn new(streams: &Rc<Streams>) -> Result<Readings> {
        let pending = |_| {
            let pinned = Pinned::new(streams, totals::NUM_VALUES)?;
            Ok(RefCell::new(PendingTotals { pinned, copied: streams.new_event()? }))
        };
        Ok(Readings {
            values: RefCell::new(Pinned::new(streams, MAX_PINNED)?),
            totals: (0..MAX_READINGS).map(pending).collect::<Result<_>>()?,
            next: Cell::new(0),
        })
    }

    /// Waits for all computation and shows `f32` values on the device to `inspect`.
    pub(crate) fn read(
        &self,
        streams: &Streams,
        from: CudaView<'_>,
        inspect: &mut dyn FnMut(&[f32]) -> Result<()>,
    ) -> Result<()> {
        if from.len > MAX_PINNED {
            streams.synchronise();
            streams.check()?;
            let mut values = vec![0.0; from.len];
            // SAFETY: both hold `from.len` values of 4 bytes; the call returns when the copy is
            // done.
            let outcome = unsafe { result::memcpy_dtoh_sync(&mut values, from.pointer) };
            outcome.map_err(|error| Error::failed("copying from the device", explain(error)))?;
            return inspect(&values);
        }
        let mut pinned = self.values.borrow_mut();
        let values = &mut pinned.as_mut()[..from.len];
        if !values.is_empty() {
            // the copy is to see what another stream computes
            streams.join();
            let stream = streams.compute.cu_stream();
            // SAFETY: both hold `from.len` values of 4 bytes, and the stream is synchronised before
            // anything reads the host's.
            let outcome = unsafe { result::memcpy_dtoh_async(values, from.pointer, stream) };
            streams.note("copying from the device", outcome);
            streams.synchronise();
        }
        streams.check()?;
        inspect(values)
    }

    pub(crate) fn take_totals(&self, streams: &Streams, sums: CudaViewMut<'_>) -> Result<TotalsReading> {
        assert_eq!(sums.len, totals::LEN);
        let index = self.next.replace((self.next.get() + 1) % MAX_READINGS);
        let PendingTotals { pinned, copied } = &mut *self.totals[index].borrow_mut();
        // a kernel, whose start costs less than that of a copy; nothing reads the host's memory before the
        // event is complete
        let launch = Launch { blocks: (1, 1), threads: (32, 1), shared_bytes: 0 };
        let (len, into) = (totals::NUM_VALUES as u32, pinned.pointer() as u64);
        launch!(streams, &streams.kernels.take_few, launch, len, sums.pointer, into);
        streams.note("copying from the device", copied.record(&streams.compute));
        streams.check()?;
        Ok(TotalsReading { index })
    }

    pub(crate) fn finish_totals(&self, streams: &Streams, reading: TotalsReading) -> Result<StepTotals> {
        let PendingTotals { pinned, copied } = &*self.totals[reading.index].borrow();
        streams.wait_for(copied);
        streams.check()?;
        Ok(StepTotals::rounded(std::array::from_fn(|total| pinned.as_ref()[total])))
    }
}
