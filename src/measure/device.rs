//! Operations on the memory of a device.

use super::buffers::{DeviceBuffers, DeviceTransfers, Geometry};
use super::operations::OnDevice;
use super::{CallForm, Meanwhile, Measured, Subject, choosing, value};
use crate::Result;
use crate::comm::{Algorithm, Choice, DeviceCommunicator, Transfer};
use crate::device::{Cuda, Device, Role};

/// An operation on buffers of a device.
pub struct DeviceSubject<'a> {
    device: &'a Cuda,
    communicator: &'a DeviceCommunicator,
    operation: Measured,
    on_device: &'static OnDevice,
    form: CallForm,
    geometry: Geometry,
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
        communicator: &'a DeviceCommunicator,
        operation: Measured,
        form: CallForm,
        len: usize,
    ) -> Result<Option<DeviceSubject<'a>>> {
        let has_form = |on_device: &&OnDevice| on_device.is_in_place == form.is_in_place;
        let Some(on_device) = operation.on_device.as_ref().filter(has_form) else { return Ok(None) };
        let values = device.allocate(len, Role::Activations)?;
        let received = if form.is_in_place { None } else { Some(device.allocate(len, Role::Activations)?) };
        let (buffers, geometry) =
            (Some(DeviceBuffers { values, received }), Geometry::of_device(communicator, len));
        Ok(Some(DeviceSubject { device, communicator, operation, on_device, form, geometry, buffers }))
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
        let (buffers, algorithm) = choosing::on_device(self.communicator, choice, |all| {
            let DeviceTransfers { mut values, mut received } =
                (self.on_device.start)(all, &self.geometry, buffers)?;
            if !self.form.is_blocking {
                meanwhile(&mut || {
                    values.test();
                    received.as_mut().map(Transfer::test);
                    Ok(())
                })?;
            }
            Ok(DeviceBuffers { values: values.wait(), received: received.map(Transfer::wait) })
        })?;
        self.buffers = Some(buffers);
        Ok(algorithm)
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
