//! Linear layers.

use std::ops::Range;

use smallvec::SmallVec;

use super::passes::{LayerPasses, LayerSums, LayerTensors, SplitRule, Tape, TapedRows};
use crate::device::{
    Activation, AttentionShape, BiasShape, Device, LinearShape, LinearTape, WeightLayout, WeightOperands,
};
use crate::nn::Features;
use crate::sums::Section;

/// A linear layer and the activation that follows it, applied to each position of a row. A rank's shard
/// of one may have no inputs, so that its contribution to a sum is 0, or no outputs.
#[derive(Debug, Clone)]
pub struct LinearLayer {
    /// The number of positions in a row, if it is a sequence.
    pub sequence: Option<usize>,
    /// Input features of a position.
    pub inputs: usize,
    /// Output features of a position.
    pub outputs: usize,
    /// The attention that the layer is before or after, if it is.
    pub heads: Option<Box<Heads>>,
    /// True if the weight is that of an earlier layer, an embedding.
    pub is_tied: bool,
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

/// The attention beside a linear layer.
#[derive(Debug, Clone, Copy)]
pub enum Heads {
    /// Reads the outputs. A group of heads has its queries, keys and values beside each other, so that
    /// groups are the terms of sums that ranks share; in the weight, as in PyTorch's, all queries come
    /// first, then all keys, then all values.
    After(AttentionShape),
    /// Gives the inputs.
    Before(AttentionShape),
}

/// The numbers of the tensors.
const WEIGHT: usize = 0;
const BIAS: usize = 1;

impl LinearLayer {
    /// Returns the number of positions in a row.
    pub fn positions(&self) -> usize {
        self.sequence.unwrap_or(1)
    }

    /// Returns the numbers of consecutive inputs and outputs that no division cuts.
    pub fn units(&self) -> [usize; 2] {
        match self.heads.as_deref() {
            Some(Heads::Before(shape)) => [shape.heads * shape.width, 1],
            Some(Heads::After(shape)) => [1, shape.group_width()],
            None => [1, 1],
        }
    }

    /// Returns the rows of the weight for some outputs of the whole layer, in the order of the outputs;
    /// with attention after the layer, these are whole groups.
    pub fn output_rows(&self, outputs: Range<usize>) -> Vec<Range<usize>> {
        let Some(Heads::After(shape)) = self.heads.as_deref() else { return vec![outputs; 1] };
        let AttentionShape { groups, heads, width, .. } = *shape;
        let of_group = |group: usize| {
            let [queries, keys] = [groups * heads * width, groups * (heads + 1) * width];
            let one = |start: usize| start + group * width..start + (group + 1) * width;
            [group * heads * width..(group + 1) * heads * width, one(queries), one(keys)]
        };
        let unit = shape.group_width();
        (outputs.start / unit..outputs.end / unit).flat_map(of_group).collect()
    }

    fn shape(&self, rows: usize) -> LinearShape {
        let LinearLayer { inputs, outputs, layout, input_terms, output_terms, .. } = *self;
        LinearShape { rows: rows * self.positions(), inputs, outputs, layout, input_terms, output_terms }
    }

    /// Takes a gradient through `activation`, and adds up that of the bias, if there is one, in `sums`.
    fn through_activation<D: Device>(
        &self,
        device: &D,
        activation: Activation,
        tape: &Tape<'_, D>,
        gradient: D::ViewMut<'_>,
        sums: Option<(LayerSums<'_, D>, Section)>,
    ) {
        let mut sums = sums.filter(|_| self.bias);
        if self.outputs == 0 || activation == Activation::Identity && sums.is_none() {
            return;
        }
        // positions are terms of the sum: within a sample, its order would depend on the number of columns
        let shape = BiasShape { columns: self.outputs, positions: 1 };
        let positions = self.positions();
        let bias = sums.as_mut().map(|(sums, section)| sums.get(device, BIAS, section.times(positions)));
        device.activation_backward(activation, shape, tape.of_activation(activation), gradient, bias);
    }
}

impl LayerPasses for LinearLayer {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn input_len(&self) -> usize {
        self.positions() * self.inputs
    }

    fn output(&self) -> Features {
        match self.sequence {
            Some(len) => Features::Sequence { len, width: self.outputs },
            None => Features::Flat(self.outputs),
        }
    }

    fn saved_len(&self) -> usize {
        if self.activation.saves() { self.positions() * self.outputs } else { 0 }
    }

    fn operations(&self) -> usize {
        2 * self.positions() * self.inputs * self.outputs
    }

    fn activation(&self) -> Activation {
        self.activation
    }

    fn split_rule(&self) -> SplitRule {
        SplitRule::Features
    }

    fn continues(&self) -> bool {
        true
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
    ) {
        self.through_activation(device, tape.remaining(self.activation), tape, gradient, sums);
    }

    fn add_bias_gradient<D: Device>(
        &self,
        device: &D,
        tape: &Tape<'_, D>,
        gradient: D::ViewMut<'_>,
        sums: LayerSums<'_, D>,
        section: Section,
    ) {
        self.through_activation(device, Activation::Identity, tape, gradient, Some((sums, section)));
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
                rows: section.len() * self.positions(),
                input: tape.input,
                gradient: *gradient,
            })
            .collect();
        let sections = micro_batches.iter().map(|rows| rows.section);
        let Some(section) = sections.reduce(Section::join) else { return };
        let weight = sums.get(device, WEIGHT, section.times(self.positions()));
        device.linear_backward_weight(&self.shape(section.len()), &operands, weight);
    }

    fn fuses_backward<D: Device>(&self, device: &D, rows: usize) -> bool {
        self.inputs > 0 && self.outputs > 0 && device.fuses_linear_backward(&self.shape(rows))
    }

    fn backward_fused<D: Device>(
        &self,
        device: &D,
        parameters: LayerTensors<'_, D>,
        rows: &TapedRows<'_, D>,
        _position_sums: Option<&mut D::Buffer>,
        mut sums: LayerSums<'_, D>,
        input_gradient: D::ViewMut<'_>,
    ) {
        let TapedRows { tape, gradient, section } = rows;
        let activation = tape.remaining(self.activation);
        let saved = tape.of_activation(activation);
        let linear = LinearTape { input: tape.input, activation, saved, gradient: *gradient };
        let sums = sums.of_weight_and_bias(device, self.bias, section.times(self.positions()));
        let weight = parameters.get(device, WEIGHT);
        device.linear_backward(&self.shape(section.len()), &linear, weight, sums, input_gradient);
    }

    fn backward_input<D: Device>(
        &self,
        device: &D,
        parameters: LayerTensors<'_, D>,
        rows: usize,
        _tape: &Tape<'_, D>,
        gradient: D::View<'_>,
        input_gradient: D::ViewMut<'_>,
    ) {
        match self {
            LinearLayer { outputs: 0, .. } => device.fill(input_gradient, 0.0),
            LinearLayer { inputs: 0, .. } => {}
            _ => {
                let weight = parameters.get(device, WEIGHT);
                device.linear_backward_input(&self.shape(rows), gradient, weight, input_gradient);
            }
        }
    }
}
