//! Linear layers.

use smallvec::SmallVec;

use super::passes::{LayerPasses, LayerSums, LayerTensors, SplitRule, Tape, TapedRows};
use crate::device::{
    Activation, BiasShape, Device, FusedActivation, LinearShape, WeightLayout, WeightOperands,
};
use crate::nn::Features;
use crate::sums::Section;

/// A linear layer and the activation that follows it. A rank's shard of one may have no inputs, so
/// that its contribution to a sum is 0, or no outputs.
#[derive(Debug, Clone)]
pub struct LinearLayer {
    /// Features per input row.
    pub inputs: usize,
    /// Features per output row.
    pub outputs: usize,
    /// The memory layout of the weight.
    pub layout: WeightLayout,
    /// The input features as terms of canonical sums: see [`crate::sums`].
    pub input_terms: Section,
    /// The output features as terms of canonical sums.
    pub output_terms: Section,
    /// The activation that follows.
    pub activation: Activation,
    /// True for a layer with a bias.
    pub bias: bool,
}

/// The numbers of the tensors.
const WEIGHT: usize = 0;
const BIAS: usize = 1;

impl LinearLayer {
    fn shape(&self, rows: usize) -> LinearShape {
        let LinearLayer { inputs, outputs, layout, input_terms, output_terms, .. } = *self;
        LinearShape { rows, inputs, outputs, layout, input_terms, output_terms }
    }
}

impl LayerPasses for LinearLayer {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn input_len(&self) -> usize {
        self.inputs
    }

    fn output(&self) -> Features {
        Features::Flat(self.outputs)
    }

    fn saved_len(&self) -> usize {
        if self.activation.saves() { self.outputs } else { 0 }
    }

    fn operations(&self) -> usize {
        2 * self.inputs * self.outputs
    }

    fn activation(&self) -> Activation {
        self.activation
    }

    fn split_rule(&self) -> SplitRule {
        SplitRule::Features
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
        match self {
            LinearLayer { inputs: 0, .. } => device.fill(output, 0.0),
            LinearLayer { outputs: 0, .. } => {}
            LinearLayer { activation, bias, .. } => {
                let bias = bias.then(|| parameters.get(device, BIAS));
                let weight = parameters.get(device, WEIGHT);
                device.linear_forward(&self.shape(rows), input, weight, bias, *activation, saved, output);
            }
        }
    }

    fn backward_activation<D: Device>(
        &self,
        device: &D,
        tape: &Tape<'_, D>,
        gradient: D::ViewMut<'_>,
        sums: Option<(LayerSums<'_, D>, Section)>,
        is_backpropagated: bool,
    ) {
        let mut sums = sums.filter(|_| self.bias);
        if self.outputs == 0 || is_backpropagated && sums.is_none() {
            return;
        }
        let activation = if is_backpropagated { Activation::Identity } else { self.activation };
        let saved = if activation.saves() { tape.saved } else { tape.output };
        let shape = BiasShape { columns: self.outputs, positions: 1 };
        let bias = sums.as_mut().map(|(sums, section)| sums.get(device, BIAS, *section));
        device.activation_backward(activation, shape, saved, gradient, bias);
    }

    fn backward_weight<D: Device>(
        &self,
        device: &D,
        micro_batches: &[TapedRows<'_, D>],
        mut sums: LayerSums<'_, D>,
    ) {
        if self.inputs == 0 || self.outputs == 0 {
            return;
        }
        let operands: SmallVec<[WeightOperands<D::View<'_>>; 16]> = micro_batches
            .iter()
            .map(|TapedRows { tape, gradient, section }| WeightOperands {
                rows: section.len(),
                input: tape.input,
                gradient: *gradient,
            })
            .collect();
        let sections = micro_batches.iter().map(|rows| rows.section);
        let Some(section) = sections.reduce(Section::join) else { return };
        let weight = sums.get(device, WEIGHT, section);
        device.linear_backward_weight(&self.shape(section.len()), &operands, weight);
    }

    fn backward_input<D: Device>(
        &self,
        device: &D,
        parameters: LayerTensors<'_, D>,
        rows: usize,
        _tape: &Tape<'_, D>,
        gradient: D::View<'_>,
        input_gradient: D::ViewMut<'_>,
        previous: Option<FusedActivation<D::View<'_>>>,
    ) {
        match self {
            LinearLayer { outputs: 0, .. } => device.fill(input_gradient, 0.0),
            LinearLayer { inputs: 0, .. } => {}
            _ => {
                let weight = parameters.get(device, WEIGHT);
                device.linear_backward_input(&self.shape(rows), gradient, weight, input_gradient, previous);
            }
        }
    }
}
