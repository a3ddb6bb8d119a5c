//! Operations on the memory of a device.

use super::{Form, Meanwhile, Measured, Subject, expected, value};
use crate::Result;
use crate::comm::{Algorithm, Choice, DeviceCommunicator, Operation, Transfer};
use crate::device::{Device, Role};

type Started<B> = (Transfer<B>, Option<Transfer<B>>);

/// An operation on a buffer of a device, in place.
pub struct DeviceSubject<'a, D: Device> {
    device: &'a D,
    communicator: &'a DeviceCommunicator,
    operation: Measured,
    form: Form,
    len: usize,
    /// What is sent and, where that is not another, received.
    values: Option<D::Buffer>,
    received: Option<D::Buffer>,
    algorithm: Algorithm,
}

impl<'a, D: Device> DeviceSubject<'a, D> {
    /// A buffer for `operation` on `len` elements, kept as activations are: nothing if it has no such form. Collective.
    ///
    /// # Errors
    /// There is no memory for the buffer.
    pub fn new(
        device: &'a D,
        communicator: &'a DeviceCommunicator,
        operation: Measured,
        form: Form,
        len: usize,
    ) -> Result<Option<DeviceSubject<'a, D>>> {
        let needs_two = operation == Measured::SendReceive;
        let exists = match operation {
            Measured::SendReceive => !form.is_in_place,
            Measured::Broadcast | Measured::AllGather | Measured::AllReduce | Measured::ReduceScatter => {
                form.is_in_place
            }
            Measured::Scatter | Measured::Gather | Measured::AllToAll | Measured::Reduce => false,
        };
        if !exists {
            return Ok(None);
        }
        let values = Some(device.allocate(len, Role::Activations)?);
        let received = if needs_two { Some(device.allocate(len, Role::Activations)?) } else { None };
        let algorithm = Algorithm::Mpi;
        Ok(Some(DeviceSubject { device, communicator, operation, form, len, values, received, algorithm }))
    }

    /// The transfer of the values, and that of what is received in another buffer.
    fn start(&mut self) -> Result<Started<D::Buffer>> {
        let (all, len) = (self.communicator, self.len);
        let (rank, size) = (all.rank(), all.size());
        let values = self.values.take().expect("a run gives the buffer back");
        let one = match self.operation {
            Measured::AllGather => all.start_all_gather_in_place(values, len)?,
            Measured::AllReduce => all.start_all_reduce_in_place(values, len, Operation::Sum)?,
            Measured::ReduceScatter => all.start_reduce_scatter(values, len, Operation::Sum)?,
            Measured::Broadcast => all.start_broadcast(values, 0)?,
            _ => {
                let into = self.received.take().expect("a run gives the buffer back");
                let receiving = all.start_receive(into, len, (rank + size - 1) % size, 0)?;
                return Ok((all.start_send(values, len, (rank + 1) % size, 0)?, Some(receiving)));
            }
        };
        Ok((one, None))
    }
}

impl<D: Device> Subject for DeviceSubject<'_, D> {
    fn fill(&mut self) -> Result<()> {
        let (rank, len) = (self.communicator.rank(), self.len);
        let buffer = self.values.as_mut().expect("a run gives the buffer back");
        self.device.write(self.device.view_mut(buffer, 0..len), &mut |values| {
            values.iter_mut().enumerate().for_each(|(at, into)| *into = value(rank, at));
            Ok(())
        })
    }

    fn choose(&mut self, choice: Option<Choice>) {
        self.communicator.set_choice(choice);
    }

    fn algorithm(&self) -> Algorithm {
        self.algorithm
    }

    fn run(&mut self, meanwhile: Meanwhile<'_>) -> Result<()> {
        let (mut one, mut other) = self.start()?;
        if !self.form.is_blocking {
            meanwhile(&mut || {
                one.test();
                other.as_mut().map(Transfer::test);
                Ok(())
            })?;
        }
        self.algorithm = self.communicator.last_algorithm();
        self.values = Some(one.wait());
        self.received = other.map(Transfer::wait);
        Ok(())
    }

    fn wrong(&mut self) -> Result<u64> {
        let (rank, size) = (self.communicator.rank(), self.communicator.size());
        let (range, expectation) = expected(self.operation, rank, size, self.len);
        let buffer = self.received.as_ref().or(self.values.as_ref()).expect("a run gives the buffer back");
        let mut wrong = 0;
        self.device.read(self.device.view(buffer, range.clone()), &mut |values| {
            let found = range.clone().zip(values);
            wrong = found.filter(|(at, found)| **found != expectation.at(*at, size)).count() as u64;
            Ok(())
        })?;
        Ok(wrong)
    }
}
