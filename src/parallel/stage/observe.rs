//! The arrays of a stage as an audit sees them: the first rows of a micro-batch.

use super::Stage;
use super::arrays::{Activations, Gradients};
use crate::device::Device;
use crate::parallel::tensor::Piece;
use crate::parallel::tensor::exchange::here_mut;

impl Stage {
    /// Returns the array with the values at `position`, and the number of values of a row. Where there
    /// are several sums, the first is meant.
    pub fn values_at<'a, D: Device>(
        &self,
        position: usize,
        activations: &'a mut Activations<D>,
    ) -> (&'a mut D::Buffer, usize) {
        let position = self.positions[position];
        (here_mut(&mut activations.values[position.value]), position.width)
    }

    /// Returns the array with the gradients at `position`, and the number of values of a row.
    pub fn gradients_at<'a, D: Device>(
        &self,
        position: usize,
        gradients: &'a mut Gradients<D>,
    ) -> (&'a mut D::Buffer, usize) {
        let position = self.positions[position];
        (here_mut(&mut gradients.values[position.gradient]), position.width)
    }

    /// Returns true if piece `at` is a layer, not an exchange.
    pub fn is_layer(&self, at: usize) -> bool {
        self.pieces.get(at).is_some_and(|piece| matches!(piece.piece, Piece::Layer(_)))
    }

    /// Returns the number in the model of the layer of piece `at`.
    pub fn layer_number(&self, at: usize) -> usize {
        self.pieces[at].layer
    }

    /// Returns true if the gradient at position `at` is needed, by an earlier stage or by
    /// parameters before it.
    pub fn needs_gradient(&self, at: usize) -> bool {
        self.index > 0 || (0..at).any(|before| !self.tensors_of(before).is_empty())
    }
}
