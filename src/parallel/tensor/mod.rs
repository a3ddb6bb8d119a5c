//! Tensor parallelism: every linear layer is divided among the ranks of the tensor axis. Each rank
//! computes a narrower layer; between the layers the ranks [`exchange`] values in the forward pass
//! and gradients in the backward pass. Other layers are replicated: every rank computes all of them.
//!
//! Invariants: every element of every tensor counts on exactly one of the ranks (the bias of a layer
//! that is split by inputs on the first, whose first leaf of the sum begins with it; the tensors of a
//! replicated layer on the first too), so norms and digests count it once; outside a pair, all ranks
//! hold the same values, bit for bit, which are those of whole layers; widths need not be divisible by
//! the number of ranks.

pub mod division;
pub mod exchange;

use std::ops::Range;

use clap::ValueEnum;

use self::division::FeatureDivision;
use self::exchange::{Exchange, ExchangeKind};
use crate::device::{Activation, WeightLayout};
use crate::nn::{
    ActivationLayer, Features, Layer, LayerInputs, LayerKind, LinearLayer, Model, SplitRule, TensorShard,
};

/// The way in which linear layers are divided among ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Split {
    /// In pairs, the first by its outputs, the second by its inputs: one sum forward and one
    /// backward per pair
    ///
    /// The values between the two layers stay where they are (Shoeybi et al., "Megatron-LM", 2019,
    /// §3). A layer without a partner is split by its outputs, which are gathered.
    #[value(name = "pairs")]
    Pairs,
    /// Each by its outputs: values are gathered after each layer, gradients scattered before it
    #[value(name = "gather")]
    Gather,
}

/// One operation of a pass on a rank.
#[derive(Debug, Clone)]
pub enum Piece {
    /// A layer, or a shard of one.
    Layer(Layer),
    /// An exchange with the other ranks of the tensor axis.
    Exchange(Exchange),
}

/// A rank's shard of one layer of the model.
#[derive(Debug, Clone)]
pub struct LayerPart {
    /// The number of the layer in the model.
    pub number: usize,
    /// The values that the layer reads.
    pub inputs: LayerInputs,
    /// The operations, in order, of which the first reads the layer's input. A layer among them numbers
    /// its tensors from 0.
    pub pieces: Vec<Piece>,
    /// The tensors of the shard, each with its number in the model.
    pub tensors: Vec<(usize, TensorShard)>,
}

/// The part of a linear layer in the division of the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LinearRole {
    /// By outputs, which stay where they are, for the layer after it is split by inputs.
    First,
    /// By inputs.
    Second,
    /// By outputs, which are gathered.
    Single,
    /// By outputs, which are gathered for a layer that is split by outputs too. The gradients of its
    /// inputs are summed in the exchange that gathers them.
    Chained,
}

/// Returns the shard of each layer of `model` for rank `rank` of the tensor axis, among whose ranks
/// `division` divides features. Not collective.
pub fn split(model: &Model, split: Split, rank: usize, division: FeatureDivision) -> Vec<LayerPart> {
    let divider = Divider { model, rank, division };
    let roles = roles(model, split);
    let with_tensors = |layer: &Layer| !layer.tensors.is_empty();
    let first = model.layers.iter().position(with_tensors).unwrap_or(model.layers.len());
    let part = |(at, layer): (usize, &Layer)| {
        let (pieces, tensors) = match (roles[at], &layer.kind) {
            (Some(role), LayerKind::Linear(linear)) if division.num_ranks() > 1 => {
                let is_summed_before = at > 0 && roles[at - 1] == Some(LinearRole::Chained);
                let before = (at > first && !is_summed_before).then_some(ExchangeKind::SumGradient);
                match role {
                    LinearRole::First => divider.by_outputs(layer, linear, before, None),
                    LinearRole::Second => divider.by_inputs(layer, linear),
                    LinearRole::Single => {
                        divider.by_outputs(layer, linear, before, Some(ExchangeKind::GatherOutput))
                    }
                    LinearRole::Chained => {
                        divider.by_outputs(layer, linear, before, Some(ExchangeKind::Gather))
                    }
                }
            }
            _ => divider.whole(layer),
        };
        LayerPart { number: at, inputs: model.inputs[at], pieces, tensors }
    };
    model.layers.iter().enumerate().map(part).collect()
}

/// Returns the role of each layer that ranks share.
fn roles(model: &Model, split: Split) -> Vec<Option<LinearRole>> {
    let is_linear =
        |at: usize| model.layers.get(at).is_some_and(|layer| layer.split_rule() == SplitRule::Features);
    // true if the output of layer `at` goes to the next layer alone, which is linear too
    let feeds_next = |at: usize| {
        let readers = |inputs: &&LayerInputs| inputs.first == at + 1 || inputs.added == Some(at + 1);
        is_linear(at + 1)
            && model.inputs[at + 1] == LayerInputs { first: at + 1, added: None }
            && model.inputs[at].added.is_none()
            && model.inputs.iter().filter(readers).count() == 1
    };
    let mut roles = vec![None; model.layers.len()];
    for at in (0..roles.len()).filter(|at| is_linear(*at)) {
        roles[at] = match split {
            _ if at > 0 && roles[at - 1] == Some(LinearRole::First) => Some(LinearRole::Second),
            Split::Pairs if feeds_next(at) => Some(LinearRole::First),
            Split::Gather if feeds_next(at) => Some(LinearRole::Chained),
            _ => Some(LinearRole::Single),
        };
    }
    roles
}

