//! The record of an audited step: see [`crate::parallel::audit`].

use super::Pipeline;
use super::local_stage::LocalStage;
use super::program::Instruction;
use crate::Result;
use crate::device::Device;
use crate::parallel::data::Weights;
use crate::parallel::stage::ObservedArray;
use crate::parallel::watch::{BitFold, Recorder, Site, flip, flip_row, fold_rows};

impl<D: Device> Pipeline<'_, D> {
    /// Makes the next step a recorded one.
    pub fn start_recording(&mut self, recorder: Recorder) {
        self.recorder = Some(recorder);
    }

    /// Ends the recorded step.
    pub fn stop_recording(&mut self) -> Option<Recorder> {
        self.recorder.take()
    }

    /// Records the values at `point` of a micro-batch of `rows` rows, if the step is recorded.
    pub(super) fn record_value(
        &mut self,
        instruction: &Instruction,
        point: usize,
        rows: usize,
    ) -> Result<()> {
        let Some(recorder) = &mut self.recorder else { return Ok(()) };
        let LocalStage { stage, slots, .. } = &mut self.stages[instruction.local];
        let part = recorder.part(instruction.action.micro_batch);
        let site = Site::Value { stage: stage.index, point, part };
        let array = stage.values_at(point, &mut slots[instruction.slot].activations);
        recorder.record_rows(self.exchanger.device, site, instruction.action.micro_batch, rows, array)
    }

    /// Records the gradients at `point` of a micro-batch of `rows` rows, if the step is recorded.
    pub(super) fn record_gradient(
        &mut self,
        instruction: &Instruction,
        point: usize,
        rows: usize,
    ) -> Result<()> {
        let Some(recorder) = &mut self.recorder else { return Ok(()) };
        let LocalStage { stage, sets, .. } = &mut self.stages[instruction.local];
        let part = recorder.part(instruction.action.micro_batch);
        let site = Site::Gradient { stage: stage.index, point, part };
        let array = stage.gradients_at(point, &mut sets[instruction.set].gradients);
        recorder.record_rows(self.exchanger.device, site, instruction.action.micro_batch, rows, array)
    }

    /// Records the gradients of the tensors of piece `at`, which are the sums over the leaf.
    pub(super) fn record_weight_gradients(
        &mut self,
        weights: &mut Weights<D>,
        local: usize,
        at: usize,
    ) -> Result<()> {
        let Some(recorder) = &mut self.recorder else { return Ok(()) };
        let (device, stage) = (self.exchanger.device, &self.stages[local].stage);
        for tensor in stage.tensors_of(at) {
            let site = Site::WeightGradient { stage: stage.index, tensor: recorder.tensors[tensor] };
            let (_, gradients) = weights.parameters_and_gradients();
            if let Some(choice) = recorder.takes_fault(site) {
                let (segment, range) = gradients.place(tensor);
                flip(device, gradients.segment_mut(segment), range.start, range.len(), choice)?;
            }
            device.read(gradients.tensor(device, tensor), &mut |values| {
                recorder.record.add(site, BitFold::of(values));
                Ok(())
            })?;
        }
        Ok(())
    }
}

impl Recorder {
    /// Records the rows of the leaf of a micro-batch of `rows` rows in `array`.
    fn record_rows<D: Device>(
        &mut self,
        device: &D,
        site: Site,
        micro_batch: usize,
        rows: usize,
        mut array: ObservedArray<'_, D>,
    ) -> Result<()> {
        let len = self.in_leaf(micro_batch).map_or(0, |leaf| leaf.len());
        if len == 0 {
            return Ok(());
        }
        if let Some(choice) = self.takes_fault(site) {
            flip_row(device, &mut array, rows, len, choice)?;
        }
        self.record.add(site, fold_rows(device, &array, rows, len)?);
        Ok(())
    }
}
