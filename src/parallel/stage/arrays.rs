//! The arrays of a stage's passes.

use std::ops::Range;

use crate::device::Device;
use crate::nn::Draws;

/// Consecutive pieces of a stage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PieceGroup {
    /// The pieces.
    pub pieces: Range<usize>,
    /// The arrays of values between the group's ends.
    pub(super) values: Range<usize>,
}

/// The arrays of one micro-batch in a stage.
pub struct Activations<D: Device> {
    /// The targets in the last stage, `[rows, targets_per_row]`.
    pub(super) targets: D::Buffer,
    pub(super) values: Vec<Option<D::Buffer>>,
    /// The number of the outputs among the values.
    pub(super) output: usize,
    /// The number of the array that transient points share among the values.
    pub(super) transient: Option<usize>,
    pub(super) saved: Vec<Option<D::Buffer>>,
    /// The numbers on which the random draws of a training pass depend; none in an evaluation.
    pub draws: Option<Draws>,
}

/// The arrays of one [`PieceGroup`] of pieces at a time, without the values at its ends: recomputation
/// computes them again.
pub struct Inner<D: Device> {
    pub(super) values: Vec<Option<D::Buffer>>,
    /// The array of transient points.
    pub(super) transient: Option<D::Buffer>,
    pub(super) saved: Vec<Option<D::Buffer>>,
}

/// The gradients of the values of one micro-batch in a stage.
pub struct Gradients<D: Device> {
    pub(super) values: Vec<Option<D::Buffer>>,
    /// The number of the gradient of the outputs among these.
    pub(super) output: usize,
    /// The sums over positions from which a layer adds up the gradients of its parameters.
    pub(super) position_sums: Option<D::Buffer>,
}

impl<D: Device> Activations<D> {
    /// Returns the place of the inputs of the stage, which is empty while they are in a message.
    pub fn input(&mut self) -> &mut Option<D::Buffer> {
        self.values.first_mut().expect("there is an array for point 0")
    }

    /// Returns the place of the outputs of the stage, which is empty while they are in a message.
    pub fn output(&mut self) -> &mut Option<D::Buffer> {
        &mut self.values[self.output]
    }

    /// Returns the places of samples in the stages that load them: inputs and targets.
    pub fn samples(&mut self) -> (&mut Option<D::Buffer>, &mut D::Buffer) {
        (self.values.first_mut().expect("there is an array for point 0"), &mut self.targets)
    }

    /// Exchanges the arrays between the ends of `group` for those of `inner`.
    pub fn swap_inner(&mut self, group: &PieceGroup, inner: &mut Inner<D>) {
        let PieceGroup { pieces, values } = group;
        self.values[values.clone()].swap_with_slice(&mut inner.values[..values.len()]);
        if let Some(transient) = self.transient {
            std::mem::swap(&mut self.values[transient], &mut inner.transient);
        }
        self.saved[pieces.clone()].swap_with_slice(&mut inner.saved[..pieces.len()]);
    }
}

impl<D: Device> Gradients<D> {
    /// Returns the place of the gradient of the inputs, which is empty while it is in a message.
    pub fn input(&mut self) -> &mut Option<D::Buffer> {
        self.values.first_mut().expect("there is an array for point 0")
    }

    /// Returns the place of the gradient of the outputs, which is empty while it is in a message.
    pub fn output(&mut self) -> &mut Option<D::Buffer> {
        &mut self.values[self.output]
    }
}
