//! Tensor parallelism: every linear layer is divided among the ranks of the tensor axis. Each rank
//! computes a narrower layer; between the layers the ranks [`exchange`] values in the forward pass
//! and gradients in the backward pass.
//!
//! Invariants: every element of every tensor lies on exactly one of the ranks (the bias of a layer
//! that is split by inputs on the first, whose first leaf of the sum begins with it), so norms and
//! digests count it once; outside a pair, all ranks hold the same values, bit for bit, which are those
//! of whole layers; widths need not be divisible by the number of ranks.

pub mod division;
pub mod exchange;

use std::ops::Range;

use clap::ValueEnum;

use self::division::FeatureDivision;
use self::exchange::{Exchange, ExchangeKind};
use crate::device::{Activation, WeightLayout};
use crate::nn::{ActivationLayer, Features, Layer, LayerKind, LinearLayer, Model, TensorShard};
use crate::{Error, Result};

/// The way in which linear layers are divided among ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Split {
    /// In pairs, the first by its outputs, the second by its inputs: one sum forward and one
    /// backward per pair
    ///
    /// The values between the two layers stay where they are (Shoeybi et al., "Megatron-LM", 2019,
    /// §3). A last layer without a partner is split by its outputs.
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
#[derive(Debug, Clone, Default)]
pub struct LayerPart {
    /// The number of the layer in the model.
    pub number: usize,
    /// The operations, in order. A layer among them numbers its tensors from 0.
    pub pieces: Vec<Piece>,
    /// The tensors of the shard, each with its number in the model.
    pub tensors: Vec<(usize, TensorShard)>,
}

/// Returns the shard of each layer of `model` for rank `rank` of the tensor axis, among whose ranks
/// `division` divides features. Not collective.
///
/// # Errors
/// With several ranks, a layer that has parameters is not linear.
pub fn split(model: &Model, split: Split, rank: usize, division: FeatureDivision) -> Result<Vec<LayerPart>> {
    let size = division.num_ranks();
    let divided: Vec<usize> =
        (0..model.layers.len()).filter(|&at| !model.layers[at].tensors.is_empty()).collect();
    let is_linear = |at: &usize| matches!(model.layers[*at].kind, LayerKind::Linear(_));
    let has_leaves = divided.iter().all(is_linear);
    let divider = Divider { model, rank, division, has_leaves };
    let mut parts = Vec::new();
    for (at, layer) in model.layers.iter().enumerate() {
        let number = divided.iter().position(|index| *index == at);
        let part = match (number, &layer.kind) {
            _ if size == 1 => divider.whole(layer),
            (None, LayerKind::Flatten(_)) if at < divided.first().copied().unwrap_or_default() => {
                divider.whole(layer)
            }
            (Some(number), LayerKind::Linear(linear)) => {
                let last = number + 1 == divided.len();
                match split {
                    Split::Gather if last => {
                        divider.by_outputs(layer, linear, None, Some(ExchangeKind::GatherOutput))
                    }
                    Split::Gather => divider.by_outputs(layer, linear, None, Some(ExchangeKind::Gather)),
                    Split::Pairs => {
                        let before = (number > 0).then_some(ExchangeKind::SumGradient);
                        match (number % 2, last) {
                            (0, false) => divider.by_outputs(layer, linear, before, None),
                            (0, true) => {
                                divider.by_outputs(layer, linear, before, Some(ExchangeKind::GatherOutput))
                            }
                            _ => divider.by_inputs(layer, linear),
                        }
                    }
                }
            }
            _ => {
                let why = format!(
                    "{} has layers that are not linear; only linear layers can be shared",
                    model.name
                );
                let way_out = "use --model mlp or deep-mlp, or another strategy";
                return Err(Error::input("splitting the model", format!("{why}: {way_out}")));
            }
        };
        parts.push(LayerPart { number: at, ..part });
    }
    Ok(parts)
}

struct Divider<'m> {
    model: &'m Model,
    rank: usize,
    division: FeatureDivision,
    /// True if tensor parallelism can divide the model, so that sums over features have leaves.
    has_leaves: bool,
}

impl Divider<'_> {
    fn whole(&self, layer: &Layer) -> LayerPart {
        let tensors =
            layer.tensors.clone().map(|tensor| (tensor, TensorShard::whole(&self.model.tensors[tensor])));
        let mut layer = layer.clone();
        if let (LayerKind::Linear(linear), true) = (&mut layer.kind, self.has_leaves) {
            linear.input_terms = self.division.whole(linear.inputs);
            linear.output_terms = self.division.whole(linear.outputs);
        }
        let pieces = vec![Piece::Layer(layer.with_tensors_from(0))];
        LayerPart { number: 0, pieces, tensors: tensors.collect() }
    }

    fn by_outputs(
        &self,
        layer: &Layer,
        linear: &LinearLayer,
        before: Option<ExchangeKind>,
        after: Option<ExchangeKind>,
    ) -> LayerPart {
        let LinearLayer { inputs, outputs, layout, bias, .. } = *linear;
        let output_terms = self.division.section(outputs, self.rank);
        let own = output_terms.terms();
        let input_terms = self.division.whole(inputs);
        let weight = layer.tensors.start;
        let mut tensors = vec![(weight, self.block(weight, layout, 0..inputs, own.clone()))];
        if bias {
            let spec = self.model.tensors[weight + 1].clone();
            tensors.push((weight + 1, TensorShard { spec, rows: own.clone(), columns: 0..1 }));
        }
        let local = LinearLayer { outputs: own.len(), input_terms, output_terms, ..linear.clone() };
        let before = before.map(|kind| self.exchange(kind, inputs));
        let after = after.map(|kind| self.exchange(kind, outputs));
        let layer = Piece::Layer(Layer { kind: LayerKind::Linear(local), tensors: 0..tensors.len() });
        LayerPart { number: 0, pieces: before.into_iter().chain([layer]).chain(after).collect(), tensors }
    }

    fn by_inputs(&self, layer: &Layer, linear: &LinearLayer) -> LayerPart {
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
        LayerPart { number: 0, pieces, tensors }
    }

    fn exchange(&self, kind: ExchangeKind, width: usize) -> Piece {
        Piece::Exchange(Exchange { kind, width, num_sums: self.division.num_sums() })
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
        TensorShard { spec: self.model.tensors[weight].clone(), rows, columns }
    }
}
