//! Layer normalisation.

use super::passes::{LayerPasses, LayerSums, LayerTensors, Tape, TapedRows};
use crate::device::{Activation, BiasShape, Device, FusedActivation, NormShape};
use crate::nn::Features;
use crate::sums::Section;

/// Layer normalisation over the innermost dimension (Ba et al., "Layer normalization", 2016).
#[derive(Debug, Clone)]
pub struct LayerNormLayer {
    /// The shape of a row.
    pub features: Features,
    /// The number of vectors in a row, each of which is normalised by itself.
    pub positions: usize,
    /// The sizes of the normalisation; `rows` is 0 here.
    pub shape: NormShape,
    /// True for a layer with a bias.
    pub bias: bool,
}

/// The numbers of the tensors.
const WEIGHT: usize = 0;
const BIAS: usize = 1;

impl LayerNormLayer {
    fn shape(&self, rows: usize) -> NormShape {
        NormShape { rows: rows * self.positions, ..self.shape }
    }
}

impl LayerPasses for LayerNormLayer {
    fn name(&self) -> &'static str {
        "layer-norm"
    }

    fn input_len(&self) -> usize {
        self.features.len()
    }

    fn output(&self) -> Features {
        self.features
    }

    fn saved_len(&self) -> usize {
        self.positions * NormShape::SAVED
    }

    fn operations(&self) -> usize {
        8 * self.features.len()
    }

    fn forward<D: Device>(
        &self,
        device: &D,
        parameters: LayerTensors<'_, D>,
        rows: usize,
        input: D::View<'_>,
        saved: D::ViewMut<'_>,
        output: D::ViewMut<'_>,
    ) {
        let weight = parameters.get(device, WEIGHT);
        let bias = self.bias.then(|| parameters.get(device, BIAS));
        device.layer_norm_forward(&self.shape(rows), input, weight, bias, saved, output);
    }

    fn backward_activation<D: Device>(
        &self,
        device: &D,
        tape: &Tape<'_, D>,
        gradient: D::ViewMut<'_>,
        sums: Option<(LayerSums<'_, D>, Section)>,
        _is_backpropagated: bool,
    ) {
        if let Some((mut sums, section)) = sums.filter(|_| self.bias) {
            let shape = BiasShape { columns: self.shape.columns, positions: self.positions };
            let bias = sums.get(device, BIAS, section);
            device.activation_backward(Activation::Identity, shape, tape.output, gradient, Some(bias));
        }
    }

    fn backward_weight<D: Device>(
        &self,
        device: &D,
        micro_batches: &[TapedRows<'_, D>],
        mut sums: LayerSums<'_, D>,
    ) {
        for TapedRows { tape, gradient, section } in micro_batches {
            let shape = self.shape(section.len());
            let weight = sums.get(device, WEIGHT, section.times(self.positions));
            device.layer_norm_backward_weight(&shape, tape.input, tape.saved, *gradient, weight);
        }
    }

    fn backward_input<D: Device>(
        &self,
        device: &D,
        parameters: LayerTensors<'_, D>,
        rows: usize,
        tape: &Tape<'_, D>,
        gradient: D::View<'_>,
        input_gradient: D::ViewMut<'_>,
        _previous: Option<FusedActivation<D::View<'_>>>,
    ) {
        let weight = parameters.get(device, WEIGHT);
        let Tape { input, saved, .. } = *tape;
        device.layer_norm_backward_input(&self.shape(rows), input, weight, saved, gradient, input_gradient);
    }
}
