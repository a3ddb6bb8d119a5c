//! Operations measured on one kind of memory, and alternative ways to do them there.

use super::contender::Contender;
use super::contest::{Conditions, contest};
use super::overlap::{DeviceComputation, HostComputation};
use super::{CallForm, DeviceSubject, HostSubject, Measured, Row};
use crate::Result;
use crate::comm::{Algorithm, Choice, Communicator, Transfers};
use crate::device::{Cuda, MemoryOperations as _, Role};
use crate::memory::Buffer as _;

/// The settings of all measurements.
#[derive(Debug, Clone, Copy)]
pub struct BenchSettings {
    /// The approximate time that each way to do an operation is measured, in seconds.
    pub seconds: f64,
    /// The algorithm, if not the one that was measured to be fast.
    pub choice: Option<Choice>,
    /// True to measure the other ways too, alternately.
    pub compare: bool,
}

/// Memory that operations can be measured on.
pub trait Bench {
    /// Returns the bytes of an element.
    fn value_bytes(&self) -> usize;

    /// Measures `operation` on buffers of `len` elements; `None` if it does not have this form.
    /// Collective.
    ///
    /// # Errors
    /// There is no memory for the buffers, or for messages.
    fn measure(&self, operation: Measured, form: CallForm, len: usize) -> Result<Option<Row>>;
}

/// Host memory, where MPI's own operations are the alternative.
pub struct HostBench<'a> {
    /// The ranks.
    pub all: &'a Communicator,
    /// The settings of all measurements.
    pub settings: BenchSettings,
}

impl HostBench<'_> {
    /// Returns the most buffers of a rank while `operation` is measured: each way to do it has its own.
    pub fn num_buffers(&self, operation: Measured) -> usize {
        operation.num_buffers() * if self.settings.compare { 2 } else { 1 }
    }
}

impl Bench for HostBench<'_> {
    fn value_bytes(&self) -> usize {
        size_of::<f32>()
    }

    fn measure(&self, operation: Measured, form: CallForm, len: usize) -> Result<Option<Row>> {
        let BenchSettings { seconds, choice, compare } = self.settings;
        let subject = || HostSubject::new(self.all, operation, form, len);
        let mut contenders = Vec::new();
        contenders.extend(Contender::new(self.all, "ours", choice, subject())?);
        if compare {
            contenders.extend(Contender::new(
                self.all,
                "mpi",
                Some(Choice::whole(Algorithm::Mpi)),
                subject(),
            )?);
        }
        let bytes = len * self.value_bytes();
        let conditions = Conditions { operation, form, bytes, memory: "host", seconds };
        contest(self.all, conditions, &HostComputation, contenders)
    }
}

/// Device memory. The alternatives are staged messages and MPI's own operations: on staged values
/// and, for the all-reduce of a CUDA-aware MPI, on device memory.
pub struct DeviceBench<'a> {
    all: &'a Communicator,
    settings: BenchSettings,
    device: &'a Cuda,
    value_bytes: usize,
    best: Communicator,
    staged: Communicator,
    computation: DeviceComputation<'a, Cuda>,
}

impl<'a> DeviceBench<'a> {
    /// Creates a bench of the memory of `device`. Collective.
    ///
    /// # Errors
    /// The device does not have enough memory on some rank.
    pub fn new(device: &'a Cuda, all: &'a Communicator, settings: BenchSettings) -> Result<DeviceBench<'a>> {
        let best = all.duplicate();
        let staged = best.through_host();
        let computation = all.agree(DeviceComputation::new(device))?;
        let value_bytes = all.agree(device.allocate(1, Role::Activations))?.element_type().bytes();
        Ok(DeviceBench { all, settings, device, value_bytes, best, staged, computation })
    }
}

impl Bench for DeviceBench<'_> {
    fn value_bytes(&self) -> usize {
        self.value_bytes
    }

    fn measure(&self, operation: Measured, form: CallForm, len: usize) -> Result<Option<Row>> {
        let BenchSettings { seconds, choice, compare } = self.settings;
        let subject = |communicator| DeviceSubject::new(self.device, communicator, operation, form, len);
        let mut contenders = Vec::new();
        let transfers = self.best.transfers();
        // MPI has no sums of bfloat16
        let has_mpi = self.value_bytes == size_of::<f32>()
            && operation.on_device.as_ref().is_some_and(|on_device| (on_device.compares_with_mpi)(transfers));
        let subject_for = |algorithm| {
            let mut own = subject(&self.best)?;
            // MPI's started sums of device memory may crash, its blocking ones do not
            let is_inside = algorithm == Algorithm::Mpi && has_mpi && transfers == Transfers::Aware;
            if let (true, Some(own)) = (is_inside, &mut own) {
                own.run_inside_mpi();
            }
            Ok(own)
        };
        let own = choice.map_or_else(|| subject(&self.best), |choice| subject_for(choice.algorithm));
        contenders.extend(Contender::new(self.all, "ours", choice, own)?);
        if compare && (transfers == Transfers::Aware || self.best.has_peers()) {
            contenders.extend(Contender::new(self.all, "staged", None, subject(&self.staged))?);
        }
        if compare && has_mpi {
            let own = subject_for(Algorithm::Mpi);
            contenders.extend(Contender::new(self.all, "mpi", Some(Choice::whole(Algorithm::Mpi)), own)?);
        }
        let bytes = len * self.value_bytes;
        let conditions = Conditions { operation, form, bytes, memory: "device", seconds };
        contest(self.all, conditions, &self.computation, contenders)
    }
}
