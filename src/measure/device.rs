//! Operations on the memory of a device.

use super::{Form, Meanwhile, Measured, Subject, expected, value};
use crate::Result;
use crate::comm::{Algorithm, Choice, Communicator, Operation, Pending};
use crate::device::{Device, Role};
use crate::memory::{Buffer as _, ElementType};

type Started<B> = (Pending<B>, Option<Pending<B>>);

/// An operation on a buffer of a device, in place.
pub struct DeviceSubject<'a, D: Device> {
    device: &'a D,
    communicator: &'a Communicator,
    operation: Measured,
    form: Form,
    len: usize,
    /// What is sent and, where that is not another, received.
    values: Option<D::Buffer>,
    received: Option<D::Buffer>,
    choice: Option<Choice>,
    is_inside_mpi: bool,
}

impl<'a, D: Device> DeviceSubject<'a, D> {
    /// A buffer for `operation` on `len` elements, kept as activations are: nothing if it has no such form. Collective.
    ///
    /// # Errors
    /// There is no memory for the buffer.
    pub fn new(
        device: &'a D,
        communicator: &'a Communicator,
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
        Ok(Some(DeviceSubject {
            device,
            communicator,
            operation,
            form,
            len,
            values,
            received,
            choice: None,
            is_inside_mpi: false,
        }))
    }

    /// Runs MPI's own blocking call from now on, where there is one, whether MPI can read the buffer or not.
    pub fn run_inside_mpi(&mut self) {
        self.is_inside_mpi = true;
    }

    /// The transfer of the values, and that of what is received in another buffer.
    fn start(&mut self) -> Result<Started<D::Buffer>> {
        let chosen = self.choice.map(|choice| self.communicator.using(choice));
        let all = chosen.as_ref().unwrap_or(self.communicator);
        let (rank, size) = (all.rank(), all.size());
        let values = self.values.take().expect("a run gives the buffer back");
        let one = match self.operation {
            Measured::AllGather => all.start_all_gather_in_place(values)?,
            Measured::AllReduce => all.start_all_reduce_in_place(values, Operation::Sum)?,
            Measured::ReduceScatter => all.start_reduce_scatter(values, Operation::Sum)?,
            Measured::Broadcast => all.start_broadcast(values, 0)?,
            _ => {
                let into = self.received.take().expect("a run gives the buffer back");
                let receiving = all.start_receive(into, (rank + size - 1) % size, 0)?;
                return Ok((all.start_send(values, (rank + 1) % size, 0)?, Some(receiving)));
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
        self.choice = choice;
    }

    fn algorithm(&self) -> Algorithm {
        let Some(collective) = self.operation.collective() else { return Algorithm::Mpi };
        let chosen = self.choice.map(|choice| self.communicator.using(choice));
        let all = chosen.as_ref().unwrap_or(self.communicator);
        let element = self.values.as_ref().map_or(ElementType::F32, |values| values.element_type());
        all.choice(collective, all.call_on::<D::Buffer>(), self.len, element).algorithm
    }

    fn run(&mut self, meanwhile: Meanwhile<'_>) -> Result<()> {
        if let (true, Some(collective)) = (self.is_inside_mpi, self.operation.collective()) {
            let values = self.values.take().expect("a run gives the buffer back");
            self.values = Some(self.communicator.run_inside_mpi(collective, values)?);
            return Ok(());
        }
        let (mut one, mut other) = self.start()?;
        if !self.form.is_blocking {
            meanwhile(&mut || {
                one.test();
                other.as_mut().map(Pending::test);
                Ok(())
            })?;
        }
        self.values = Some(one.wait());
        self.received = other.map(Pending::wait);
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
