//! The layers that a device runs. Each stands for one or several modules of a network, fused as the
//! device's operations are. A file holds one kind of layer; [`LayerPasses`] is the contract of all.

mod activation;
mod add;
mod attention;
mod convolution;
mod dropout;
mod embedding;
mod flatten;
mod gated;
mod linear;
mod norm;
mod passes;
mod pool;
mod positions;
mod rotary;
mod scale;

use std::ops::Range;

pub use activation::ActivationLayer;
pub use add::AddLayer;
pub use attention::AttentionLayer;
pub use convolution::ConvolutionLayer;
pub use dropout::DropoutLayer;
pub use embedding::EmbeddingLayer;
pub use flatten::FlattenLayer;
pub use gated::GatedLayer;
pub use linear::{Heads, LinearLayer};
pub use norm::{Norm, NormLayer};
pub use passes::{
    Draws, LayerPasses, LayerSums, LayerTensors, NextPositions, PositionRule, SplitRule, Tape, TapedRows,
    WeightAndBias,
};
pub use pool::{PoolLayer, Pooling};
pub use positions::PositionsLayer;
pub use rotary::RotaryLayer;
pub use scale::ScaleLayer;

use super::parameters::FlatBuffer;
use super::tensor::product;
use super::{Features, Initial, TensorSpec};
use crate::device::{Activation, Device, Role};
use crate::sums::Section;

/// A layer with its tensors.
#[derive(Debug, Clone)]
pub struct Layer {
    /// The kind of the layer, with its sizes.
    pub kind: LayerKind,
    /// The numbers of its tensors, among those of the model or of a rank's stages: a weight, then perhaps a
    /// bias.
    pub tensors: Range<usize>,
}

/// The kind of a layer.
#[derive(Debug, Clone)]
pub enum LayerKind {
    /// A linear layer and the activation that follows it.
    Linear(LinearLayer),
    /// A convolution and the pooling, ReLU and conversion to features that follow it.
    Convolution(ConvolutionLayer),
    /// Pooling on its own.
    Pool(PoolLayer),
    /// An activation on its own.
    Activation(ActivationLayer),
    /// The conversion of an image to a vector of features.
    Flatten(FlattenLayer),
    /// A normalisation.
    Norm(NormLayer),
    /// Learnt scales.
    Scale(ScaleLayer),
    /// A gated linear unit.
    Gated(GatedLayer),
    /// Dropout.
    Dropout(DropoutLayer),
    /// The sum of two values.
    Add(AddLayer),
    /// The embedding of tokens.
    Embedding(EmbeddingLayer),
    /// Learnt positions.
    Positions(PositionsLayer),
    /// Rotary positions, before attention.
    Rotary(RotaryLayer),
    /// Attention, without the linear layers before and after it.
    Attention(AttentionLayer),
}

/// The values that a layer of a model reads. Value 0 is the model's input, value i + 1 the output of
/// layer i.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerInputs {
    /// The layer's input.
    pub first: usize,
    /// The value that is added to the layer's output, before its activation.
    pub added: Option<usize>,
}

impl LayerInputs {
    /// Returns the earlier of the values.
    pub fn earliest(&self) -> usize {
        self.added.map_or(self.first, |added| added.min(self.first))
    }
}

/// Evaluates `$work` with `$kind` bound to the layer of whichever kind `$layer` is.
macro_rules! each_kind {
    ($layer:expr, $kind:ident => $work:expr) => {
        each_kind!($layer, _make($kind) => $work)
    };
    ($layer:expr, $make:ident($kind:ident) => $work:expr) => {
        each_kind!(
            $layer, $make, $kind, $work, Linear, Convolution, Pool, Activation, Flatten, Norm, Scale, Gated,
            Dropout, Add, Embedding, Positions, Rotary, Attention
        )
    };
    ($layer:expr, $make:ident, $kind:ident, $work:expr, $($variant:ident),*) => {
        match &$layer.kind {
            $(LayerKind::$variant($kind) => {
                let $make = LayerKind::$variant;
                $work
            })*
        }
    };
}

impl Layer {
    /// Returns the kind of the layer and the activation that ends it, in words.
    pub fn words(&self) -> String {
        let (name, activation) = each_kind!(self, kind => (kind.name(), kind.activation()));
        match activation {
            Activation::Identity => name.to_owned(),
            activation => format!("{name}, {activation:?}").to_lowercase(),
        }
    }

    /// Returns the number of input values per row.
    pub fn input_len(&self) -> usize {
        each_kind!(self, kind => kind.input_len())
    }

    /// Returns the role of the layer's input.
    pub fn input_role(&self) -> Role {
        each_kind!(self, kind => kind.input_role())
    }

    /// Returns true if the layer uses the weight of an earlier one.
    pub fn is_tied(&self) -> bool {
        matches!(&self.kind, LayerKind::Linear(linear) if linear.is_tied)
    }