/// The operations of a layer on a rank, and its tensors.
type Divided = (Vec<Piece>, Vec<(usize, TensorShard)>);

struct Divider<'m> {
    model: &'m Model,
    rank: usize,
    division: FeatureDivision,
}

impl Divider<'_> {
    /// Returns all of a layer. Every rank has it, and the first rank's tensors count.
    fn whole(&self, layer: &Layer) -> Divided {
        let is_copy = self.rank > 0;
        let whole = |tensor| TensorShard { is_copy, ..TensorShard::whole(&self.model.tensors[tensor]) };
        let tensors = layer.tensors.clone().map(|tensor| (tensor, whole(tensor))).collect();
        let mut layer = layer.clone();
        if let LayerKind::Linear(linear) = &mut layer.kind {
            linear.input_terms = self.division.whole(linear.inputs);
            linear.output_terms = self.division.whole(linear.outputs);
        }
        (vec![Piece::Layer(layer.with_tensors_from(0))], tensors)
    }

    fn by_outputs(
        &self,
        layer: &Layer,
        linear: &LinearLayer,
        before: Option<ExchangeKind>,
        after: Option<ExchangeKind>,
    ) -> Divided {
        let LinearLayer { inputs, outputs, layout, bias, .. } = *linear;
        let output_terms = self.division.section(outputs, self.rank);
        let own = output_terms.terms();
        let input_terms = self.division.whole(inputs);
        let weight = layer.tensors.start;
        let mut tensors = vec![(weight, self.block(weight, layout, 0..inputs, own.clone()))];
        if bias {
            let spec = self.model.tensors[weight + 1].clone();
            let shard = TensorShard { spec, rows: own.clone(), columns: 0..1, is_copy: false };
            tensors.push((weight + 1, shard));
        }
        let local = LinearLayer { outputs: own.len(), input_terms, output_terms, ..linear.clone() };
        let before = before.map(|kind| self.exchange(kind, inputs));
        let after = after.map(|kind| self.exchange(kind, outputs));
        let layer = Piece::Layer(Layer { kind: LayerKind::Linear(local), tensors: 0..tensors.len() });
        (before.into_iter().chain([layer]).chain(after).collect(), tensors)
    }

    fn by_inputs(&self, layer: &Layer, linear: &LinearLayer) -> Divided {
        let LinearLayer { inputs, outputs, layout, activation, bias, .. } = *linear;
        let input_terms = self.division.section(inputs, self.rank);
        let own = input_terms.terms();
        let output_terms = self.division.whole(outputs);
        // the first leaf of the sum begins with the bias
        let bias = bias && self.rank == 0;
        let weight = layer.tensors.start;
        let mut tensors = vec![(weight, self.block(weight, layout, own.clone(), 0..outputs))];
        if bias {
            tensors.push((weight + 1, TensorShard::whole(&self.model.tensors[weight + 1])));
        }
        let local = LinearLayer {
            inputs: own.len(),
            input_terms,
            output_terms,
            bias,
            activation: Activation::Identity,
            ..linear.clone()
        };
        let mut pieces = vec![
            Piece::Layer(Layer { kind: LayerKind::Linear(local), tensors: 0..tensors.len() }),
            self.exchange(ExchangeKind::SumValues, outputs),
        ];
        if activation != Activation::Identity {
            let kind =
                LayerKind::Activation(ActivationLayer { activation, features: Features::Flat(outputs) });
            pieces.push(Piece::Layer(Layer { kind, tensors: 0..0 }));
        }
        (pieces, tensors)
    }

    fn exchange(&self, kind: ExchangeKind, width: usize) -> Piece {
        let num_sums = self.division.num_sums();
        Piece::Exchange(Exchange {
            kind,
            width,
            num_sums,
            num_own_sums: self.division.num_own_sums(self.rank),
        })
    }

    /// Returns the block of a weight for a range of its inputs and one of its outputs.
    fn block(
        &self,
        weight: usize,
        layout: WeightLayout,
        inputs: Range<usize>,
        outputs: Range<usize>,
    ) -> TensorShard {
        let (rows, columns) = match layout {
            WeightLayout::OutputsByInputs => (outputs, inputs),
            WeightLayout::InputsByOutputs => (inputs, outputs),
        };
        TensorShard { spec: self.model.tensors[weight].clone(), rows, columns, is_copy: false }
    }
}
