//! The gradients of the parameters of a piece, after those of values.

use std::ops::Range;

use smallvec::SmallVec;

use super::Stage;
use super::arrays::{Activations, Gradients};
use crate::Result;
use crate::device::Device;
use crate::nn::{FlatBuffer, Layer, TapedRows};
use crate::parallel::settle;
use crate::parallel::tensor::Piece;
use crate::parallel::tensor::exchange::{Exchange, ExchangeKind, Exchanger, here, here_mut};
use crate::sums::Section;
use crate::trace::{self, Name};

/// Rows of a micro-batch of which the gradients of parameters are computed after those of values.
pub struct WeightRows<'a, D: Device> {
    /// The arrays of the forward pass.
    pub activations: &'a mut Activations<D>,
    /// The gradients of the values.
    pub gradients: &'a mut Gradients<D>,
    /// The first of the rows in these arrays.
    pub first_row: usize,
    /// The rows among those of the batch.
    pub section: Section,
}

/// Adds up the gradients of the parameters of a layer from sums over positions, for which there is
/// `memory`.
pub(super) fn add_positions<D: Device>(
    device: &D,
    layer: &Layer,
    taped: &TapedRows<'_, D>,
    memory: &mut D::Buffer,
    sums: &mut FlatBuffer<D>,
) {
    let num_rows = taped.section.len();
    if num_rows > 0 {
        let len = num_rows * layer.position_sums_len();
        layer.sum_positions(device, taped, device.view_mut(memory, 0..len));
    }
    layer.add_position_sums(device, taped, memory, sums);
}

