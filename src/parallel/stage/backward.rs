//! The backward pass through the pieces of a stage.

use std::ops::Range;

use super::Stage;
use super::arrays::{Activations, Gradients};
use super::points::{Point, StagePiece};
use super::weights::{WeightRows, add_positions};
use crate::Result;
use crate::device::Device;
use crate::nn::{Draws, FlatBuffer, Layer, Tape, TapedRows};
use crate::parallel::settle;
use crate::parallel::tensor::Piece;
use crate::parallel::tensor::exchange::{Exchange, ExchangeKind, Exchanger, Started, here, here_mut};
use crate::sums::Section;
use crate::trace::{self, Name};

/// The gradients that a backward pass computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pass {
    /// The gradients of values, biases and weights.
    Whole,
    /// The gradients of values; those of weights and biases follow by [`Stage::weights_piece`]. Only where
    /// gradients do not share arrays.
    Inputs,
}

/// The arguments of a backward pass besides the arrays of its micro-batch.
pub struct BackwardContext<'a, 'd, D: Device> {
    /// The device and the exchanges.
    pub exchanger: &'a mut Exchanger<'d, D>,
    /// This rank's parameters.
    pub parameters: &'a FlatBuffer<D>,
    /// The gradients of the parameters.
    pub gradients: &'a mut FlatBuffer<D>,
    /// The rows of the micro-batch among those of the batch.
    pub section: Section,
}

impl Stage {
    /// Runs the backward pass of piece `at`: from the gradient at point `at + 1` to the gradient at
    /// point `at`, if that is needed, and, if `pass` is [`Pass::Whole`], to that of its parameters. An
    /// exchange before a layer is under way while the gradients of the layer's weights are computed. For 0
    /// rows, it only completes the sums of the parameters. Collective over the tensor axis, unless there
    /// are no rows.
    ///
    /// # Errors
    /// There is no memory for messages.
    pub fn backward_piece<D: Device>(
        &self,
        context: &mut BackwardContext<'_, '_, D>,
        at: usize,
        pass: Pass,
        activations: &mut Activations<D>,
        gradients: &mut Gradients<D>,
    ) -> Result<()> {
        let is_empty = context.section.is_empty();
        assert!(pass == Pass::Whole || !self.shares_gradients, "gradients are needed after the pass");
        match &self.pieces[at].piece {
            Piece::Layer(_) if is_empty && pass == Pass::Whole => {
                let section = context.section;
                let rows = WeightRows { activations, gradients, first_row: 0, section };
                self.weights_piece(context.exchanger, context.gradients, at, &mut [rows])
            }
            _ if is_empty => Ok(()),
            Piece::Layer(layer) => {
                if pass == Pass::Whole
                    && self.is_whole_backward(at)
                    && layer.fuses_backward(context.exchanger.device, context.section.len())
                {
                    self.backward_fused(context, at, layer, activations, gradients);
                    return Ok(());
                }
                self.backward_layer(context, at, layer, pass, activations, gradients)
            }
            // an exchange before a layer was done together with it
            Piece::Exchange(_) if self.exchange_before(at + 1).is_some() => Ok(()),
            Piece::Exchange(exchange) => {
                let started = self.start_exchange(context, at, *exchange, gradients)?;
                self.finish_exchange(context, at, *exchange, started, gradients);
                Ok(())
            }
        }
    }

    /// Copies the gradient of the output of piece `at`, before its activation, for the value that is added
    /// to it.
    fn branch<D: Device>(&self, device: &D, at: usize, rows: usize, gradients: &mut Gradients<D>) {
        let Some(into) = self.pieces[at].added.and_then(|added| added.gradient) else { return };
        let after = &self.points[at + 1];
        let len = rows * after.width;
        if len == 0 {
            return;
        }
        let mut copy = gradients.values[into].take();
        let from = device.view(here(&gradients.values[after.gradient]), 0..len);
        device.copy(from, device.view_mut(here_mut(&mut copy), 0..len));
        gradients.values[into] = copy;
    }

