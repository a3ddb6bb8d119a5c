//! Forward passes that continue a sequence, for a stage whose layers were built for a single position.

use std::ops::Range;

use super::points::AddedValue;
use super::{Activations, Stage};
use crate::device::Device;
use crate::nn::{FlatBuffer, NextPositions};
use crate::parallel::tensor::Piece;
use crate::parallel::tensor::exchange::{here, here_mut};
use crate::trace::{self, Name};

impl Stage {
    /// Returns true if [`Stage::forward_next`] can run this stage: all layers are whole, and in each an
    /// output depends on no later position.
    pub fn continues(&self) -> bool {
        self.pieces.iter().all(|piece| matches!(&piece.piece, Piece::Layer(layer) if layer.continues()))
    }

    /// Runs the forward pass for `positions` of one sequence. The rows of `activations` are positions, and
    /// those before have been computed: what layers read of them, such as the keys and values of
    /// attention, is where the passes over them have left it. The stage [continues](Stage::continues).
    pub fn forward_next<D: Device>(
        &self,
        device: &D,
        parameters: &FlatBuffer<D>,
        positions: &Range<usize>,
        activations: &mut Activations<D>,
    ) {
        let Activations { values, saved, .. } = activations;
        let rows = |width: usize| positions.start * width..positions.end * width;
        for (at, piece) in self.pieces.iter().enumerate() {
            let Piece::Layer(layer) = &piece.piece else { continue };
            let _span = trace::work(Name::Layer).layer(piece.layer);
            let (before, after) = (&self.points[piece.input], &self.points[at + 1]);
            let mut output = values[after.value].take();
            let input = here(&values[before.value]);
            let inputs = device.view(input, rows(before.width));
            let saved = device.view_mut(here_mut(&mut saved[at]), rows(layer.saved_len()));
            let outputs = device.view_mut(here_mut(&mut output), rows(after.width));
            match &piece.added {
                None => {
                    let all_inputs = device.view(input, 0..positions.end * before.width);
                    let positions = positions.clone();
                    let next = NextPositions { positions, all_inputs, inputs, saved, outputs };
                    layer.forward_next(device, parameters, next);
                }
                Some(AddedValue { point, .. }) => {
                    let added = here(&values[self.points[*point].value]);
                    let inputs = [inputs, device.view(added, rows(after.width))];
                    layer.forward_added(device, parameters, positions.len(), inputs, saved, outputs);
                }
            }
            values[after.value] = output;
        }
    }
}
