//! A stage with the arrays of the micro-batches that are on their way through it.

use crate::Result;
use crate::comm::{Front, Pending};
use crate::device::Device;
use crate::parallel::stage::{Accumulate, Activations, Gradients, Inner, Stage};
use crate::parallel::tensor::exchange::Exchanger;

/// One stage with its arrays.
pub(super) struct Lane<D: Device> {
    pub(super) stage: Stage,
    pub(super) slots: Vec<Slot<D>>,
    pub(super) sets: Vec<Set<D>>,
    /// With recomputation: what is made again, for each set, and for forward passes.
    pub(super) inner: Vec<Inner<D>>,
    /// Which parameters have gradients from this step already.
    pub(super) has_gradients: Accumulate,
}

/// The values of one micro-batch.
pub(super) struct Slot<D: Device> {
    pub(super) activations: Activations<D>,
    /// The input on its way here, and the output on its way to the next stage.
    pub(super) input: Option<Pending<Front<D::Buffer>>>,
    pub(super) output: Option<Pending<Front<D::Buffer>>>,
}

/// The gradients of one micro-batch.
pub(super) struct Set<D: Device> {
    pub(super) gradients: Gradients<D>,
    /// The gradient of the output on its way here, and that of the input on its way to the stage before.
    pub(super) output: Option<Pending<Front<D::Buffer>>>,
    pub(super) input: Option<Pending<Front<D::Buffer>>>,
}

impl<D: Device> Lane<D> {
    /// `stage` with so many slots and sets for at most `rows` rows. Not collective.
    ///
    /// # Errors
    /// The device has not enough memory.
    pub(super) fn new(
        exchanger: &Exchanger<'_, D>,
        stage: &Stage,
        num_slots: usize,
        num_sets: usize,
        rows: usize,
        recompute: bool,
    ) -> Result<Lane<D>> {
        let slot = |_| -> Result<Slot<D>> {
            Ok(Slot {
                activations: stage.activations(exchanger, rows, recompute)?,
                input: None,
                output: None,
            })
        };
        let set = |_| -> Result<Set<D>> {
            Ok(Set { gradients: stage.gradients(exchanger, rows)?, output: None, input: None })
        };
        let num_inner = if recompute { num_sets + 1 } else { 0 };
        Ok(Lane {
            slots: (0..num_slots).map(slot).collect::<Result<_>>()?,
            sets: (0..num_sets).map(set).collect::<Result<_>>()?,
            inner: (0..num_inner).map(|_| stage.inner(exchanger, Some(rows))).collect::<Result<_>>()?,
            has_gradients: Accumulate::default(),
            stage: stage.clone(),
        })
    }

    /// Waits for all sends.
    pub(super) fn collect(&mut self) {
        self.slots.iter_mut().for_each(Slot::collect);
        self.sets.iter_mut().for_each(Set::collect);
    }
}

impl<D: Device> Slot<D> {
    /// Waits for the output to be sent, if it is under way.
    pub(super) fn collect(&mut self) {
        if let Some(pending) = self.output.take() {
            *self.activations.output() = Some(pending.wait().buffer);
        }
    }
}

impl<D: Device> Set<D> {
    /// Waits for the gradient of the input to be sent, if it is under way.
    pub(super) fn collect(&mut self) {
        if let Some(pending) = self.input.take() {
            *self.gradients.input() = Some(pending.wait().buffer);
        }
    }
}
