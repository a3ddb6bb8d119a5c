//! What the optimizer keeps for each parameter, tensor by tensor, for checkpoints.
//!
//! With a reduce-scatter every replica keeps what belongs to its part of each bucket, so a tensor's values lie on one
//! replica or on several that follow each other; with an all-reduce every replica keeps them all, and the first speaks.

use std::ops::Range;

use super::{GradSync, Reduction};
use crate::Result;
use crate::device::Device;
use crate::nn::FlatBuffer;

/// The elements of a tensor's slot that this rank keeps.
struct KeptPart {
    segment: usize,
    /// Their range in this rank's memory for the segment.
    kept: Range<usize>,
    /// Their range in the block of the tensor that this rank and its replicas hold.
    block: Range<usize>,
}

impl<D: Device> GradSync<D> {
    /// The names of the slots.
    pub fn slot_names(&self) -> &'static [&'static str] {
        self.optimizer.settings().slot_names()
    }

    /// Shows the part of tensor `tensor` of slot `slot` that this rank speaks for; over the data axis, in rank order, the
    /// parts make up the block of the tensor. Not collective.
    ///
    /// # Errors
    /// What `show` returns, or the transfer from the device failed.
    pub fn read_slot(
        &self,
        device: &D,
        parameters: &FlatBuffer<D>,
        slot: usize,
        tensor: usize,
        show: &mut dyn FnMut(&[f32]) -> Result<()>,
    ) -> Result<()> {
        let KeptPart { segment, kept, .. } = self.part(parameters, tensor);
        if self.reduction == Reduction::AllReduce && !self.reductions.is_root() || kept.is_empty() {
            return show(&[]);
        }
        device.read(self.optimizer.slot(device, segment, slot, kept), show)
    }

    /// Shows all that this rank keeps, slot by slot and tensor by tensor: where every replica keeps all of it, the same on each. Not
    /// collective.
    ///
    /// # Errors
    /// The transfer from the device failed.
    pub fn look_at_slots(
        &self,
        device: &D,
        parameters: &FlatBuffer<D>,
        look: &mut dyn FnMut(&[f32]),
    ) -> Result<()> {
        for slot in 0..self.slot_names().len() {
            for tensor in 0..parameters.num_tensors() {
                let KeptPart { segment, kept, .. } = self.part(parameters, tensor);
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

    /// Overwrites what this rank keeps of tensor `tensor` of slot `slot`, of which `block` is the whole block. Not collective.
    ///
    /// # Errors
    /// The transfer to the device failed.
    pub fn write_slot(
        &mut self,
        device: &D,
        parameters: &FlatBuffer<D>,
        slot: usize,
        tensor: usize,
        block: &[f32],
    ) -> Result<()> {
        let part = self.part(parameters, tensor);
        if part.kept.is_empty() {
            return Ok(());
        }
        device.write(self.optimizer.slot_mut(device, part.segment, slot, part.kept), &mut |values| {
            values.copy_from_slice(&block[part.block.clone()]);
            Ok(())
        })
    }

    /// What this rank keeps of tensor `tensor`.
    fn part(&self, parameters: &FlatBuffer<D>, tensor: usize) -> KeptPart {
        let (segment, place) = parameters.place(tensor);
        let bucket = self.buckets.iter().find(|bucket| bucket.segment == segment);
        let first = bucket.map_or(0, |bucket| bucket.owned.start);
        match bucket.map(|bucket| bucket.owned_of(&place)) {
            Some(Range { start, end }) if start < end => KeptPart {
                segment,
                kept: start - first..end - first,
                block: start - place.start..end - place.start,
            },
            _ => KeptPart { segment, kept: 0..0, block: 0..0 },
        }
    }
}
