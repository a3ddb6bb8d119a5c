//! [`LocalStage`]: a stage of a rank, with the arrays of the micro-batches under way in it.

use crate::Result;
use crate::comm::{Front, Pending};
use crate::device::Device;
use crate::parallel::stage::{Activations, Gradients, Inner, PieceGroup, Stage};

use super::program::Instruction;
use super::stage_arrays::StageArrays;

/// A stage of a rank with its arrays.
pub(super) struct LocalStage<D: Device> {
    pub(super) stage: Stage,
    pub(super) slots: Vec<ActivationSlot<D>>,
    pub(super) sets: Vec<GradientSet<D>>,
    /// The groups of pieces that are computed again together; all of them without recomputation.
    pub(super) groups: Vec<PieceGroup>,
    /// With recomputation, the arrays that are computed again: those of each set, then those of
    /// forward passes.
    pub(super) inner: Vec<Inner<D>>,
}

/// The activations of one micro-batch.
pub(super) struct ActivationSlot<D: Device> {
    pub(super) activations: Activations<D>,
    /// The input that is being received from the previous stage.
    pub(super) input: Option<Pending<Front<D::Buffer>>>,
    /// The output that is being sent to the next stage.
    pub(super) output: Option<Pending<Front<D::Buffer>>>,
}

/// The gradients of the activations of one micro-batch.
pub(super) struct GradientSet<D: Device> {
    pub(super) gradients: Gradients<D>,
    /// The gradient of the output that is being received from the next stage.
    pub(super) output: Option<Pending<Front<D::Buffer>>>,
    /// The gradient of the input that is being sent to the previous stage.
    pub(super) input: Option<Pending<Front<D::Buffer>>>,
}

impl<D: Device> LocalStage<D> {
    /// Allocates the arrays of `stage` for at most `rows` rows, as `arrays` says. Not collective.
    ///
    /// # Errors
    /// The device does not have enough memory.
    pub(super) fn new(device: &D, stage: &Stage, rows: usize, arrays: StageArrays) -> Result<LocalStage<D>> {
        let StageArrays { num_slots, num_sets, num_inner, groups } = arrays;
        let kept = (num_inner > 0).then_some(&groups[..]);
        let slot = |_| -> Result<ActivationSlot<D>> {
            Ok(ActivationSlot {
                activations: stage.allocate_activations(device, rows, kept)?,
                input: None,
                output: None,
            })
        };
        let set = |_| -> Result<GradientSet<D>> {
            Ok(GradientSet { gradients: stage.allocate_gradients(device, rows)?, output: None, input: None })
        };
        Ok(LocalStage {
            slots: (0..num_slots).map(slot).collect::<Result<_>>()?,
            sets: (0..num_sets).map(set).collect::<Result<_>>()?,
            inner: (0..num_inner)
                .map(|_| stage.allocate_inner(device, rows, &groups))
                .collect::<Result<_>>()?,
            groups,
            stage: stage.clone(),
        })
    }

    /// Returns true if the backward pass of a group begins with its forward pass.
    pub(super) fn recomputes(&self) -> bool {
        !self.inner.is_empty()
    }

    /// Takes the arrays of a group that were computed again out of the slot of `instruction`.
    pub(super) fn give_back_inner(&mut self, instruction: &Instruction, group: usize) {
        let activations = &mut self.slots[instruction.slot].activations;
        activations.swap_inner(&self.groups[group], &mut self.inner[instruction.set]);
    }

    /// Waits for all sends.
    pub(super) fn collect(&mut self) {
        self.slots.iter_mut().for_each(ActivationSlot::collect);
        self.sets.iter_mut().for_each(GradientSet::collect);
    }
}

impl<D: Device> ActivationSlot<D> {
    /// Waits for the output to be sent, if it is being sent.
    pub(super) fn collect(&mut self) {
        if let Some(pending) = self.output.take() {
            *self.activations.output() = Some(pending.wait().buffer);
        }
    }
}

impl<D: Device> GradientSet<D> {
    /// Waits for the gradient of the input to be sent, if it is being sent.
    pub(super) fn collect(&mut self) {
        if let Some(pending) = self.input.take() {
            *self.gradients.input() = Some(pending.wait().buffer);
        }
    }
}
