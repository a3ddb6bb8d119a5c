//! A stage: the consecutive layers that a rank runs, whole or as shards, and the passes through
//! them.
//!
//! The values before and after the pieces of a stage are at *positions* 0 to n; a piece that works
//! in place leaves two positions in the same array. A forward pass fills the [`Activations`] of a
//! micro-batch. A backward pass reads them and fills a set of [`Gradients`], an array for each
//! position, so that the gradients of weights can be computed later. All arrays are allocated once,
//! for the largest number of rows. Between passes, the arrays at both ends may be in messages.

mod allocate;
mod arrays;
mod backward;
mod groups;
mod observe;

#[cfg(test)]
mod tests;

use std::ops::Range;

pub use arrays::{Activations, Gradients, Inner, PieceGroup};
pub use backward::{BackwardContext, Pass, WeightRows};
pub use groups::RowWidths;

use super::tensor::exchange::{Exchanger, here, here_mut};
use super::tensor::{LayerPart, Piece};
use crate::Result;
use crate::device::{Device, LossShape, totals};
use crate::nn::{FlatBuffer, Loss};
use crate::parallel::settle;
use crate::trace::{self, Name};

/// The loss after the last stage.
#[derive(Debug, Clone, Copy)]
pub struct Head {
    /// The loss function.
    pub loss: Loss,
    /// The number of outputs of the model per row.
    pub outputs: usize,
}

impl Head {
    /// Returns the number of target values per row.
    pub fn targets_per_row(&self) -> usize {
        self.loss.targets_per_row(self.outputs)
    }
}

/// The layers of one stage, or this rank's shards of them.
#[derive(Debug, Clone)]
pub struct Stage {
    /// The number of the stage among all stages.
    pub index: usize,
    /// The range of the stage's tensors among the tensors of this rank.
    pub tensors: Range<usize>,
    /// The loss, in the last stage.
    pub head: Option<Head>,
    pieces: Vec<StagePiece>,
    /// The positions before, between and after the pieces.
    positions: Vec<Position>,
}

/// A piece of a stage.
#[derive(Debug, Clone)]
struct StagePiece {
    piece: Piece,
    /// The number of the piece's layer in the model.
    layer: usize,
}

/// A place before, between or after the pieces of a stage.
#[derive(Debug, Clone, Copy)]
struct Position {
    /// The number of values of a row.
    width: usize,
    /// The number of the buffer that holds the values.
    value: usize,
    /// The number of the buffer that holds their gradient.
    gradient: usize,
    /// The number of arrays of values: several before an exchange that adds them up.
    num_value_sums: usize,
    /// The number of arrays of gradients.
    num_gradient_sums: usize,
}

impl Stage {
    /// Creates stage `index` of `parts`, followed by `head` or another stage, with inputs of
    /// `width` values per row, after the pieces of `before`. Its tensors are numbered from
    /// `first_tensor` on.
    pub fn new(
        index: usize,
        before: Option<&LayerPart>,
        parts: &[LayerPart],
        width: usize,
        first_tensor: usize,
        head: Option<Head>,
    ) -> Stage {
        let (mut pieces, mut tensor) = (Vec::new(), first_tensor);
        let mut at = Position { width, value: 0, gradient: 0, num_value_sums: 1, num_gradient_sums: 1 };
        if let Some(Piece::Exchange(exchange)) = before.and_then(|part| part.pieces.last()) {
            at.num_gradient_sums = exchange.num_gradient_sums();
        }
        let mut positions = vec![at];
        for part in parts {
            for piece in &part.pieces {
                let (moves_value, moves_gradient, width) = match piece {
                    Piece::Layer(layer) => (true, !layer.is_elementwise(), layer.output_len()),
                    Piece::Exchange(exchange) if exchange.is_in_place() => (false, false, at.width),
                    Piece::Exchange(exchange) => (true, true, exchange.width),
                };
                at = Position {
                    width,
                    value: at.value + usize::from(moves_value),
                    gradient: at.gradient + usize::from(moves_gradient),
                    num_value_sums: 1,
                    num_gradient_sums: 1,
                };
                let before = positions.last_mut().expect("there is position 0");
                if let Piece::Exchange(exchange) = piece {
                    before.num_value_sums = exchange.num_value_sums();
                    at.num_gradient_sums = exchange.num_gradient_sums();
                }
                positions.push(at);
                let piece = match piece {
                    Piece::Layer(layer) => Piece::Layer(layer.clone().with_tensors_from(tensor)),
                    exchange => exchange.clone(),
                };
                pieces.push(StagePiece { piece, layer: part.number });
            }
            tensor += part.tensors.len();
        }
        Stage { index, tensors: first_tensor..tensor, head, pieces, positions }
    }

