//! Activations on their own.

use super::passes::{LayerPasses, LayerSums, LayerTensors, PositionRule, Tape};
use crate::device::{Activation, BiasShape, Device};
use crate::nn::Features;
use crate::sums::Section;

/// An activation on its own.
#[derive(Debug, Clone)]
pub struct ActivationLayer {
    /// The activation.
    pub activation: Activation,
    /// The shape of a row.
    pub features: Features,
}

impl LayerPasses for ActivationLayer {
    fn name(&self) -> &'static str {
        "activation"
    }

    fn input_len(&self) -> usize {
        self.features.len()
    }

    fn output(&self) -> Features {
        self.features
    }

    fn saved_len(&self) -> usize {
        if self.activation.saves() { self.features.len() } else { 0 }
    }

    fn is_elementwise(&self) -> bool {
        true
    }

    fn activation(&self) -> Activation {
        self.activation
    }

    fn continues(&self) -> bool {
        true
    }

    fn position_rule(&self) -> PositionRule {
        PositionRule::Alike
    }

    fn of_positions(&self, own: Section) -> ActivationLayer {
        ActivationLayer { features: self.features.with_positions(own.len()), ..self.clone() }
    }

    fn forward<D: Device>(
        &self,
        device: &D,
        _parameters: LayerTensors<'_, D>,
        _rows: usize,
        input: D::View<'_>,
        saved: D::ViewMut<'_>,
        output: D::ViewMut<'_>,
    ) {
        device.activation_forward(self.activation, input, saved, output);
    }

    fn backward_activation<D: Device>(
        &self,
        device: &D,
        tape: &Tape<'_, D>,
        gradient: D::ViewMut<'_>,
        _sums: Option<(LayerSums<'_, D>, Section)>,
    ) {
        let activation = tape.remaining(self.activation);
        let saved = tape.of_activation(activation);
        let shape = BiasShape { columns: self.features.len(), positions: 1 };
        device.activation_backward(activation, shape, saved, gradient, None);
    }
}
