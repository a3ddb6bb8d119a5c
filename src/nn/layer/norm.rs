//! Normalisations.

use super::passes::{LayerPasses, LayerSums, LayerTensors, PositionRule, Tape, TapedRows};
use crate::device::{Activation, BiasShape, Device, GroupNormShape, NormShape};
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
    /// True for a layer with a bias, as every group norm is.
    pub bias: bool,
    /// True for a group norm to whose output [`LayerInputs::added`](super::LayerInputs) is added.
    pub adds: bool,
}

/// The numbers of the tensors.
const WEIGHT: usize = 0;
const BIAS: usize = 1;

impl NormLayer {
    /// Returns true if another value can be added to the output: for a group norm without a ReLU.
    pub fn takes_addition(&self) -> bool {
        !self.adds && matches!(self.norm, Norm::Group(GroupNormShape { relu: false, .. }))
    }

    /// Adds another value to the output of a group norm, and a ReLU after that if there is to be one.
    pub fn add_before_relu(&mut self, relu: bool) {
        if let Norm::Group(shape) = &mut self.norm {
            (self.adds, shape.relu) = (true, relu);
        }
    }

    /// Returns the number of vectors of a row: positions.
    fn positions(&self) -> usize {
        self.features.len() / self.features.last_dimension()
    }

    fn bias_shape(&self) -> BiasShape {
        BiasShape { columns: self.features.last_dimension(), positions: self.positions() }
    }

    /// Returns true if gradients are summed over the positions of a sample first.
    fn has_positions(&self) -> bool {
        self.position_rule() == PositionRule::Alike
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
            Norm::Group(_) if self.adds => "group-norm, add",
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
        (8 + usize::from(self.adds)) * self.features.len()
    }

    fn activation(&self) -> Activation {
        match self.norm {
            Norm::Group(GroupNormShape { relu: true, .. }) => Activation::Relu,
            _ => Activation::Identity,
        }
    }

    fn continues(&self) -> bool {
        matches!(self.norm, Norm::Layer(_))
    }

    fn position_rule(&self) -> PositionRule {
        match self.norm {
            Norm::Layer(NormShape { positions: Some(_), .. }) => PositionRule::Alike,
            _ => PositionRule::Mixed,
        }
    }

    fn of_positions(&self, own: Section) -> NormLayer {
        let norm = match self.norm {
            Norm::Layer(shape) => Norm::Layer(NormShape { positions: Some(own), ..shape }),
            group => group,
        };
        NormLayer { features: self.features.with_positions(own.len()), norm, ..self.clone() }
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
        match self.of_rows(rows) {
            Norm::Layer(shape) => {
                let bias = self.bias.then(|| parameters.get(device, BIAS));
                device.layer_norm_forward(&shape, input, weight, bias, saved, output);
            }
            Norm::Group(shape) => {
                let bias = parameters.get(device, BIAS);
                device.group_norm_forward(&shape, input, weight, bias, None, saved, output);
            }
        }
    }

