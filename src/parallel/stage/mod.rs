//! A stage: the consecutive layers that a rank runs, each whole or its part of it, and the passes through them.
//!
//! The values before and after the pieces of a stage stand at *positions* 0 to n; a piece that works in place leaves two of
//! them in the same array. A forward pass fills the [`Activations`] of a micro-batch. A backward pass reads them and fills a
//! set of [`Gradients`], an array for each position, so that the gradients of weights can be left for later. All arrays are
//! allocated once, for the largest number of rows that will come. Between passes, the arrays at both ends may be away in
//! messages.

mod arrays;

#[cfg(test)]
mod tests;

use std::ops::Range;

pub use arrays::{Activations, Gradients, Inner};

use super::tensor::exchange::{Exchange, ExchangeKind, Exchanger, Started, here, here_mut};
use super::tensor::{LayerPart, Piece};
use crate::Result;
use crate::device::{Device, FusedActivation, LossShape, totals};
use crate::nn::{FlatBuffer, Layer, Loss, Tape};
use crate::parallel::settle;
use crate::trace::{self, Name};

/// What ends the last stage.
#[derive(Debug, Clone, Copy)]
pub struct Head {
    /// What is minimised.
    pub loss: Loss,
    /// Outputs of the model per row.
    pub outputs: usize,
}

impl Head {
    /// Target values per row.
    pub fn targets_per_row(&self) -> usize {
        self.loss.targets_per_row(self.outputs)
    }
}

/// The layers of one stage, or this rank's part of them.
#[derive(Debug, Clone)]
pub struct Stage {
    /// Its number among all stages.
    pub index: usize,
    /// The numbers of its tensors among those of this rank.
    pub tensors: Range<usize>,
    /// The loss, in the last stage.
    pub head: Option<Head>,
    pieces: Vec<StagePiece>,
    /// One more than there are pieces.
    positions: Vec<Position>,
}

/// A piece of a stage.
#[derive(Debug, Clone)]
struct StagePiece {
    piece: Piece,
    /// The number of its layer in the model.
    layer: usize,
}

/// A place before, between or after the pieces of a stage.
#[derive(Debug, Clone, Copy)]
struct Position {
    /// The number of values of a row.
    width: usize,
    /// The number of the array that holds the values.
    value: usize,
    /// The number of the array that holds their gradient.
    gradient: usize,
}

/// Which gradients a backward pass makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pass {
    /// Those of values and weights.
    Whole,
    /// Those of values and biases.
    Inputs,
    /// Those of weights, after those of values.
    Weights,
}

/// Gradients that earlier micro-batches of the step have been added to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Accumulate {
    /// Those of biases.
    pub biases: bool,
    /// Those of weights.
    pub weights: bool,
}

/// What a backward pass reads and adds to besides the arrays of its micro-batch.
pub struct BackwardContext<'a, 'd, D: Device> {
    /// The device and the exchanges.
    pub exchanger: &'a mut Exchanger<'d, D>,
    /// This rank's parameters.
    pub parameters: &'a FlatBuffer<D>,
    /// Their gradients.
    pub gradients: &'a mut FlatBuffer<D>,
    /// Rows of the micro-batch.
    pub rows: usize,
    /// Which gradients are added to instead of overwritten.
    pub accumulate: Accumulate,
}

impl Stage {
    /// Stage `index`, of `parts`, after which comes `head` or another stage; `width` values a row come in. Its tensors are
    /// numbered from `first_tensor` on.
    pub fn new(
        index: usize,
        parts: &[LayerPart],
        width: usize,
        first_tensor: usize,
        head: Option<Head>,
    ) -> Stage {
        let (mut pieces, mut tensor) = (Vec::new(), first_tensor);
        let mut at = Position { width, value: 0, gradient: 0 };
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
                };
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

    /// The number of pieces.
    pub fn num_pieces(&self) -> usize {
        self.pieces.len()
    }

