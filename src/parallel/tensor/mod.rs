//! Tensor parallelism: every linear layer is divided among the ranks of the tensor axis. Each rank
//! computes a narrower layer; between the layers the ranks [`exchange`] values in the forward pass
//! and gradients in the backward pass. Attention is divided by heads, between two linear layers that are
//! a pair in every [`Split`], and embeddings by tokens. Other layers are replicated: every rank computes
//! all of them. If the last layer is split by outputs and the loss is a cross-entropy, its outputs stay
//! where they are too ([`cross_entropy`]).
//!
//! Invariants: every element of every tensor counts on exactly one of the ranks (the bias of a layer
//! that is split by inputs on the first, whose first leaf of the sum begins with it; the tensors of a
//! replicated layer on the first too), so norms and digests count it once; outside a pair, all ranks
//! hold the same values, bit for bit, which are those of whole layers; widths need not be divisible by
//! the number of ranks.

pub mod cross_entropy;
pub mod division;
pub mod exchange;

use std::ops::Range;

use clap::ValueEnum;

use self::cross_entropy::{ClassShare, FEWEST_DIVIDED};
use self::division::FeatureDivision;
use self::exchange::{Exchange, ExchangeKind};
use crate::device::{Activation, AttentionShape, EmbeddingShape, WeightLayout};
use crate::nn::{
    ActivationLayer, AttentionLayer, EmbeddingLayer, Features, Layer, LayerInputs, LayerKind, LinearLayer,
    Loss, Model, PositionRule, RotaryLayer, SplitRule, TensorShard,
};

