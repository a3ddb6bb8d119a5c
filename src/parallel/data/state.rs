//! The state of a rank tensor by tensor, for checkpoints and checks.
//!
//! A tensor's values lie on one replica, or on several consecutive ones that keep a part each.
//! Where all replicas keep all of them, the first one provides them.

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

    /// Calls `show` with the values of tensor `tensor` that this rank keeps: all of them, or its
    /// part. Not collective.
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

    /// Calls `show` with the part of tensor `tensor` of slot `slot` that this rank provides. Over
    /// the data axis, in rank order, the parts make up the block of the tensor. Not collective.
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
        let (segment, TensorPart { kept, .. }) = self.slot_part(tensor);
        if self.stage == ZeroStage::None && !self.reductions.is_root() || kept.is_empty() {
            return show(&[]);
        }
        device.read(self.optimizer.slot(device, segment, slot, kept), show)
    }

    /// Calls `look` with all values that this rank keeps, slot by slot and tensor by tensor. Not
    /// collective.
    ///
    /// # Errors
    /// The transfer from the device failed.
    pub fn look_at_slots(&self, device: &D, look: &mut dyn FnMut(&[f32])) -> Result<()> {
        for slot in 0..self.slot_names().len() {
            for tensor in 0..self.numbers.len() {
                let (segment, TensorPart { kept, .. }) = self.slot_part(tensor);
                if !kept.is_empty() {
                    device.read(self.optimizer.slot(device, segment, slot, kept), &mut |values| {
                        look(values);
                        Ok(())
                    })?;
                }
            }
        }
        Ok(())
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