    /// Adds the other parts of the gradient of the input of piece `at`, if that is the first piece that
    /// reads it.
    fn merge<D: Device>(&self, device: &D, at: usize, rows: usize, gradients: &mut Gradients<D>) {
        let StagePiece { input, input_gradient, .. } = self.pieces[at];
        let point = &self.points[input];
        let is_last = input_gradient == point.gradient && !point.other_gradients.is_empty();
        if !is_last || point.width == 0 {
            return;
        }
        let mut sum = gradients.values[input_gradient].take();
        for other in &point.other_gradients {
            let other = device.view(here(&gradients.values[*other]), 0..rows * point.width);
            device.add(other, device.view_mut(here_mut(&mut sum), 0..rows * point.width));
        }
        gradients.values[input_gradient] = sum;
    }

    /// Returns true if the whole backward pass of piece `at`, a layer, computes all gradients and has nothing
    /// to exchange in between. An exchange before the layer starts before the gradients of its parameters.
    fn is_whole_backward(&self, at: usize) -> bool {
        self.needs_gradient(self.pieces[at].input)
            && self.exchange_before(at).is_none()
            && self.gathered_input(at).is_none()
            && self.pieces[at].position_sums.is_none()
    }

    /// Returns the exchange whose output piece `at`, a layer, reads.
    pub(super) fn exchange_before(&self, at: usize) -> Option<Exchange> {
        let piece = self.pieces.get(at).filter(|piece| piece.input == at)?;
        match (&piece.piece, &self.pieces.get(at.checked_sub(1)?)?.piece) {
            (Piece::Layer(_), Piece::Exchange(exchange)) => Some(*exchange),
            _ => None,
        }
    }