    /// Returns the activation that ends the layer, if a loss may take its gradient through it:
    /// [`Tape::is_through_activation`].
    pub fn activation_for_loss(&self) -> Option<Activation> {
        let activation = match &self.kind {
            LayerKind::Linear(linear) => linear.activation,
            LayerKind::Activation(alone) => alone.activation,
            _ => return None,
        };
        (activation != Activation::Identity).then_some(activation)
    }

    /// Returns the shape of one row of output.
    pub fn output(&self) -> Features {
        each_kind!(self, kind => kind.output())
    }

    /// Returns the number of output values per row.
    pub fn output_len(&self) -> usize {
        self.output().len()
    }

    /// Returns the number of values per row that the forward pass saves for the backward pass
    /// besides its output.
    pub fn saved_len(&self) -> usize {
        each_kind!(self, kind => kind.saved_len())
    }

    /// Returns the approximate number of multiplications and additions of one row's forward pass.
    /// Computing the gradients of the weights takes as many again, and so does computing the
    /// gradients of the inputs.
    pub fn operations(&self) -> usize {
        each_kind!(self, kind => kind.operations())
    }

    /// Returns true for a layer whose backward pass turns the gradient of its output into the
    /// gradient of its input in place.
    pub fn is_elementwise(&self) -> bool {
        each_kind!(self, kind => kind.is_elementwise())
    }

    /// Returns true if [`Layer::backward_activation`] changes the gradient.
    pub fn changes_gradient(&self) -> bool {
        each_kind!(self, kind => kind.changes_gradient())
    }

    /// Returns the way in which ranks share the layer.
    pub fn split_rule(&self) -> SplitRule {
        each_kind!(self, kind => kind.split_rule())
    }

    /// Returns what the layer does with some of the positions of a sequence.
    pub fn position_rule(&self) -> PositionRule {
        each_kind!(self, kind => kind.position_rule())
    }

    /// Returns the layer for the positions `own` of a sequence: see [`LayerPasses::of_positions`].
    pub fn of_positions(&self, own: Section) -> Layer {
        let kind = each_kind!(self, make(kind) => make(kind.of_positions(own)));
        Layer { kind, tensors: self.tensors.clone() }
    }

    /// Returns true if there is nothing to compute, because the layer has none of the positions of a
    /// sequence.
    pub fn is_idle(&self) -> bool {
        self.position_rule() != PositionRule::Mixed && self.input_len() == 0
    }

    /// Returns this layer with its tensors numbered from `first` on.
    pub fn with_tensors_from(self, first: usize) -> Layer {
        Layer { tensors: first..first + self.tensors.len(), ..self }
    }

    /// Runs the forward pass for `rows ≥ 1` rows; without `draws` it is an evaluation.
    /// `input` is `[rows, input_len]`, `saved` `[rows, saved_len]`, `output` `[rows, output_len]`.
    #[allow(clippy::too_many_arguments)] // one argument for each array of the formula
    pub fn forward<D: Device>(
        &self,
        device: &D,
        parameters: &FlatBuffer<D>,
        draws: Option<Draws>,
        rows: usize,
        input: D::View<'_>,
        saved: D::ViewMut<'_>,
        output: D::ViewMut<'_>,
    ) {
        let tensors = LayerTensors { draws, flat: parameters, own: &self.tensors };
        each_kind!(self, kind => kind.forward(device, tensors, rows, input, saved, output));
    }

