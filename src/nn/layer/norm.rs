//! Normalisations.

use super::passes::{LayerPasses, LayerSums, LayerTensors, Tape, TapedRows};
use crate::device::{Activation, BiasShape, Device, FusedActivation, GroupNormShape, NormShape};
use crate::nn::Features;
use crate::sums::Section;

/// The values that are normalised together.
#[derive(Debug, Clone, Copy)]
pub enum Norm {
    /// The innermost dimension (Ba et al., "Layer normalization", 2016; without the mean, Zhang and
    /// Sennrich, "Root mean square layer normalization", 2019); `rows` is 0 here.
    Layer(NormShape),
    /// A group of channels of an image (Wu and He, "Group normalization", 2018); `rows` is 0 here.
    Group(GroupNormShape),
}

/// A normalisation with a weight and perhaps a bias for each element of the innermost dimension.
#[derive(Debug, Clone)]
pub struct NormLayer {
    /// The shape of a row.
    pub features: Features,
    /// The values that are normalised together.
    pub norm: Norm,
    /// True for a layer with a bias.
    pub bias: bool,
}

/// The numbers of the tensors.
const WEIGHT: usize = 0;
const BIAS: usize = 1;

impl NormLayer {
    /// Returns the number of vectors of a row: positions.
    fn positions(&self) -> usize {
        self.features.len() / self.features.last_dimension()
    }

    /// Returns the values that are normalised together in `rows` rows.
    fn of_rows(&self, rows: usize) -> Norm {
        match self.norm {
            Norm::Layer(shape) => Norm::Layer(NormShape { rows: rows * self.positions(), ..shape }),
            Norm::Group(shape) => Norm::Group(GroupNormShape { rows, ..shape }),
        }
    }
}

impl LayerPasses for NormLayer {
    fn name(&self) -> &'static str {
        match self.norm {
            Norm::Layer(NormShape { is_centred: true, .. }) => "layer-norm",
            Norm::Layer(_) => "rms-norm",
            Norm::Group(_) => "group-norm",
        }
    }

    fn input_len(&self) -> usize {
        self.features.len()
    }

    fn output(&self) -> Features {
        self.features
    }

    fn saved_len(&self) -> usize {
        match self.norm {
            Norm::Layer(_) => self.positions() * NormShape::SAVED,
            Norm::Group(shape) => shape.saved_len(),
        }
    }

    fn operations(&self) -> usize {
        8 * self.features.len()
    }

    fn continues(&self) -> bool {
        matches!(self.norm, Norm::Layer(_))
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
        match self.of_rows(rows) {
            Norm::Layer(shape) => device.layer_norm_forward(&shape, input, weight, bias, saved, output),
            Norm::Group(shape) => device.group_norm_forward(&shape, input, weight, bias, saved, output),
        }
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
            let shape = BiasShape { columns: self.features.last_dimension(), positions: self.positions() };
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
        for TapedRows { tape: Tape { input, saved, .. }, gradient, section } in micro_batches {
            match self.of_rows(section.len()) {
                Norm::Layer(shape) => {
                    let weight = sums.get(device, WEIGHT, section.times(self.positions()));
                    device.layer_norm_backward_weight(&shape, *input, *saved, *gradient, weight);
                }
                Norm::Group(shape) => {
                    let weight = sums.get(device, WEIGHT, *section);
                    device.group_norm_backward_weight(&shape, *input, *saved, *gradient, weight);
                }
            }
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
        match self.of_rows(rows) {
            Norm::Layer(shape) => {
                device.layer_norm_backward_input(&shape, input, weight, saved, gradient, input_gradient);
            }
            Norm::Group(shape) => {
                device.group_norm_backward_input(&shape, input, weight, saved, gradient, input_gradient);
            }
        }
    }
}
