//! Operations measured on one kind of memory, beside the other ways to do them there.

use super::overlap::{Computation, DeviceComputation, HostComputation};
use super::{Contender, DeviceSubject, Form, HostSubject, Measured, Row, Subject, contest};
use crate::Result;
use crate::comm::{Algorithm, Choice, Communicator, Transfers};
use crate::device::{Device, Role};
use crate::memory::Buffer as _;

/// How operations are measured.
#[derive(Debug, Clone, Copy)]
pub struct Settings {
    /// For about how long each, in seconds.
    pub seconds: f64,
    /// How it is done, if not as was measured to be fast.
    pub choice: Option<Choice>,
    /// Measure the other ways beside it, in turns.
    pub compare: bool,
}

/// Memory that operations can be measured on.
pub trait Bench {
    /// The bytes of an element.
    fn value_bytes(&self) -> usize;

    /// Measures `operation` on buffers of `len` elements; nothing if it has no such form. Collective.
    ///
    /// # Errors
    /// There is no memory for the buffers, or for messages.
    fn measure(&self, operation: Measured, form: Form, len: usize) -> Result<Option<Row>>;
}

/// What is measured, until it is.
struct Entry<'a> {
    all: &'a Communicator,
    contenders: Vec<Contender<'a>>,
}

impl<'a> Entry<'a> {
    /// Another contender, if there is such an operation. Collective.
    fn add<S: Subject + 'a>(
        &mut self,
        name: &'static str,
        choice: Option<Choice>,
        subject: Result<Option<S>>,
    ) -> Result<()> {
        let contender = |subject| Contender { name, choice, subject: Box::new(subject) };
        self.contenders.extend(self.all.agree(subject)?.map(contender));
        Ok(())
    }

    /// The row of the first; nothing if there is none. Collective.
    fn contest(
        self,
        what: (Measured, Form),
        memory: (usize, &'static str),
        seconds: f64,
        computation: &dyn Computation,
    ) -> Result<Option<Row>> {
        if self.contenders.is_empty() {
            return Ok(None);
        }
        contest(self.all, what, memory, seconds, computation, self.contenders).map(Some)
    }
}

/// The processor's memory, where MPI's own operations are the other way.
pub struct HostBench<'a> {
    /// The ranks.
    pub all: &'a Communicator,
    /// How.
    pub settings: Settings,
}

impl Bench for HostBench<'_> {
    fn value_bytes(&self) -> usize {
        size_of::<f32>()
    }

    fn measure(&self, operation: Measured, form: Form, len: usize) -> Result<Option<Row>> {
        let Settings { seconds, choice, compare } = self.settings;
        let subject = || HostSubject::new(self.all, operation, form, len);
        let mut entry = Entry { all: self.all, contenders: Vec::new() };
        entry.add("ours", choice, subject())?;
        if compare {
            entry.add("mpi", Some(Choice::whole(Algorithm::Mpi)), subject())?;
        }
        entry.contest((operation, form), (len * self.value_bytes(), "host"), seconds, &HostComputation)
    }
}

/// A device's memory, where messages through the host are another way, and MPI's own operations: on the host, and its all-reduce on the
/// device where it takes that memory.
pub struct DeviceBench<'a, D: Device> {
    all: &'a Communicator,
    settings: Settings,
    device: &'a D,
    value_bytes: usize,
    best: Communicator,
    staged: Communicator,
    computation: DeviceComputation<'a, D>,
}

impl<'a, D: Device> DeviceBench<'a, D> {
    /// Collective.
    ///
    /// # Errors
    /// The device has no memory left on some rank.
    pub fn new(device: &'a D, all: &'a Communicator, settings: Settings) -> Result<DeviceBench<'a, D>> {
        let best = all.duplicate();
        let staged = best.through_host();
        let computation = all.agree(DeviceComputation::new(device))?;
        let value_bytes = all.agree(device.allocate(1, Role::Activations))?.element_type().bytes();
        Ok(DeviceBench { all, settings, device, value_bytes, best, staged, computation })
    }
}

impl<D: Device> Bench for DeviceBench<'_, D> {
    fn value_bytes(&self) -> usize {
        self.value_bytes
    }

    fn measure(&self, operation: Measured, form: Form, len: usize) -> Result<Option<Row>> {
        let Settings { seconds, choice, compare } = self.settings;
        let subject = |communicator| DeviceSubject::new(self.device, communicator, operation, form, len);
        let mut entry = Entry { all: self.all, contenders: Vec::new() };
        entry.add("ours", choice, subject(&self.best))?;
        let is_f32 = self.value_bytes == size_of::<f32>();
        if compare && self.best.transfers() == Transfers::Aware {
            entry.add("staged", None, subject(&self.staged))?;
            if operation == Measured::AllReduce && is_f32 {
                // started, MPI's own reductions of device memory crash
                let mut inside_mpi = subject(&self.best)?;
                inside_mpi.iter_mut().for_each(DeviceSubject::run_inside_mpi);
                entry.add("mpi", None, Ok(inside_mpi))?;
            }
        } else if compare && is_f32 && !matches!(operation, Measured::SendReceive | Measured::ReduceScatter) {
            entry.add("mpi", Some(Choice::whole(Algorithm::Mpi)), subject(&self.best))?;
        }
        entry.contest((operation, form), (len * self.value_bytes, "device"), seconds, &self.computation)
    }
}
