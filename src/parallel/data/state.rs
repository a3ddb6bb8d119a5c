//! The state of a rank tensor by tensor, for checkpoints and checks.
//!
//! Every replica provides the part of a tensor that it owns in ZeRO, also where it keeps all of it.

use super::Weights;
use crate::Result;
use crate::device::Device;
use crate::parallel::zero::{TensorPart, ZeroStage};

impl<D: Device> Weights<D> {
    /// Returns the names of the optimizer's slots.
    pub fn slot_names(&self) -> &'static [&'static str] {
        self.optimizer.settings().slot_names()
    }

    /// Returns true if every replica keeps its part of the parameters only.
    pub fn has_parameters_in_parts(&self) -> bool {
        self.parameters.is_in_parts()
    }

    /// Calls `show` with the part of tensor `tensor` that this rank provides. Not collective.
    ///
    /// # Errors
    /// `show` failed, or the transfer from the device did.
    pub fn read_parameter(
        &self,
        device: &D,
        tensor: usize,
        show: &mut dyn FnMut(&[f32]) -> Result<()>,
    ) -> Result<()> {
        self.parameters.read(device, tensor, show)
    }

    /// Overwrites the values of tensor `tensor` that this rank keeps with those of the whole
    /// `block`. Not collective.
    ///
    /// # Errors
    /// The transfer to the device failed.
    pub fn write_parameter(&mut self, device: &D, tensor: usize, block: &[f32]) -> Result<()> {
        self.parameters.write(device, tensor, block)
    }

    /// Calls `show` with the part of tensor `tensor` of slot `slot` that this rank provides. Not
    /// collective.
    ///
    /// # Errors
    /// `show` failed, or the transfer from the device did.
    pub fn read_slot(
        &self,
        device: &D,
        slot: usize,
        tensor: usize,
        show: &mut dyn FnMut(&[f32]) -> Result<()>,
    ) -> Result<()> {
        let (segment, place) = self.parameters.flat().place(tensor);
        let TensorPart { kept, block } = self.partition.of_tensor(segment, &place);
        let own = match self.stage {
            ZeroStage::None => place.start + block.start..place.start + block.end,
            _ => kept,
        };
        if block.is_empty() {
            show(&[])
        } else {
            device.read(self.optimizer.slot(device, segment, slot, own), show)
        }
    }

    /// Calls `show` with the part of the gradient of tensor `tensor` that this rank provides; in
    /// stage 0 only. Not collective.
    ///
    /// # Errors
    /// `show` failed, or the transfer from the device did.
    pub fn read_gradient(
        &self,
        device: &D,
        tensor: usize,
        show: &mut dyn FnMut(&[f32]) -> Result<()>,
    ) -> Result<()> {
        let (segment, place) = self.parameters.flat().place(tensor);
        let block = self.partition.of_tensor(segment, &place).block;
        device.read(self.gradients().tensor(device, tensor), &mut |values| show(&values[block.clone()]))
    }

    /// Calls `look` with all values that this rank keeps, slot by slot and tensor by tensor. Not
    /// collective.
    ///
    /// # Errors
    /// The transfer from the device failed.
    pub fn read_slots(&self, device: &D, look: &mut dyn FnMut(&[f32])) -> Result<()> {
        for slot in 0..self.slot_names().len() {
            for tensor in 0..self.parameters().num_tensors() {
                self.read_kept_slot(device, slot, tensor, &mut |values| {
                    look(values);
                    Ok(())
                })?;
            }
        }
        Ok(())
    }

    /// Calls `show` with the values of tensor `tensor` of slot `slot` that this rank keeps. Not collective.
    ///
    /// # Errors
    /// `show` failed, or the transfer from the device did.
    pub fn read_kept_slot(
        &self,
        device: &D,
        slot: usize,
        tensor: usize,
        show: &mut dyn FnMut(&[f32]) -> Result<()>,
    ) -> Result<()> {
        let (segment, TensorPart { kept, .. }) = self.slot_part(tensor);
        if kept.is_empty() {
            return show(&[]);
        }
        device.read(self.optimizer.slot(device, segment, slot, kept), show)
    }

    /// Overwrites this rank's part of tensor `tensor` of slot `slot` with values of the whole
    /// `block`. Not collective.
    ///
    /// # Errors
    /// The transfer to the device failed.
    pub fn write_slot(&mut self, device: &D, slot: usize, tensor: usize, block: &[f32]) -> Result<()> {
        let (segment, TensorPart { kept, block: from }) = self.slot_part(tensor);
        if kept.is_empty() {
            return Ok(());
        }
        device.write(self.optimizer.slot_mut(device, segment, slot, kept), &mut |values| {
            values.copy_from_slice(&block[from.clone()]);
            Ok(())
        })
    }

    /// Returns the segment of tensor `tensor`, and the elements whose slots this rank keeps.
    fn slot_part(&self, tensor: usize) -> (usize, TensorPart) {
        let (segment, place) = self.parameters.flat().place(tensor);
        let part = match self.stage {
            ZeroStage::None => TensorPart { block: 0..place.len(), kept: place },
            _ => self.partition.of_tensor(segment, &place),
        };
        (segment, part)
    }
}
