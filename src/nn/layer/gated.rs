//! Gated linear units.

use super::passes::{LayerPasses, LayerTensors, PositionRule, Tape};
use crate::device::{Device, Gate};
use crate::nn::Features;
use crate::sums::Section;

/// The product of the first half of the features with a function of the second.
#[derive(Debug, Clone)]
pub struct GatedLayer {
    /// The function of the second half.
    pub gate: Gate,
    /// The shape of a row of inputs.
    pub features: Features,
}

impl GatedLayer {
    /// Returns the features of a position of the output.
    fn columns(&self) -> usize {
        self.features.last_dimension() / 2
    }
}

impl LayerPasses for GatedLayer {
    fn name(&self) -> &'static str {
        "gated linear unit"
    }

    fn input_len(&self) -> usize {
        self.features.len()
    }

    fn output(&self) -> Features {
        self.features.with_last_dimension(self.columns())
    }

    fn continues(&self) -> bool {
        true
    }

    fn position_rule(&self) -> PositionRule {
        PositionRule::Alike
    }

    fn of_positions(&self, own: Section) -> GatedLayer {
        GatedLayer { features: self.features.with_positions(own.len()), ..self.clone() }
    }

    fn forward<D: Device>(
        &self,
        device: &D,
        _parameters: LayerTensors<'_, D>,
        _rows: usize,
        input: D::View<'_>,
        _saved: D::ViewMut<'_>,
        output: D::ViewMut<'_>,
    ) {
        device.gated_forward(self.gate, self.columns(), input, output);
    }

    fn backward_input<D: Device>(
        &self,
        device: &D,
        _parameters: LayerTensors<'_, D>,
        _rows: usize,
        tape: &Tape<'_, D>,
        gradient: D::View<'_>,
        input_gradient: D::ViewMut<'_>,
    ) {
        device.gated_backward(self.gate, self.columns(), tape.input, gradient, input_gradient);
    }
}