    /// Runs the forward pass of a layer to whose output another value is added: see
    /// [`LayerPasses::forward_added`].
    pub fn forward_added<D: Device>(
        &self,
        device: &D,
        parameters: &FlatBuffer<D>,
        rows: usize,
        inputs: [D::View<'_>; 2],
        saved: D::ViewMut<'_>,
        output: D::ViewMut<'_>,
    ) {
        let tensors = LayerTensors { draws: None, flat: parameters, own: &self.tensors };
        each_kind!(self, kind => kind.forward_added(device, tensors, rows, inputs, saved, output));
    }

    /// Returns true if a sequence can be continued by [`Layer::forward_next`].
    pub fn continues(&self) -> bool {
        each_kind!(self, kind => kind.continues())
    }

    /// Runs the forward pass for the next positions of one sequence: see [`LayerPasses::forward_next`].
    pub fn forward_next<D: Device>(
        &self,
        device: &D,
        parameters: &FlatBuffer<D>,
        next: NextPositions<'_, D>,
    ) {
        let tensors = LayerTensors { draws: None, flat: parameters, own: &self.tensors };
        each_kind!(self, kind => kind.forward_next(device, tensors, next));
    }

    /// Runs the first part of the backward pass: turns `gradient`, the gradient of the output, into
    /// what the other two parts read, the gradient of the values before the activation, and adds up
    /// that of a bias in `sums`, unless the second part does.
    pub fn backward_activation<D: Device>(
        &self,
        device: &D,
        tape: &Tape<'_, D>,
        gradient: D::ViewMut<'_>,
        sums: Option<(&mut FlatBuffer<D>, Section)>,
    ) {
        let sums = sums.map(|(flat, section)| (LayerSums { flat, own: &self.tensors }, section));
        each_kind!(self, kind => kind.backward_activation(device, tape, gradient, sums));
    }

    /// Adds up the gradient of a bias, if [`Layer::backward_activation`] would have, from the gradient that
    /// it left, over the rows `section`. For schedules that form gradients of parameters later.
    pub fn add_bias_gradient<D: Device>(
        &self,
        device: &D,
        tape: &Tape<'_, D>,
        gradient: D::ViewMut<'_>,
        flat: &mut FlatBuffer<D>,
        section: Section,
    ) {
        let sums = LayerSums { flat, own: &self.tensors };
        each_kind!(self, kind => kind.add_bias_gradient(device, tape, gradient, sums, section));
    }

    /// Runs the second part of the backward pass: adds up the gradient of the weight, if the layer has
    /// one, and of a bias that the first part leaves to it, over the rows of consecutive micro-batches.
    pub fn backward_weight<D: Device>(
        &self,
        device: &D,
        micro_batches: &[TapedRows<'_, D>],
        gradients: &mut FlatBuffer<D>,
    ) {
        let sums = LayerSums { flat: gradients, own: &self.tensors };
        each_kind!(self, kind => kind.backward_weight(device, micro_batches, sums));
    }

    /// Returns the number of values of a row from which the gradients of the parameters are added up: see
    /// [`LayerPasses::position_sums_len`].
    pub fn position_sums_len(&self) -> usize {
        each_kind!(self, kind => kind.position_sums_len())
    }

    /// Writes what the layer's positions add to the gradients of its parameters: see
    /// [`LayerPasses::sum_positions`].
    pub fn sum_positions<D: Device>(&self, device: &D, rows: &TapedRows<'_, D>, sums: D::ViewMut<'_>) {
        each_kind!(self, kind => kind.sum_positions(device, rows, sums));
    }

    /// Adds up the gradients of the parameters: see [`LayerPasses::add_position_sums`].
    pub fn add_position_sums<D: Device>(
        &self,
        device: &D,
        rows: &TapedRows<'_, D>,
        position_sums: &mut D::Buffer,
        gradients: &mut FlatBuffer<D>,
    ) {
        let sums = LayerSums { flat: gradients, own: &self.tensors };
        each_kind!(self, kind => kind.add_position_sums(device, rows, position_sums, sums));
    }

    /// Runs the third part of the backward pass, which is independent of the second: computes the
    /// gradient of the input. Must not be called on [elementwise](Layer::is_elementwise) layers. `gradient`
    /// is `[rows, output_len]`, `input_gradient` `[rows, input_len]`.
    pub fn backward_input<D: Device>(
        &self,
        device: &D,
        parameters: &FlatBuffer<D>,
        rows: usize,
        tape: &Tape<'_, D>,
        gradient: D::View<'_>,
        input_gradient: D::ViewMut<'_>,
    ) {
        let tensors = LayerTensors { draws: tape.draws, flat: parameters, own: &self.tensors };
        each_kind!(self, kind => {
            kind.backward_input(device, tensors, rows, tape, gradient, input_gradient)
        });
    }

    /// Returns true if [`Layer::backward_fused`] runs the whole backward pass of `rows` rows on the device.
    pub fn fuses_backward<D: Device>(&self, device: &D, rows: usize) -> bool {
        each_kind!(self, kind => kind.fuses_backward(device, rows))
    }

    /// Runs all parts of the backward pass, with the same bits: see [`LayerPasses::backward_fused`]. Only for
    /// layers of which [`Layer::fuses_backward`] is true.
    pub fn backward_fused<D: Device>(
        &self,
        device: &D,
        parameters: &FlatBuffer<D>,
        rows: &TapedRows<'_, D>,
        position_sums: Option<&mut D::Buffer>,
        gradients: &mut FlatBuffer<D>,
        input_gradient: D::ViewMut<'_>,
    ) {
        let tensors = LayerTensors { draws: rows.tape.draws, flat: parameters, own: &self.tensors };
        let sums = LayerSums { flat: gradients, own: &self.tensors };
        each_kind!(self, kind => {
            kind.backward_fused(device, tensors, rows, position_sums, sums, input_gradient)
        });
    }
}

/// Returns the tensors of a convolution or linear layer called `name`, with PyTorch's default
/// initial values.
pub(super) fn torch_tensors(name: &str, shape: Vec<usize>, bias: bool) -> Vec<TensorSpec> {
    let initial = Initial::torch_default(product(&shape[1..]));
    let outputs = shape[0];
    let mut tensors = vec![TensorSpec { name: format!("{name}.weight"), shape, initial }];
    if bias {
        tensors.push(TensorSpec { name: format!("{name}.bias"), shape: vec![outputs], initial });
    }
    tensors
}
