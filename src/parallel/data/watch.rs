//! The block of a segment whose update an audit repeats: see [`crate::parallel::audit`].

use std::ops::Range;

use super::{UpdateRun, UpdateRuns, Weights};
use crate::Result;
use crate::device::{Device, Role, totals};
use crate::nn::{Segmentation, TensorShard};
use crate::parallel::watch::{BlockWatch, FaultKind, flip};

/// Returns the watch of `segment`, if it is watched, and the block of rank `own` in it. A rank whose tensors
/// are all tied has an empty block, of which nothing is watched.
fn watched(
    watch: &mut Option<BlockWatch>,
    segment: usize,
    own: usize,
) -> Option<(&mut BlockWatch, Range<usize>)> {
    let watch = watch.as_mut().filter(|watch| watch.segment == segment)?;
    let block = watch.blocks[own].clone();
    (!block.is_empty()).then_some((watch, block))
}

impl<D: Device> Weights<D> {
    /// Watches blocks in the next step.
    pub fn watch(&mut self, watch: BlockWatch) {
        self.watch = Some(watch);
    }

    /// Ends the watch.
    pub fn unwatch(&mut self) -> BlockWatch {
        self.watch.take().unwrap_or_default()
    }

    /// Copies this rank's terms of the watched blocks, before the first `num_sums` arrays of `segment`
    /// are reduced.
    pub(super) fn watch_terms(
        &mut self,
        device: &D,
        segment: usize,
        micro_batch: usize,
        num_sums: usize,
    ) -> Result<()> {
        let Some(watch) = self.watch.as_mut().filter(|watch| watch.segment == segment) else { return Ok(()) };
        let (flat, mut terms) = (self.gradients.flat(), Vec::new());
        for block in &watch.blocks {
            let mut arrays = Vec::with_capacity(num_sums * block.len());
            for start in (0..num_sums).map(|sum| sum * flat.segment_len(segment)) {
                let range = start + block.start..start + block.end;
                device.read(device.view(flat.segment(segment), range), &mut |values| {
                    arrays.extend_from_slice(values);
                    Ok(())
                })?;
            }
            terms.push(arrays);
        }
        watch.terms.push((micro_batch, terms));
        Ok(())
    }

    /// Copies the gradient of this rank's block before the update.
    pub(super) fn watch_gradient(&mut self, device: &D, segment: usize) -> Result<()> {
        let own = self.reductions.rank();
        let Some((watch, block)) = watched(&mut self.watch, segment, own) else { return Ok(()) };
        device.read(self.gradients.view(device, segment, block), &mut |values| {
            watch.sums.extend_from_slice(values);
            Ok(())
        })
    }

    /// Copies the sum in this rank's block of `segment` after a reduction: from `buffer`, or on one rank
    /// alone from the gradients. A fault may flip a bit in it.
    pub(super) fn watch_sum(
        &mut self,
        device: &D,
        segment: usize,
        buffer: Option<&mut D::Buffer>,
    ) -> Result<()> {
        let own = self.reductions.rank();
        let Some((watch, block)) = watched(&mut self.watch, segment, own) else { return Ok(()) };
        let is_in_sum = |fault: &mut (FaultKind, u64)| fault.0 != FaultKind::Update;
        let buffer = match buffer {
            None => self.gradients.flat().segment(segment),
            Some(buffer) => {
                if let Some((_, choice)) = watch.fault.take_if(is_in_sum) {
                    flip(device, buffer, block.start, block.len(), choice)?;
                }
                buffer
            }
        };
        device.read(device.view(buffer, block), &mut |values| {
            watch.sums.extend_from_slice(values);
            Ok(())
        })
    }

    /// Flips a bit of the watched block after its update, if such a fault is to happen.
    pub(super) fn watch_update(&mut self, device: &D, segment: usize) -> Result<()> {
        let own = self.reductions.rank();
        let Some((watch, block)) = watched(&mut self.watch, segment, own) else { return Ok(()) };
        let is_update = |fault: &mut (FaultKind, u64)| fault.0 == FaultKind::Update;
        let Some((_, choice)) = watch.fault.take_if(is_update) else { return Ok(()) };
        self.parameters.flip(device, segment, block, choice)
    }