impl Stage {
    /// Computes the gradients of the parameters of piece `at` for consecutive micro-batches, after their
    /// backward passes with [`Pass::Inputs`](super::Pass::Inputs), if gradients do not share arrays. For one
    /// without rows, it only completes the sums. Collective over the tensor axis, unless there are no rows.
    ///
    /// # Errors
    /// There is no memory for messages.
    pub fn weights_piece<D: Device>(
        &self,
        exchanger: &mut Exchanger<'_, D>,
        sums: &mut FlatBuffer<D>,
        at: usize,
        micro_batches: &mut [WeightRows<'_, D>],
    ) -> Result<()> {
        let Piece::Layer(layer) = &self.pieces[at].piece else { return Ok(()) };
        if layer.tensors.is_empty() {
            return Ok(());
        }
        let _span = trace::work(Name::Layer).layer(self.pieces[at].layer);
        // what is gathered is there for one micro-batch at a time
        let is_alone = self.gathered_input(at).is_some()
            || self.scattered_output(at).is_some()
            || self.pieces[at].position_sums.is_some()
            || layer.position_sums_len() > 0;
        let num_joined = if is_alone { 1 } else { micro_batches.len().max(1) };
        for joined in micro_batches.chunks_mut(num_joined) {
            self.weights_of_rows(exchanger, sums, at, layer, joined)?;
        }
        settle(exchanger.device);
        Ok(())
    }

    fn weights_of_rows<D: Device>(
        &self,
        exchanger: &mut Exchanger<'_, D>,
        sums: &mut FlatBuffer<D>,
        at: usize,
        layer: &Layer,
        micro_batches: &mut [WeightRows<'_, D>],
    ) -> Result<()> {
        let (device, after) = (exchanger.device, &self.points[at + 1]);
        let range = |first_row: usize, section: Section| first_row..first_row + section.len();
        let elements = |rows: Range<usize>| rows.start * after.width..rows.end * after.width;
        for WeightRows { activations, gradients, first_row, section } in &mut *micro_batches {
            let rows = range(*first_row, *section);
            if !section.is_empty() {
                self.gather_input(exchanger, at, rows.clone(), activations)?;
                self.gather_output_gradient(exchanger, at, rows.clone(), gradients)?;
            }
            let tape = self.tape(device, at, rows.clone(), activations);
            if !layer.is_idle() {
                let gradient = here_mut(&mut gradients.values[after.gradient]);
                let gradient = device.view_mut(gradient, elements(rows));
                layer.add_bias_gradient(device, &tape, gradient, sums, *section);
            }
        }
        if let [WeightRows { activations, gradients, first_row, section }] = &mut *micro_batches
            && layer.position_sums_len() > 0
        {
            let (rows, mut memory) = (range(*first_row, *section), gradients.position_sums.take());
            let gradient = device.view(here(&gradients.values[after.gradient]), elements(rows.clone()));
            let tape = self.tape(device, at, rows, activations);
            let taped = TapedRows { tape, gradient, section: *section };
            add_positions(device, layer, &taped, here_mut(&mut memory), sums);
            gradients.position_sums = memory;
            return Ok(());
        }
        let rows = micro_batches.iter().map(|WeightRows { activations, gradients, first_row, section }| {
            let rows = range(*first_row, *section);
            let gradient = here(&gradients.values[after.gradient]);
            let tape = self.tape(device, at, rows.clone(), activations);
            TapedRows { tape, gradient: device.view(gradient, elements(rows)), section: *section }
        });
        let rows: SmallVec<[TapedRows<'_, D>; 16]> = rows.collect();
        match (self.pieces[at].position_sums, rows.as_slice()) {
            (Some(exchange), [taped]) => {
                let fill = |sums: D::ViewMut<'_>| layer.sum_positions(device, taped, sums);
                let num_rows = taped.section.len();
                let position_sums = if num_rows > 0 {
                    let summing = exchanger.start_position_sums(exchange, num_rows, fill)?;
                    exchanger.finish_position_sums(summing)
                } else {
                    exchanger.position_sums()
                };
                layer.add_position_sums(device, taped, position_sums, sums);
            }
            _ if layer.is_idle() => {}
            _ => layer.backward_weight(device, &rows, sums),
        }
        Ok(())
    }

    /// Returns the exchange that gathers the input of piece `at` into an array of transient points.
    pub(super) fn gathered_input(&self, at: usize) -> Option<Exchange> {
        let input = self.pieces[at].input;
        let gather = input.checked_sub(1).filter(|_| self.points[input].is_transient)?;
        match &self.pieces[gather].piece {
            Piece::Exchange(exchange) if exchange.kind == ExchangeKind::Gather => Some(*exchange),
            _ => None,
        }
    }

    /// Returns the exchange that scatters the output of piece `at` from an array of transient points.
    fn scattered_output(&self, at: usize) -> Option<Exchange> {
        match &self.pieces.get(at + 1).filter(|_| self.points[at + 1].is_transient)?.piece {
            Piece::Exchange(exchange) if exchange.kind == ExchangeKind::Scatter => Some(*exchange),
            _ => None,
        }
    }

    /// Gathers some rows of the input of piece `at` again, if other values have taken its array since the
    /// forward pass. Collective over the tensor axis.
    pub(super) fn gather_input<D: Device>(
        &self,
        exchanger: &mut Exchanger<'_, D>,
        at: usize,
        rows: Range<usize>,
        activations: &mut Activations<D>,
    ) -> Result<()> {
        let Some(exchange) = self.gathered_input(at) else { return Ok(()) };
        let input = self.pieces[at].input;
        let [from, into] = [self.pieces[input - 1].input, input].map(|at| self.points[at].value);
        let values = &mut activations.values;
        let (mut own, mut all) = (values[from].take(), values[into].take());
        exchanger.forward(exchange, rows, &mut own, &mut all)?;
        (values[from], values[into]) = (own, all);
        Ok(())
    }

    /// Gathers some rows of the gradient of the output of piece `at` again, if others have taken its array
    /// since the backward pass. Collective over the tensor axis.
    fn gather_output_gradient<D: Device>(
        &self,
        exchanger: &mut Exchanger<'_, D>,
        at: usize,
        rows: Range<usize>,
        gradients: &mut Gradients<D>,
    ) -> Result<()> {
        let Some(exchange) = self.scattered_output(at) else { return Ok(()) };
        let [from, into] = [at + 2, at + 1].map(|at| self.points[at].gradient);
        let started = exchanger.start_backward(exchange, rows.clone(), &mut gradients.values[from])?;
        exchanger.finish(started, exchange, rows, &mut gradients.values[into]);
        Ok(())
    }
}