    /// Returns the arrays of the forward pass of the layer at `at` for some rows.
    pub(super) fn tape<'a, D: Device>(
        &self,
        device: &D,
        at: usize,
        rows: Range<usize>,
        activations: &'a Activations<D>,
    ) -> Tape<'a, D> {
        let view = |array: &'a Option<D::Buffer>, width: usize| {
            device.view(here(array), rows.start * width..rows.end * width)
        };
        let value = |point: &Point| view(&activations.values[point.value], point.width);
        let saved = view(&activations.saved[at], self.saved_width(at));
        let input = value(&self.points[self.pieces[at].input]);
        let draws = activations.draws.map(|draws| Draws { first_row: draws.first_row + rows.start, ..draws });
        let is_through_activation = at + 1 == self.pieces.len() && self.loss_activation.is_some();
        let tape = Tape::new(input, saved, value(&self.points[at + 1]));
        Tape { draws, is_through_activation, ..tape }
    }

    fn backward_fused<D: Device>(
        &self,
        context: &mut BackwardContext<'_, '_, D>,
        at: usize,
        layer: &Layer,
        activations: &Activations<D>,
        gradients: &mut Gradients<D>,
    ) {
        let _span = trace::work(Name::Layer).layer(self.pieces[at].layer);
        let (device, section) = (context.exchanger.device, context.section);
        let StagePiece { input, input_gradient: into, .. } = self.pieces[at];
        let (before, after, rows) = (&self.points[input], &self.points[at + 1], section.len());
        let (tape, own_len) = (self.tape(device, at, 0..rows, activations), rows * after.width);
        if self.pieces[at].added.is_some() {
            let gradient = device.view_mut(here_mut(&mut gradients.values[after.gradient]), 0..own_len);
            layer.backward_activation(device, &tape, gradient, None);
            self.branch(device, at, rows, gradients);
        }
        let (mut own, mut memory) = (gradients.values[into].take(), gradients.position_sums.take());
        let gradient = device.view(here(&gradients.values[after.gradient]), 0..own_len);
        let taped = TapedRows { tape, gradient, section };
        let len = rows * before.gradient_width();
        let input_gradient = device.view_mut(here_mut(&mut own), 0..len);
        let (parameters, sums) = (context.parameters, &mut *context.gradients);
        layer.backward_fused(device, parameters, &taped, memory.as_mut(), sums, input_gradient);
        (gradients.values[into], gradients.position_sums) = (own, memory);
        self.merge(device, at, rows, gradients);
        settle(device);
    }

    fn backward_layer<D: Device>(
        &self,
        context: &mut BackwardContext<'_, '_, D>,
        at: usize,
        layer: &Layer,
        pass: Pass,
        activations: &mut Activations<D>,
        gradients: &mut Gradients<D>,
    ) -> Result<()> {
        let _span = trace::work(Name::Layer).layer(self.pieces[at].layer);
        let (device, section) = (context.exchanger.device, context.section);
        let rows = section.len();
        if pass == Pass::Whole {
            self.gather_input(context.exchanger, at, 0..rows, activations)?;
        }
        let activations = &*activations;
        let StagePiece { input, input_gradient: into, position_sums, .. } = self.pieces[at];
        let (before, after) = (&self.points[input], &self.points[at + 1]);
        let tape = self.tape(device, at, 0..rows, activations);
        let (from, len) = (after.gradient, rows * after.width);
        let (mut started, mut summing) = (None, None);
        if !layer.is_idle() {
            let gradient = device.view_mut(here_mut(&mut gradients.values[from]), 0..len);
            let sums = (pass == Pass::Whole).then_some((&mut *context.gradients, section));
            layer.backward_activation(device, &tape, gradient, sums);
            self.branch(device, at, rows, gradients);
        }
        if let Some(exchange) = position_sums.filter(|_| pass == Pass::Whole) {
            let tape = self.tape(device, at, 0..rows, activations);
            let gradient = device.view(here(&gradients.values[from]), 0..len);
            let taped = TapedRows { tape, gradient, section };
            let fill = |sums: D::ViewMut<'_>| layer.sum_positions(device, &taped, sums);
            summing = Some(context.exchanger.start_position_sums(exchange, rows, fill)?);
        }
        if self.needs_gradient(input) {
            if !layer.is_elementwise() && !layer.is_idle() {
                let mut own = gradients.values[into].take();
                let gradient = device.view(here(&gradients.values[from]), 0..len);
                let len = rows * before.gradient_width();
                let input = device.view_mut(here_mut(&mut own), 0..len);
                layer.backward_input(device, context.parameters, rows, &tape, gradient, input);
                gradients.values[into] = own;
            }
            self.merge(device, at, rows, gradients);
            if let Some(exchange) = self.exchange_before(at) {
                started = Some((exchange, self.start_exchange(context, at - 1, exchange, gradients)?));
            }
        }
        if pass == Pass::Whole {
            let mut sums = gradients.position_sums.take();
            let gradient = device.view(here(&gradients.values[from]), 0..len);
            let taped = TapedRows { tape, gradient, section };
            match summing {
                Some(summing) => {
                    let sums = context.exchanger.finish_position_sums(summing);
                    layer.add_position_sums(device, &taped, sums, context.gradients);
                }
                None if layer.is_idle() => {}
                None if layer.position_sums_len() > 0 => {
                    add_positions(device, layer, &taped, here_mut(&mut sums), context.gradients);
                }
                None => layer.backward_weight(device, &[taped], context.gradients),
            }
            gradients.position_sums = sums;
        }
        settle(device);
        if let Some((exchange, started)) = started {
            self.finish_exchange(context, at - 1, exchange, started, gradients);
        }
        Ok(())
    }

    fn start_exchange<D: Device>(
        &self,
        context: &mut BackwardContext<'_, '_, D>,
        at: usize,
        exchange: Exchange,
        gradients: &mut Gradients<D>,
    ) -> Result<Started<D::Buffer>> {
        let all = &mut gradients.values[self.points[at + 1].gradient];
        context.exchanger.start_backward(exchange, 0..context.section.len(), all)
    }

    fn finish_exchange<D: Device>(
        &self,
        context: &mut BackwardContext<'_, '_, D>,
        at: usize,
        exchange: Exchange,
        started: Started<D::Buffer>,
        gradients: &mut Gradients<D>,
    ) {
        let (own, all) = (self.pieces[at].input_gradient, self.points[at + 1].gradient);
        let (rows, mut into) = (0..context.section.len(), gradients.values[own].take());
        if exchange.kind == ExchangeKind::GatherOutput {
            let all = here(&gradients.values[all]);
            context.exchanger.own_columns(exchange, rows, all, here_mut(&mut into));
        } else {
            context.exchanger.finish(started, exchange, rows, &mut into);
        }
        gradients.values[own] = into;
        self.merge(context.exchanger.device, at, context.section.len(), gradients);
    }
}
