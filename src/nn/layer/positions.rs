//! Learnt positions.

use super::passes::{LayerPasses, LayerSums, LayerTensors, NextPositions, PositionRule, Tape};
use crate::device::{Activation, BiasShape, Device};
use crate::nn::Features;
use crate::sums::Section;

/// Adds a row of a table to each position of a sequence.
#[derive(Debug, Clone)]
pub struct PositionsLayer {
    /// The number of positions.
    pub len: usize,
    /// Features of a position.
    pub width: usize,
}

/// The number of the tensor.
const WEIGHT: usize = 0;

impl LayerPasses for PositionsLayer {
    fn name(&self) -> &'static str {
        "positions"
    }

    fn input_len(&self) -> usize {
        self.len * self.width
    }

    fn output(&self) -> Features {
        Features::Sequence { len: self.len, width: self.width }
    }

    fn is_elementwise(&self) -> bool {
        true
    }

    fn continues(&self) -> bool {
        true
    }

    fn position_rule(&self) -> PositionRule {
        PositionRule::Row
    }

    fn of_positions(&self, own: Section) -> PositionsLayer {
        PositionsLayer { len: own.len(), ..self.clone() }
    }

    fn forward<D: Device>(
        &self,
        device: &D,
        parameters: LayerTensors<'_, D>,
        _rows: usize,
        input: D::View<'_>,
        _saved: D::ViewMut<'_>,
        output: D::ViewMut<'_>,
    ) {
        device.add_table(input, parameters.get(device, WEIGHT), output);
    }

    fn forward_next<D: Device>(
        &self,
        device: &D,
        parameters: LayerTensors<'_, D>,
        next: NextPositions<'_, D>,
    ) {
        let NextPositions { positions, inputs, outputs, .. } = next;
        let part = positions.start * self.width..positions.end * self.width;
        device.add_table(inputs, parameters.get_part(device, WEIGHT, part), outputs);
    }

    fn add_bias_gradient<D: Device>(
        &self,
        device: &D,
        tape: &Tape<'_, D>,
        gradient: D::ViewMut<'_>,
        mut sums: LayerSums<'_, D>,
        section: Section,
    ) {
        // the table is a bias, with an element for each value of a row
        let shape = BiasShape { columns: self.input_len(), positions: 1 };
        let table = sums.get(device, WEIGHT, section);
        device.activation_backward(Activation::Identity, shape, tape.output, gradient, Some(table));
    }
}