/// The way in which linear layers are divided among ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Split {
    /// In pairs, the first by its outputs, the second by its inputs: one sum forward and one
    /// backward per pair
    ///
    /// The values between the two layers stay where they are (Shoeybi et al., "Megatron-LM", 2019,
    /// §3). A layer without a partner is split by its outputs, which are gathered; not those of the
    /// last layer if they are the logits of at least 16 classes.
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
    /// By outputs, which the loss reads where they are.
    Last,
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
        let (pieces, mut tensors) = match (roles[at], &layer.kind) {
            _ if division.num_ranks() == 1 => divider.whole(layer),
            (_, LayerKind::Embedding(embedding)) => divider.by_tokens(layer, embedding),
            (_, LayerKind::Attention(attention)) => {
                let shape = divider.own_groups(attention.shape);
                Divider::without_tensors(LayerKind::Attention(AttentionLayer { shape }))
            }
            (_, LayerKind::Rotary(rotary)) => {
                let shape = divider.own_groups(rotary.shape);
                Divider::without_tensors(LayerKind::Rotary(RotaryLayer { shape, ..rotary.clone() }))
            }
            (Some(role), LayerKind::Linear(linear)) => {
                let is_summed_before = at > 0 && roles[at - 1] == Some(LinearRole::Chained);
                let before = (at > first && !is_summed_before).then_some(ExchangeKind::SumGradient);
                match role {
                    LinearRole::First | LinearRole::Last => divider.by_outputs(layer, linear, before, None),
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
        if layer.is_tied() {
            tensors.iter_mut().for_each(|(_, shard)| shard.is_copy = true);
        }
        LayerPart { number: at, inputs: model.inputs[at], pieces, tensors }
    };
    model.layers.iter().enumerate().map(part).collect()
}

/// Returns the classes whose logits `split` leaves rank `rank`. Not collective.
pub fn split_classes(model: &Model, split: Split, rank: usize, division: FeatureDivision) -> ClassShare {
    let predictions = model.loss.num_predictions(model.output);
    let num = model.output.len() / predictions;
    match roles(model, split).last() {
        Some(Some(LinearRole::Last)) if division.num_ranks() > 1 => {
            ClassShare::of_rank(num, predictions, rank, division)
        }
        _ => ClassShare::whole(num, division),
    }
}

/// Returns the role of each linear layer.
fn roles(model: &Model, split: Split) -> Vec<Option<LinearRole>> {
    let rule = |at: usize| model.layers.get(at).map(Layer::split_rule);
    let is_linear = |at: usize| rule(at) == Some(SplitRule::Features);
    // true if the output of layer `at` goes to the next layer alone, which is linear too
    let feeds_next = |at: usize| {
        let readers = |inputs: &&LayerInputs| inputs.first == at + 1 || inputs.added == Some(at + 1);
        is_linear(at + 1)
            && model.inputs[at + 1] == LayerInputs { first: at + 1, added: None }
            && model.inputs[at].added.is_none()
            && model.inputs.iter().filter(readers).count() == 1
    };
    // true if the loss can read some of the outputs of layer `at`
    let feeds_loss = |at: usize| {
        let num_classes = model.output.len() / model.loss.num_predictions(model.output);
        let is_divided = model.loss == Loss::CrossEntropy && num_classes >= FEWEST_DIVIDED;
        is_divided && at + 1 == model.layers.len() && model.inputs[at].added.is_none()
    };
    let mut roles = vec![None; model.layers.len()];
    for at in (0..roles.len()).filter(|at| is_linear(*at)) {
        let is_after_first = at > 0 && roles[at - 1] == Some(LinearRole::First);
        roles[at] = match split {
            _ if rule(at + 1) == Some(SplitRule::Heads) => Some(LinearRole::First),
            _ if is_after_first || at > 0 && rule(at - 1) == Some(SplitRule::Heads) => {
                Some(LinearRole::Second)
            }
            // of two layers before attention, the second is a pair with that after it
            Split::Pairs if feeds_next(at) && rule(at + 2) != Some(SplitRule::Heads) => {
                Some(LinearRole::First)
            }
            Split::Gather if feeds_next(at) && rule(at + 2) != Some(SplitRule::Heads) => {
                Some(LinearRole::Chained)
            }
            _ if feeds_loss(at) => Some(LinearRole::Last),
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
        let mut tensors: Vec<_> = layer.tensors.clone().map(|tensor| (tensor, whole(tensor))).collect();
        let mut layer = layer.clone();
        if let LayerKind::Linear(linear) = &mut layer.kind {
            let [input_unit, output_unit] = linear.units();
            linear.input_terms = self.division.whole(linear.inputs, input_unit);
            linear.output_terms = self.division.whole(linear.outputs, output_unit);
            let rows = linear.output_rows(0..linear.outputs);
            if linear.layout == WeightLayout::OutputsByInputs {
                tensors.iter_mut().for_each(|(_, shard)| shard.rows.clone_from(&rows));
            }
        }
        if let (PositionRule::Alike, Features::Sequence { len, .. }) = (layer.position_rule(), layer.output())
        {
            layer = layer.of_positions(self.division.positions(len));
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
        let LinearLayer { inputs, outputs, bias, .. } = *linear;
        let [input_unit, output_unit] = linear.units();
        let output_terms = self.division.section(outputs, output_unit, self.rank);
        let own = output_terms.terms();
        let input_terms = self.division.whole(inputs, input_unit);
        let weight = layer.tensors.start;
        let mut tensors = vec![(weight, self.block(weight, linear, 0..inputs, own.clone()))];
        if bias {
            let spec = self.model.tensors[weight + 1].clone();
            let rows = linear.output_rows(own.clone());
            tensors.push((weight + 1, TensorShard { spec, rows, columns: 0..1, is_copy: false }));
        }
        let local = LinearLayer { outputs: own.len(), input_terms, output_terms, ..linear.clone() };
        let before = before.map(|kind| self.exchange(kind, linear, inputs, outputs, output_unit));
        let after = after.map(|kind| self.exchange(kind, linear, outputs, outputs, 1));
        let layer = Piece::Layer(Layer { kind: LayerKind::Linear(local), tensors: 0..tensors.len() });
        (before.into_iter().chain([layer]).chain(after).collect(), tensors)
    }

    fn by_inputs(&self, layer: &Layer, linear: &LinearLayer) -> Divided {
        let LinearLayer { inputs, outputs, activation, bias, .. } = *linear;
        let [input_unit, output_unit] = linear.units();
        let input_terms = self.division.section(inputs, input_unit, self.rank);
        let own = input_terms.terms();
        let output_terms = self.division.whole(outputs, output_unit);
        // the first leaf of the sum begins with the bias
        let bias = bias && self.rank == 0;
        let weight = layer.tensors.start;
        let mut tensors = vec![(weight, self.block(weight, linear, own.clone(), 0..outputs))];
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
        let features = layer.output();
        let mut pieces = vec![
            Piece::Layer(Layer { kind: LayerKind::Linear(local), tensors: 0..tensors.len() }),
            self.exchange(ExchangeKind::SumValues, linear, outputs, inputs, input_unit),
        ];
        if activation != Activation::Identity {
            let kind = LayerKind::Activation(ActivationLayer { activation, features });
            pieces.push(Piece::Layer(Layer { kind, tensors: 0..0 }));
        }
        (pieces, tensors)
    }

    /// Returns the groups of heads of this rank.
    fn own_groups(&self, shape: AttentionShape) -> AttentionShape {
        let (width, unit) = (shape.input_width(), shape.group_width());
        AttentionShape { groups: self.division.section(width, unit, self.rank).len() / unit, ..shape }
    }

    fn without_tensors(kind: LayerKind) -> Divided {
        (vec![Piece::Layer(Layer { kind, tensors: 0..0 })], Vec::new())
    }

    /// Returns the rows of this rank's tokens. The sum over the ranks has one term that is not 0.
    fn by_tokens(&self, layer: &Layer, embedding: &EmbeddingLayer) -> Divided {
        let own = self.division.columns(embedding.vocabulary, self.rank);
        let spec = self.model.tensors[layer.tensors.start].clone();
        let columns = 0..embedding.shape.columns;
        let shard = TensorShard { spec, rows: vec![own.clone(); 1], columns, is_copy: false };
        let shape = EmbeddingShape { first: own.start, rows: own.len(), ..embedding.shape };
        let local = EmbeddingLayer { shape, ..embedding.clone() };
        let exchange = Exchange {
            kind: ExchangeKind::SumValues,
            positions: embedding.positions,
            width: embedding.shape.columns,
            num_leaves: self.division.num_ranks(),
            num_sums: 1,
            num_own_sums: 1,
        };
        let piece = Piece::Layer(Layer { kind: LayerKind::Embedding(local), tensors: 0..1 });
        (vec![piece, Piece::Exchange(exchange)], vec![(layer.tensors.start, shard); 1])
    }

    /// Returns the exchange of `width` columns beside `linear`, whose sums are over `terms` features in
    /// units of `unit`.
    fn exchange(
        &self,
        kind: ExchangeKind,
        linear: &LinearLayer,
        width: usize,
        terms: usize,
        unit: usize,
    ) -> Piece {
        let num_leaves = self.division.num_leaves(terms, unit);
        Piece::Exchange(Exchange {
            kind,
            positions: linear.positions(),
            width,
            num_leaves,
            num_sums: self.division.num_sums(num_leaves),
            num_own_sums: self.division.num_own_sums(num_leaves, self.rank),
        })
    }

    /// Returns the block of a weight for a range of its inputs and one of its outputs.
    fn block(
        &self,
        weight: usize,
        linear: &LinearLayer,
        inputs: Range<usize>,
        outputs: Range<usize>,
    ) -> TensorShard {
        let (rows, columns) = match linear.layout {
            WeightLayout::OutputsByInputs => (linear.output_rows(outputs), inputs),
            WeightLayout::InputsByOutputs => (vec![inputs; 1], outputs),
        };
        TensorShard { spec: self.model.tensors[weight].clone(), rows, columns, is_copy: false }
    }
}