    fn forward_added<D: Device>(
        &self,
        device: &D,
        parameters: LayerTensors<'_, D>,
        rows: usize,
        [input, added]: [D::View<'_>; 2],
        saved: D::ViewMut<'_>,
        output: D::ViewMut<'_>,
    ) {
        let Norm::Group(shape) = self.of_rows(rows) else {
            unreachable!("nothing is added to the output of a layer norm")
        };
        let [weight, bias] = [WEIGHT, BIAS].map(|number| parameters.get(device, number));
        device.group_norm_forward(&shape, input, weight, bias, Some(added), saved, output);
    }

    fn backward_activation<D: Device>(
        &self,
        device: &D,
        tape: &Tape<'_, D>,
        gradient: D::ViewMut<'_>,
        sums: Option<(LayerSums<'_, D>, Section)>,
    ) {
        if let Norm::Group(GroupNormShape { relu: true, .. }) = self.norm {
            device.activation_backward(Activation::Relu, self.bias_shape(), tape.output, gradient, None);
        } else if let Some((sums, section)) = sums {
            self.add_bias_gradient(device, tape, gradient, sums, section);
        }
    }

    fn add_bias_gradient<D: Device>(
        &self,
        device: &D,
        tape: &Tape<'_, D>,
        gradient: D::ViewMut<'_>,
        mut sums: LayerSums<'_, D>,
        section: Section,
    ) {
        // with positions, a bias is among the sums over them
        if matches!(self.norm, Norm::Layer(_)) && self.bias && !self.has_positions() {
            let (shape, bias) = (self.bias_shape(), sums.get(device, BIAS, section));
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
            let Norm::Layer(shape) = self.of_rows(section.len()) else {
                unreachable!("a group norm has sums over positions")
            };
            let terms = if self.has_positions() { 1 } else { self.positions() };
            let weight = sums.get(device, WEIGHT, section.times(terms));
            device.layer_norm_backward_weight(&shape, *input, *saved, *gradient, weight);
            if self.bias && self.has_positions() {
                let bias = sums.get(device, BIAS, *section);
                device.layer_norm_backward_bias(&shape, *gradient, bias);
            }
        }
    }

    fn position_sums_len(&self) -> usize {
        match self.norm {
            Norm::Layer(_) => 0,
            Norm::Group(shape) => shape.position_sums_len(),
        }
    }

    fn sum_positions<D: Device>(&self, device: &D, rows: &TapedRows<'_, D>, sums: D::ViewMut<'_>) {
        let TapedRows { tape: Tape { input, saved, .. }, gradient, section } = *rows;
        match self.of_rows(section.len()) {
            Norm::Layer(shape) => {
                device.layer_norm_position_sums(&shape, input, saved, gradient, self.bias, sums);
            }
            Norm::Group(shape) => device.group_norm_position_sums(&shape, input, saved, gradient, sums),
        }
    }

    fn fuses_backward<D: Device>(&self, device: &D, _rows: usize) -> bool {
        matches!(self.norm, Norm::Group(_)) && device.fuses_group_norm_backward()
    }

    fn backward_fused<D: Device>(
        &self,
        device: &D,
        parameters: LayerTensors<'_, D>,
        rows: &TapedRows<'_, D>,
        position_sums: Option<&mut D::Buffer>,
        sums: LayerSums<'_, D>,
        input_gradient: D::ViewMut<'_>,
    ) {
        let TapedRows { tape: Tape { input, saved, output, .. }, gradient, section } = *rows;
        let Norm::Group(shape) = self.of_rows(section.len()) else {
            unreachable!("a layer norm has a backward pass in parts")
        };
        // the gradient has passed through the ReLU already, for the value that is added
        let shape = GroupNormShape { relu: shape.relu && !self.adds, ..shape };
        let weight = parameters.get(device, WEIGHT);
        let memory = position_sums.expect("a group norm has room for its sums over positions");
        let of_rows = device.view_mut(memory, 0..section.len() * shape.position_sums_len());
        device.group_norm_backward(&shape, input, weight, saved, output, gradient, of_rows, input_gradient);
        self.add_position_sums(device, rows, memory, sums);
    }

    fn add_position_sums<D: Device>(
        &self,
        device: &D,
        rows: &TapedRows<'_, D>,
        position_sums: &mut D::Buffer,
        mut sums: LayerSums<'_, D>,
    ) {
        let (columns, TapedRows { tape, section, .. }) = (self.features.last_dimension(), rows);
        let (shape, len) = (BiasShape { columns, positions: 1 }, section.len() * columns);
        for tensor in [WEIGHT, BIAS].into_iter().take(1 + usize::from(self.bias)) {
            let terms = device.view_mut(position_sums, tensor * len..(tensor + 1) * len);
            let sum = sums.get(device, tensor, *section);
            device.activation_backward(Activation::Identity, shape, tape.output, terms, Some(sum));
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