    /// Returns the number of pieces.
    pub fn num_pieces(&self) -> usize {
        self.pieces.len()
    }

    /// Returns the numbers of the tensors of piece `at` among those of this rank.
    pub fn tensors_of(&self, at: usize) -> Range<usize> {
        match &self.pieces[at].piece {
            Piece::Layer(layer) => layer.tensors.clone(),
            Piece::Exchange(_) => 0..0,
        }
    }

    /// Returns the numbers of values of a row of the inputs and of the outputs.
    pub fn ends(&self) -> (usize, usize) {
        (self.positions[0].width, self.positions[self.pieces.len()].width)
    }

    /// Returns the width of the widest exchange.
    pub fn widest_exchange(&self) -> usize {
        let widths = self.pieces.iter().map(|piece| match &piece.piece {
            Piece::Exchange(exchange) => exchange.width,
            Piece::Layer(_) => 0,
        });
        widths.max().unwrap_or_default()
    }

    /// Runs the forward pass of piece `at` for `rows` rows: from the values at position `at` to
    /// those at `at + 1`. Does nothing for 0 rows. Collective over the tensor axis.
    ///
    /// # Errors
    /// There is no memory for messages.
    pub fn forward_piece<D: Device>(
        &self,
        exchanger: &mut Exchanger<'_, D>,
        parameters: &FlatBuffer<D>,
        at: usize,
        rows: usize,
        activations: &mut Activations<D>,
    ) -> Result<()> {
        if rows == 0 {
            return Ok(());
        }
        let Activations { values, saved, .. } = activations;
        let (before, after) = (self.positions[at], self.positions[at + 1]);
        let (from, into) = (before.value, after.value);
        let (mut input, mut output) = (values[from].take(), values[into].take());
        match &self.pieces[at].piece {
            Piece::Layer(layer) => {
                let _span = trace::work(Name::Layer).layer(self.pieces[at].layer);
                let device = exchanger.device;
                let saved = device.view_mut(here_mut(&mut saved[at]), 0..rows * layer.saved_len());
                let len = rows * after.width * after.num_value_sums;
                let output = device.view_mut(here_mut(&mut output), 0..len);
                let input = device.view(here(&input), 0..rows * before.width);
                layer.forward(device, parameters, rows, input, saved, output);
                settle(device);
            }
            Piece::Exchange(exchange) => exchanger.forward(*exchange, rows, &mut input, &mut output)?,
        }
        // a piece that works in place has only `input`
        if output.is_some() {
            values[into] = output;
        }
        if input.is_some() {
            values[from] = input;
        }
        Ok(())
    }

    /// Adds the loss of the outputs to `sums`, and writes its gradient, times `scale`, as the
    /// gradient of the outputs. Only in the last stage. Not collective.
    pub fn loss<D: Device>(
        &self,
        exchanger: &mut Exchanger<'_, D>,
        rows: usize,
        scale: f32,
        activations: &Activations<D>,
        gradients: &mut Gradients<D>,
        sums: &mut D::Buffer,
    ) {
        let head = self.head.as_ref().expect("the loss is evaluated in the last stage");
        let shape = LossShape { rows, columns: head.outputs, scale };
        let outputs = here(activations.values.last().expect("there is an array for position 0"));
        let gradient = here_mut(gradients.output());
        let device = exchanger.device;
        let outputs = device.view(outputs, 0..rows * head.outputs);
        let targets = device.view(&activations.targets, 0..rows * head.targets_per_row());
        let gradient = device.view_mut(gradient, 0..rows * head.outputs);
        let sums = device.view_mut(sums, 0..totals::LEN);
        head.loss.evaluate(device, &shape, outputs, targets, gradient, sums);
    }
}
