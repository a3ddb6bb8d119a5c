//! A GPU: its streams and kernels, and the memory that its operations share.

use std::cell::Cell;
use std::rc::Rc;

use super::cublaslt::CublasLt;
use super::format::Precision;
use super::kernels::KernelTables;
use super::partial_sums::PartialSums;
use super::readings::Readings;
use super::specialised::SpecialisedKernels;
use super::streams::{Counters, Streams};
use super::upload::Uploads;

/// A GPU as a [`Device`](crate::device::Device).
pub struct Cuda {
    pub(crate) streams: Rc<Streams>,
    pub(crate) kernels: KernelTables,
    pub(crate) specialised: SpecialisedKernels,
    pub(crate) cublaslt: CublasLt,
    pub(crate) uploads: Uploads,
    pub(crate) readings: Readings,
    pub(crate) partial_sums: PartialSums,
    /// Those of optimizers, which may run beside other kernels.
    pub(crate) step_sums: PartialSums,
    /// True if optimizers run beside the computation.
    pub(crate) forks_steps: Cell<bool>,
    pub(crate) precision: Precision,
    pub(crate) num_devices: usize,
}

impl Cuda {
    /// Returns the name and the number of the device.
    pub fn name(&self) -> String {
        format!("{} (device {} of {})", self.streams.name, self.streams.ordinal, self.num_devices)
    }

    /// Returns the number of devices that this rank sees.
    pub fn num_devices(&self) -> usize {
        self.num_devices
    }

    /// Returns the counts of the host's allocations, waits and launches.
    pub fn counters(&self) -> Counters {
        self.streams.counters()
    }
}
