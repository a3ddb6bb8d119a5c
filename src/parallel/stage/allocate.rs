//! The allocation of the arrays of a stage's passes.

use super::arrays::{Activations, Gradients, Inner, PieceGroup};
use super::{Head, Stage};
use crate::Result;
use crate::device::{Device, Role};
use crate::parallel::tensor::Piece;

impl Stage {
    /// Returns the role of the stage's input.
    fn input_role(&self) -> Role {
        match self.pieces.first().map(|piece| &piece.piece) {
            Some(Piece::Layer(layer)) => layer.input_role(),
            _ => Role::Activations,
        }
    }

    /// Allocates the arrays of micro-batches of at most `rows` rows. With `groups`, those inside of
    /// groups are not allocated, because they are swapped in. Not collective.
    ///
    /// # Errors
    /// The device does not have enough memory.
    pub fn allocate_activations<D: Device>(
        &self,
        device: &D,
        rows: usize,
        groups: Option<&[PieceGroup]>,
    ) -> Result<Activations<D>> {
        let mut values: Vec<Option<D::Buffer>> = (0..self.num_values).map(|_| None).collect();
        for number in self.kept_values(groups.unwrap_or_default()) {
            let role = if number == 0 { self.input_role() } else { Role::Activations };
            values[number] = Some(device.allocate(rows * self.value_width(number), role)?);
        }
        let mut saved: Vec<Option<D::Buffer>> = (0..self.pieces.len()).map(|_| None).collect();
        if groups.is_none() {
            for (at, saved) in saved.iter_mut().enumerate() {
                *saved = Some(device.allocate(rows * self.saved_width(at), Role::Activations)?);
            }
        }
        let targets = self.head.as_ref().map_or(0, Head::targets_per_row);
        let output = self.points[self.pieces.len()].value;
        let targets = device.allocate(rows * targets, Role::Exact)?;
        let transient = self.transient.map(|[value, _]| value);
        Ok(Activations { targets, values, output, transient, saved, draws: None })
    }

    /// Allocates the arrays that [`Activations::swap_inner`] exchanges, for `rows` rows of any of
    /// `groups`. Not collective.
    ///
    /// # Errors
    /// The device does not have enough memory.
    pub fn allocate_inner<D: Device>(
        &self,
        device: &D,
        rows: usize,
        groups: &[PieceGroup],
    ) -> Result<Inner<D>> {
        let widths = self.row_widths(groups);
        let allocate = |widths: Vec<usize>| -> Result<Vec<Option<D::Buffer>>> {
            let one = |width| device.allocate(rows * width, Role::Activations).map(Some);
            widths.into_iter().map(one).collect()
        };
        let transient = allocate(self.transient.iter().map(|_| widths.transient).collect())?;
        Ok(Inner {
            values: allocate(widths.inner_values)?,
            transient: transient.into_iter().next().flatten(),
            saved: allocate(widths.inner_saved)?,
        })
    }

    /// Allocates the arrays of the gradients of at most `rows` rows. Not collective.
    ///
    /// # Errors
    /// The device does not have enough memory.
    pub fn allocate_gradients<D: Device>(&self, device: &D, rows: usize) -> Result<Gradients<D>> {
        let mut values = Vec::new();
        for number in 0..self.num_gradients {
            let width = self.gradient_width(number);
            values.push(Some(device.allocate(rows * width, Role::Activations)?));
        }
        let position_sums = Some(device.allocate(rows * self.position_sums_width(), Role::Exact)?);
        let output = self.points[self.pieces.len()].gradient;
        Ok(Gradients { values, output, position_sums })
    }
}
