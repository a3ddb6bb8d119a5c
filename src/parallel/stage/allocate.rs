//! The allocation of the arrays of a stage's passes.

use super::arrays::{Activations, Gradients, Inner};
use super::{Head, Position, Stage};
use crate::Result;
use crate::device::{Device, Role};
use crate::parallel::tensor::Piece;
use crate::parallel::tensor::exchange::Exchanger;

/// The numbers of values of a row in the arrays of a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowWidths {
    /// In the arrays of a slot that recomputation keeps: the values at the ends, and the targets.
    pub ends: usize,
    /// In the other arrays of a slot.
    pub inner: usize,
    /// In the arrays of a set of gradients.
    pub gradients: usize,
}

impl Stage {
    /// Returns the numbers of values of a row in the arrays that [`Stage::activations`],
    /// [`Stage::inner`] and [`Stage::gradients`] allocate.
    pub fn row_widths(&self) -> RowWidths {
        let last = self.positions[self.pieces.len()];
        let width_of = |find: &dyn Fn(&Position) -> bool| {
            self.positions.iter().find(|position| find(position)).map_or(0, |position| position.width)
        };
        let saved = self.pieces.iter().map(|piece| match &piece.piece {
            Piece::Layer(layer) => layer.saved_len(),
            Piece::Exchange(_) => 0,
        });
        let end = if last.value > 0 { last.width } else { 0 };
        RowWidths {
            ends: self.positions[0].width + end + self.head.as_ref().map_or(0, Head::targets_per_row),
            inner: (1..last.value).map(|number| width_of(&|at| at.value == number)).sum::<usize>()
                + saved.sum::<usize>(),
            gradients: (0..=last.gradient).map(|number| width_of(&|at| at.gradient == number)).sum(),
        }
    }

    /// Allocates the arrays of micro-batches of at most `rows` rows; only those at the ends if the
    /// others are swapped in. Not collective.
    ///
    /// # Errors
    /// The device does not have enough memory.
    pub fn activations<D: Device>(
        &self,
        exchanger: &Exchanger<'_, D>,
        rows: usize,
        only_ends: bool,
    ) -> Result<Activations<D>> {
        let Inner { values: inner, saved } =
            self.inner(exchanger, if only_ends { None } else { Some(rows) })?;
        let end = |position: usize| {
            exchanger.device.allocate(rows * self.positions[position].width, Role::Activations).map(Some)
        };
        let mut values = vec![end(0)?];
        values.extend(inner);
        if self.positions[self.pieces.len()].value > 0 {
            values.push(end(self.pieces.len())?);
        }
        let targets = self.head.as_ref().map_or(0, Head::targets_per_row);
        Ok(Activations { targets: exchanger.device.allocate(rows * targets, Role::Exact)?, values, saved })
    }

    /// Allocates the arrays that [`Activations::swap_inner`] exchanges, for `rows` rows, or makes
    /// empty places for them. Not collective.
    ///
    /// # Errors
    /// The device does not have enough memory.
    pub fn inner<D: Device>(&self, exchanger: &Exchanger<'_, D>, rows: Option<usize>) -> Result<Inner<D>> {
        let allocate =
            |width: usize| rows.map(|rows| exchanger.device.allocate(rows * width, Role::Activations));
        let last = self.positions[self.pieces.len()].value;
        let (mut values, mut saved) = (Vec::new(), Vec::new());
        for number in 1..last {
            let position = self.positions.iter().find(|position| position.value == number);
            let width = position.expect("arrays are numbered without gaps").width;
            values.push(allocate(width).transpose()?);
        }
        for piece in &self.pieces {
            let width = match &piece.piece {
                Piece::Layer(layer) => layer.saved_len(),
                Piece::Exchange(_) => 0,
            };
            saved.push(allocate(width).transpose()?);
        }
        Ok(Inner { values, saved })
    }

    /// Allocates the arrays of the gradients of at most `rows` rows. Not collective.
    ///
    /// # Errors
    /// The device does not have enough memory.
    pub fn gradients<D: Device>(&self, exchanger: &Exchanger<'_, D>, rows: usize) -> Result<Gradients<D>> {
        let mut values = Vec::new();
        for number in 0..=self.positions[self.pieces.len()].gradient {
            // values that share an array have the same width
            let position = self.positions.iter().find(|position| position.gradient == number);
            let width = position.expect("arrays are numbered without gaps").width;
            values.push(Some(exchanger.device.allocate(rows * width, Role::Activations)?));
        }
        let is_backpropagated = vec![false; values.len()];
        Ok(Gradients { values, is_backpropagated })
    }
}
