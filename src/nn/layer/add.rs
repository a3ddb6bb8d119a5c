//! The sum of two values.

use super::passes::{LayerPasses, LayerSums, LayerTensors, PositionRule, Tape};
use crate::device::{Activation, BiasShape, Device};
use crate::nn::Features;
use crate::sums::Section;

/// Adds [`LayerInputs::added`](super::LayerInputs) to its input.
#[derive(Debug, Clone)]
pub struct AddLayer {
    /// The shape of a row.
    pub features: Features,
    /// True if a ReLU follows.
    pub relu: bool,
}

impl LayerPasses for AddLayer {
    fn name(&self) -> &'static str {
        "add"
    }

    fn input_len(&self) -> usize {
        self.features.len()
    }

    fn output(&self) -> Features {
        self.features
    }

    fn is_elementwise(&self) -> bool {
        true
    }

    fn activation(&self) -> Activation {
        if self.relu { Activation::Relu } else { Activation::Identity }
    }

    fn continues(&self) -> bool {
        true
    }

    fn position_rule(&self) -> PositionRule {
        PositionRule::Alike
    }

    fn of_positions(&self, own: Section) -> AddLayer {
        AddLayer { features: self.features.with_positions(own.len()), ..self.clone() }
    }

    fn forward<D: Device>(
        &self,
        _device: &D,
        _parameters: LayerTensors<'_, D>,
        _rows: usize,
        _input: D::View<'_>,
        _saved: D::ViewMut<'_>,
        _output: D::ViewMut<'_>,
    ) {
        unreachable!("an addition has two inputs")
    }

    fn forward_added<D: Device>(
        &self,
        device: &D,
        _parameters: LayerTensors<'_, D>,
        _rows: usize,
        [first, second]: [D::View<'_>; 2],
        _saved: D::ViewMut<'_>,
        output: D::ViewMut<'_>,
    ) {
        device.sum(first, second, self.relu, output);
    }

    fn backward_activation<D: Device>(
        &self,
        device: &D,
        tape: &Tape<'_, D>,
        gradient: D::ViewMut<'_>,
        _sums: Option<(LayerSums<'_, D>, Section)>,
    ) {
        if self.relu {
            let shape = BiasShape { columns: self.features.len(), positions: 1 };
            device.activation_backward(Activation::Relu, shape, tape.output, gradient, None);
        }
    }
}
