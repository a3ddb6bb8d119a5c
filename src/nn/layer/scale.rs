//! Learnt scales.

use super::passes::{LayerPasses, LayerSums, LayerTensors, Tape, TapedRows};
use crate::device::Device;
use crate::nn::Features;

/// Multiplies each element of the innermost dimension by a weight of its own: the `LayerScale` at the end of
/// a residual's body (Touvron et al., "Going deeper with image transformers", 2021, §2).
#[derive(Debug, Clone)]
pub struct ScaleLayer {
    /// The shape of a row.
    pub features: Features,
}

/// The number of the tensor.
const WEIGHT: usize = 0;

impl LayerPasses for ScaleLayer {
    fn name(&self) -> &'static str {
        "layer-scale"
    }

    fn input_len(&self) -> usize {
        self.features.len()
    }

    fn output(&self) -> Features {
        self.features
    }

    fn continues(&self) -> bool {
        true
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
        device.scale_columns(input, parameters.get(device, WEIGHT), output);
    }

    fn backward_weight<D: Device>(
        &self,
        device: &D,
        micro_batches: &[TapedRows<'_, D>],
        mut sums: LayerSums<'_, D>,
    ) {
        let columns = self.features.last_dimension();
        for TapedRows { tape, gradient, section } in micro_batches {
            let weight = sums.get(device, WEIGHT, section.times(self.features.len() / columns));
            device.scale_columns_backward_weight(columns, tape.input, *gradient, weight);
        }
    }

    fn backward_input<D: Device>(
        &self,
        device: &D,
        parameters: LayerTensors<'_, D>,
        _rows: usize,
        _tape: &Tape<'_, D>,
        gradient: D::View<'_>,
        input_gradient: D::ViewMut<'_>,
    ) {
        device.scale_columns(gradient, parameters.get(device, WEIGHT), input_gradient);
    }
}
