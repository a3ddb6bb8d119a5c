//! The sum of two values.

use super::passes::{LayerPasses, LayerTensors, PositionRule};
use crate::device::Device;
use crate::nn::Features;
use crate::sums::Section;

/// Returns its input; [`LayerInputs::added`](super::LayerInputs) is added to it, as to the output of any
/// layer. Gradients pass unchanged.
#[derive(Debug, Clone)]
pub struct AddLayer {
    /// The shape of a row.
    pub features: Features,
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

    fn continues(&self) -> bool {
        true
    }

    fn position_rule(&self) -> PositionRule {
        PositionRule::Alike
    }

    fn of_positions(&self, own: Section) -> AddLayer {
        AddLayer { features: self.features.with_positions(own.len()) }
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
        device.copy(input, output);
    }
}