    /// The first tensor of piece `at`, if it has any.
    pub fn first_tensor(&self, at: usize) -> Option<usize> {
        match &self.pieces[at].piece {
            Piece::Layer(layer) => (!layer.tensors().is_empty()).then(|| layer.tensors().start),
            Piece::Exchange(_) => None,
        }
    }

    /// The widths of the values that come in and that leave.
    pub fn ends(&self) -> (usize, usize) {
        (self.positions[0].width, self.positions[self.pieces.len()].width)
    }

    /// The widest exchange.
    pub fn widest_exchange(&self) -> usize {
        let widths = self.pieces.iter().map(|piece| match &piece.piece {
            Piece::Exchange(exchange) => exchange.width,
            Piece::Layer(_) => 0,
        });
        widths.max().unwrap_or_default()
    }

    /// Forward pass of piece `at` for `rows` rows: from the values at position `at` to those at `at + 1`. With no rows nothing
    /// happens. Collective over the tensor axis.
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
                let output = device.view_mut(here_mut(&mut output), 0..rows * after.width);
                let input = device.view(here(&input), 0..rows * before.width);
                layer.forward(device, parameters, rows, input, saved, output);
                settle(device);
            }
            Piece::Exchange(exchange) => exchanger.forward(*exchange, rows, &mut input, &mut output)?,
        }
        // of a piece that works in place, only `input` is there
        if output.is_some() {
            values[into] = output;
        }
        if input.is_some() {
            values[from] = input;
        }
        Ok(())
    }

    /// The loss of the outputs, added to `sums`; its gradient, times `scale`, is that of the output. Not collective; for the
    /// last stage.
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

    /// Backward pass of piece `at`: from the gradient at position `at + 1` to that of its parameters and, if something before
    /// it needs one, at position `at`. An exchange before a layer is under way while the layer's weights get their gradient.
    /// With no rows nothing happens. Collective over the tensor axis, unless `pass` is for weights.
    ///
    /// # Errors
    /// There is no memory for messages.
    pub fn backward_piece<D: Device>(
        &self,
        context: &mut BackwardContext<'_, '_, D>,
        at: usize,
        pass: Pass,
        activations: &Activations<D>,
        gradients: &mut Gradients<D>,
    ) -> Result<()> {
        if context.rows == 0 {
            return Ok(());
        }
        match (&self.pieces[at].piece, pass) {
            (Piece::Layer(layer), Pass::Weights) if layer.tensors().is_empty() => Ok(()),
            (Piece::Layer(layer), _) => self.backward_layer(context, at, layer, pass, activations, gradients),
            (Piece::Exchange(_), Pass::Weights) => Ok(()),
            // an exchange before a layer was done together with it
            (Piece::Exchange(_), _) if self.is_layer(at + 1) => Ok(()),
            (Piece::Exchange(exchange), _) => {
                let started = self.start_exchange(context, at, *exchange, gradients)?;
                self.finish_exchange(context, at, *exchange, started, gradients);
                Ok(())
            }
        }
    }

    fn backward_layer<D: Device>(
        &self,
        context: &mut BackwardContext<'_, '_, D>,
        at: usize,
        layer: &Layer,
        pass: Pass,
        activations: &Activations<D>,
        gradients: &mut Gradients<D>,
    ) -> Result<()> {
        let _span = trace::work(Name::Layer).layer(self.pieces[at].layer);
        let (device, rows) = (context.exchanger.device, context.rows);
        let (before, after) = (self.positions[at], self.positions[at + 1]);
        let view = |position: Position| {
            device.view(here(&activations.values[position.value]), 0..rows * position.width)
        };
        let saved = device.view(here(&activations.saved[at]), 0..rows * layer.saved_len());
        let tape: Tape<'_, D> = Tape { input: view(before), saved, output: view(after) };
        let (from, len) = (after.gradient, rows * after.width);
        let mut started = None;
        if pass != Pass::Weights {
            let gradient = device.view_mut(here_mut(&mut gradients.values[from]), 0..len);
            let is_backpropagated = std::mem::take(&mut gradients.is_turned[from]);
            let accumulate = context.accumulate.biases;
            layer.backward_activation(
                device,
                &tape,
                gradient,
                context.gradients,
                accumulate,
                is_backpropagated,
            );
            if self.needs_gradient(at) {
                if !layer.is_elementwise() {
                    let into = before.gradient;
                    let turned = self.turned_with(device, at, rows, activations);
                    gradients.is_turned[into] = turned.is_some();
                    let (inputs, outputs) = gradients.values.split_at_mut(from);
                    let gradient = device.view(here(&outputs[0]), 0..len);
                    let input = device.view_mut(here_mut(&mut inputs[into]), 0..rows * before.width);
                    layer.backward_input(device, context.parameters, rows, &tape, gradient, input, turned);
                }
                if let Some(Piece::Exchange(exchange)) =
                    at.checked_sub(1).map(|earlier| &self.pieces[earlier].piece)
                {
                    started = Some((*exchange, self.start_exchange(context, at - 1, *exchange, gradients)?));
                }
            }
        }
        if pass != Pass::Inputs {
            let gradient = device.view(here(&gradients.values[from]), 0..len);
            layer.backward_weight(
                device,
                rows,
                &tape,
                gradient,
                context.gradients,
                context.accumulate.weights,
            );
        }
        settle(device);
        if let Some((exchange, started)) = started {
            self.finish_exchange(context, at - 1, exchange, started, gradients);
        }
        Ok(())
    }

    /// The activation of the layer before piece `at`, and what it saved, if the layer at `at` is to turn its gradient back too.
    fn turned_with<'v, D: Device>(
        &self,
        device: &D,
        at: usize,
        rows: usize,
        activations: &'v Activations<D>,
    ) -> Option<FusedActivation<D::View<'v>>> {
        let before = at.checked_sub(1)?;
        let (Piece::Layer(first), Piece::Layer(second)) =
            (&self.pieces[before].piece, &self.pieces[at].piece)
        else {
            return None;
        };
        let activation = first.activation_fused_with(device, second)?;
        let saved = device.view(here(&activations.saved[before]), 0..rows * first.saved_len());
        Some(FusedActivation { activation, saved })
    }

    fn is_layer(&self, at: usize) -> bool {
        self.pieces.get(at).is_some_and(|piece| matches!(piece.piece, Piece::Layer(_)))
    }

    /// True if the gradient at position `at` is wanted: by an earlier stage, or by parameters before it.
    fn needs_gradient(&self, at: usize) -> bool {
        self.index > 0 || (0..at).any(|before| self.first_tensor(before).is_some())
    }

    fn start_exchange<D: Device>(
        &self,
        context: &mut BackwardContext<'_, '_, D>,
        at: usize,
        exchange: Exchange,
        gradients: &mut Gradients<D>,
    ) -> Result<Started<D::Buffer>> {
        let all = &mut gradients.values[self.positions[at + 1].gradient];
        context.exchanger.start_backward(exchange, context.rows, all)
    }

    fn finish_exchange<D: Device>(
        &self,
        context: &mut BackwardContext<'_, '_, D>,
        at: usize,
        exchange: Exchange,
        started: Started<D::Buffer>,
        gradients: &mut Gradients<D>,
    ) {
        let (own, all) = (self.positions[at].gradient, self.positions[at + 1].gradient);
        if exchange.kind == ExchangeKind::GatherOutput {
            let (before, after) = gradients.values.split_at_mut(all);
            let (own, all) = (here_mut(&mut before[own]), here(&after[0]));
            context.exchanger.own_columns(exchange.width, context.rows, all, own);
        } else {
            context.exchanger.finish(started, exchange, context.rows, &mut gradients.values[own]);
        }
    }
}
