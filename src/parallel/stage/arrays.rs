//! The arrays of a stage's passes.

use super::{Head, Stage};
use crate::Result;
use crate::device::{Device, Role};
use crate::parallel::tensor::Piece;
use crate::parallel::tensor::exchange::Exchanger;

/// The arrays of one micro-batch on its way through a stage.
pub struct Activations<D: Device> {
    /// `[rows, targets_per_row]`, in the last stage.
    pub(super) targets: D::Buffer,
    pub(super) values: Vec<Option<D::Buffer>>,
    pub(super) saved: Vec<Option<D::Buffer>>,
}

/// All arrays of [`Activations`] but the values at both ends: what recomputation makes again.
pub struct Inner<D: Device> {
    pub(super) values: Vec<Option<D::Buffer>>,
    pub(super) saved: Vec<Option<D::Buffer>>,
}

/// The gradients of one micro-batch's values.
pub struct Gradients<D: Device> {
    pub(super) values: Vec<Option<D::Buffer>>,
    /// Which of them have been turned back through the activation before them.
    pub(super) is_turned: Vec<bool>,
}

impl<D: Device> Activations<D> {
    /// Where the values that come into the stage are, unless they are away.
    pub fn input(&mut self) -> &mut Option<D::Buffer> {
        self.values.first_mut().expect("there is an array for position 0")
    }

    /// Where the values that leave the stage are, unless they are away.
    pub fn output(&mut self) -> &mut Option<D::Buffer> {
        self.values.last_mut().expect("there is an array for position 0")
    }

    /// Where samples go in the stages that take them: inputs and targets.
    pub fn samples(&mut self) -> (&mut Option<D::Buffer>, &mut D::Buffer) {
        (self.values.first_mut().expect("there is an array for position 0"), &mut self.targets)
    }

    /// Exchanges the arrays between the ends for those of `inner`.
    pub fn swap_inner(&mut self, inner: &mut Inner<D>) {
        let len = inner.values.len();
        self.values[1..1 + len].swap_with_slice(&mut inner.values);
        self.saved.swap_with_slice(&mut inner.saved);
    }
}

impl<D: Device> Gradients<D> {
    /// Where the gradient of what comes into the stage is, unless it is away.
    pub fn input(&mut self) -> &mut Option<D::Buffer> {
        self.values.first_mut().expect("there is an array for position 0")
    }

    /// Where the gradient of what leaves the stage is, unless it is away.
    pub fn output(&mut self) -> &mut Option<D::Buffer> {
        self.values.last_mut().expect("there is an array for position 0")
    }
}

impl Stage {
    /// Arrays for micro-batches of at most `rows` rows; only the ends if something else is to be swapped in. Not collective.
    ///
    /// # Errors
    /// The device has not that much memory.
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

    /// What [`Activations::swap_inner`] exchanges: arrays for `rows` rows, or places for them. Not collective.
    ///
    /// # Errors
    /// The device has not that much memory.
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

    /// Arrays for the gradients of at most `rows` rows. Not collective.
    ///
    /// # Errors
    /// The device has not that much memory.
    pub fn gradients<D: Device>(&self, exchanger: &Exchanger<'_, D>, rows: usize) -> Result<Gradients<D>> {
        let mut values = Vec::new();
        for number in 0..=self.positions[self.pieces.len()].gradient {
            // values that share an array have the same width
            let position = self.positions.iter().find(|position| position.gradient == number);
            let width = position.expect("arrays are numbered without gaps").width;
            values.push(Some(exchanger.device.allocate(rows * width, Role::Activations)?));
        }
        let is_turned = vec![false; values.len()];
        Ok(Gradients { values, is_turned })
    }
}
