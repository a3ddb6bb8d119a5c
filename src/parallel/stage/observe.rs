//! The arrays of a stage as an audit sees them: the first rows of a micro-batch.

use super::Stage;
use super::arrays::{Activations, Gradients};
use crate::device::Device;
use crate::parallel::tensor::Piece;
use crate::parallel::tensor::exchange::here_mut;

/// An array of values or gradients.
pub struct ObservedArray<'a, D: Device> {
    /// The memory.
    pub buffer: &'a mut D::Buffer,
    /// The number of values of a row.
    pub width: usize,
    /// The number of sums that this rank fills, one behind the other.
    pub num_sums: usize,
}

impl Stage {
    /// Returns the array with the values at `point`.
    pub fn values_at<'a, D: Device>(
        &self,
        point: usize,
        activations: &'a mut Activations<D>,
    ) -> ObservedArray<'a, D> {
        let point = &self.points[point];
        let (width, num_sums) = (point.width, point.num_own_sums[0]);
        ObservedArray { buffer: here_mut(&mut activations.values[point.value]), width, num_sums }
    }

    /// Returns the array with the gradients at `point`, after an exchange in place there. If gradients
    /// share arrays, they are there until the next pass.
    pub fn gradients_at<'a, D: Device>(
        &self,
        point: usize,
        gradients: &'a mut Gradients<D>,
    ) -> ObservedArray<'a, D> {
        let point = &self.points[point];
        let (width, num_sums) = (point.width, point.num_own_sums[1]);
        ObservedArray { buffer: here_mut(&mut gradients.values[point.gradient]), width, num_sums }
    }

    /// Returns true if piece `at` is a layer, not an exchange.
    pub fn is_layer(&self, at: usize) -> bool {
        self.pieces.get(at).is_some_and(|piece| matches!(piece.piece, Piece::Layer(_)))
    }

    /// Returns the number in the model of the layer of piece `at`.
    pub fn layer_number(&self, at: usize) -> usize {
        self.pieces[at].layer
    }

    /// Returns true if the gradient of the output of piece `at` is in the array of that of the stage's
    /// input.
    pub fn shares_input_gradient(&self, at: usize) -> bool {
        self.points[at + 1].gradient == self.points[0].gradient
    }

    /// Returns true if the gradient at point `at` is needed, by an earlier stage or by
    /// parameters before it.
    pub fn needs_gradient(&self, at: usize) -> bool {
        self.index > 0 || (0..at).any(|before| !self.tensors_of(before).is_empty())
    }
}