    /// Returns the elements of `block`, a range of a segment that this rank updates: of the parameters,
    /// then of each slot. Not collective.
    ///
    /// # Errors
    /// The transfer from the device failed.
    pub fn block(&self, device: &D, segment: usize, block: &Range<usize>) -> Result<Vec<f32>> {
        if block.is_empty() {
            return Ok(Vec::new());
        }
        let mut values = self.parameters.block(device, segment, block)?;
        let start = self.updated(segment).start;
        for slot in 0..self.slot_names().len() {
            let own = block.start - start..block.end - start;
            device.read(self.optimizer.slot(device, segment, slot, own), &mut |slot| {
                values.extend_from_slice(slot);
                Ok(())
            })?;
        }
        Ok(values)
    }

    /// Returns elements of the parameters of a segment, as far as they are here. Not collective.
    ///
    /// # Errors
    /// The transfer from the device failed.
    pub fn parameter_block(&self, device: &D, segment: usize, block: &Range<usize>) -> Result<Vec<f32>> {
        self.parameters.block(device, segment, block)
    }

    /// Flips a bit of a parameter, to try an audit out. Returns false if this rank has none, or parts only.
    ///
    /// # Errors
    /// A transfer from or to the device failed.
    pub fn flip_parameter(&mut self, device: &D, choice: u64) -> Result<bool> {
        let num_tensors = self.parameters.flat().num_tensors();
        if self.parameters.is_in_parts() || num_tensors == 0 {
            return Ok(false);
        }
        let tensor = choice as usize % num_tensors;
        let (segment, place) = self.parameters.flat().place(tensor);
        self.parameters.flip(device, segment, place, choice)?;
        Ok(true)
    }

    /// Flips a bit of a block that another replica has updated, to try an audit out.
    ///
    /// # Errors
    /// A transfer from or to the device failed.
    pub fn flip_received(
        &mut self,
        device: &D,
        segment: usize,
        block: Range<usize>,
        choice: u64,
    ) -> Result<()> {
        self.parameters.flip(device, segment, block, choice)
    }

    /// Returns the runs of the updates of any `shards`.
    pub fn update_runs(&self, shards: &[TensorShard], segmentation: &Segmentation) -> UpdateRuns {
        UpdateRuns::new(shards, segmentation, self.optimizer.settings())
    }

    /// Repeats the update of this step: of `elements` of a segment, which has these `runs`, from a block
    /// as [`Weights::block`] returns it and its `gradient`. Not collective.
    ///
    /// # Errors
    /// The device does not have enough memory.
    pub fn repeat_update(
        &self,
        device: &D,
        runs: &UpdateRuns,
        segment: usize,
        elements: Range<usize>,
        block: &[f32],
        gradient: &[f32],
    ) -> Result<Vec<f32>> {
        let len = gradient.len();
        let allocate = |values: &[f32]| -> Result<D::Buffer> {
            let mut buffer = device.allocate(values.len(), Role::Exact)?;
            device.write(device.view_mut(&mut buffer, 0..values.len()), &mut |into| {
                into.copy_from_slice(values);
                Ok(())
            })?;
            Ok(buffer)
        };
        let mut arrays: Vec<D::Buffer> =
            block.chunks_exact(len.max(1)).map(allocate).collect::<Result<_>>()?;
        let (gradient, mut sums) = (allocate(gradient)?, device.allocate(totals::LEN, Role::Exact)?);
        let Some((parameters, slots)) = arrays.split_first_mut() else { return Ok(Vec::new()) };
        for UpdateRun { elements: own, decays, .. } in runs.within(segment, elements.clone()) {
            let own = own.start - elements.start..own.end - elements.start;
            let values = device.view_mut(parameters, own.clone());
            let gradient = device.view(&gradient, own.clone());
            let sums = device.view_mut(&mut sums, 0..totals::LEN);
            self.optimizer.apply(device, own, decays, values, gradient, slots, sums);
        }
        let mut updated = Vec::with_capacity(block.len());
        for array in &arrays {
            device.read(device.view(array, 0..len), &mut |values| {
                updated.extend_from_slice(values);
                Ok(())
            })?;
        }
        Ok(updated)
    }
}
