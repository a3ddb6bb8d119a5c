//! [`DeviceSubject`]: an operation on the memory of a device.

use super::buffers::{DeviceBuffers, DevicePending, Geometry};
use super::operation::OnDevice;
use super::{CallForm, Meanwhile, Measured, Subject, value};
use crate::Result;
use crate::comm::{Algorithm, Choice, Communicator, Pending};
use crate::device::{Cuda, CudaBuffer, MemoryOperations as _, Role};
use crate::memory::Buffer as _;

/// An operation on buffers of a device.
pub struct DeviceSubject<'a> {
    device: &'a Cuda,
    communicator: &'a Communicator,
    operation: Measured,
    on_device: &'static OnDevice,
    form: CallForm,
    geometry: Geometry,
    is_inside_mpi: bool,
    /// `None` while a run has them.
    buffers: Option<DeviceBuffers>,
}

impl<'a> DeviceSubject<'a> {
    /// Allocates buffers for `operation` on `len` elements, kept as activations are; `None` if it
    /// does not have this form. Collective.
    ///
    /// # Errors
    /// There is no memory for the buffers.
    pub fn new(
        device: &'a Cuda,
        communicator: &'a Communicator,
        operation: Measured,
        form: CallForm,
        len: usize,
    ) -> Result<Option<DeviceSubject<'a>>> {
        let has_form = |on_device: &&OnDevice| on_device.is_in_place == form.is_in_place;
        let Some(on_device) = operation.on_device.as_ref().filter(has_form) else { return Ok(None) };
        let values = device.allocate(len, Role::Activations)?;
        let received = if form.is_in_place { None } else { Some(device.allocate(len, Role::Activations)?) };
        Ok(Some(DeviceSubject {
            device,
            communicator,
            operation,
            on_device,
            form,
            geometry: Geometry::new(communicator, len),
            is_inside_mpi: false,
            buffers: Some(DeviceBuffers { values, received }),
        }))
    }

    /// Runs MPI's own blocking call from now on, where there is one, whether MPI can read the
    /// buffer or not: CUDA-aware MPIs may crash in their non-blocking reductions
    /// (open-mpi/ompi#9845).
    pub fn run_inside_mpi(&mut self) {
        self.is_inside_mpi = true;
    }
}

impl Subject for DeviceSubject<'_> {
    fn fill(&mut self) -> Result<()> {
        let Geometry { rank, len, .. } = self.geometry;
        let buffers = self.buffers.as_mut().expect("a run gives the buffers back");
        self.device.write(self.device.view_mut(&mut buffers.values, 0..len), &mut |values| {
            values.iter_mut().enumerate().for_each(|(at, into)| *into = value(rank, at));
            Ok(())
        })
    }

    fn run(&mut self, choice: Option<Choice>, meanwhile: Meanwhile<'_>) -> Result<Algorithm> {
        let buffers = self.buffers.take().expect("a run gives the buffers back");
        let planned = (self.operation.planned)(self.form);
        if let (true, Some(collective)) = (self.is_inside_mpi, planned) {
            let values = self.communicator.run_inside_mpi(collective, buffers.values)?;
            self.buffers = Some(DeviceBuffers { values, ..buffers });
            meanwhile(&mut || Ok(()))?;
            return Ok(Algorithm::Mpi);
        }
        let chosen = choice.map(|choice| self.communicator.using(choice));
        let all = chosen.as_ref().unwrap_or(self.communicator);
        let (call, element) = (all.call_on::<CudaBuffer>(), buffers.values.element_type());
        let DevicePending { mut values, mut received } =
            (self.on_device.start)(all, &self.geometry, buffers)?;
        if !self.form.is_blocking {
            meanwhile(&mut || {
                values.test();
                received.as_mut().map(Pending::test);
                Ok(())
            })?;
        }
        let (values, received) = (values.wait(), received.map(Pending::wait));
        self.buffers = Some(DeviceBuffers { values, received });
        let algorithm = |collective| all.choice(collective, call, self.geometry.len, element).algorithm;
        // a message is a copy where the ranks map each other's memory
        let of_messages = if all.maps_peers() { Algorithm::Ipc } else { Algorithm::Mpi };
        Ok(planned.map_or(of_messages, algorithm))
    }

    fn wrong(&mut self) -> Result<u64> {
        let (operation, geometry) = (self.operation, &self.geometry);
        let DeviceBuffers { values, received } = self.buffers.as_ref().expect("a run gives the buffers back");
        let (buffer, range) = (received.as_ref().unwrap_or(values), (operation.received)(geometry));
        let mut wrong = 0;
        self.device.read(self.device.view(buffer, range.clone()), &mut |values| {
            let found = range.clone().zip(values);
            wrong = found.filter(|(at, found)| **found != (operation.expected)(geometry, *at)).count() as u64;
            Ok(())
        })?;
        Ok(wrong)
    }
}
