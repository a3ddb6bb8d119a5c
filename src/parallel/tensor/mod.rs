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
use crate::nn::{Features, Layer, Model, TensorShard};
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
    let linear: Vec<usize> =
        (0..model.layers.len()).filter(|&at| !model.layers[at].tensors().is_empty()).collect();
    let is_linear = |at: &usize| matches!(model.layers[*at], Layer::Linear { .. });
    let has_leaves = linear.iter().all(is_linear);
    let divider = Divider { model, rank, division, has_leaves };
    let mut parts = Vec::new();
    for (at, layer) in model.layers.iter().enumerate() {
        let number = linear.iter().position(|index| *index == at);
        let part = match (number, layer) {
            _ if size == 1 => divider.whole(layer),
            (None, Layer::Flatten { .. }) if at < linear.first().copied().unwrap_or_default() => {
                divider.whole(layer)
            }
            (Some(number), Layer::Linear { .. }) => {
                let last = number + 1 == linear.len();
                match split {
                    Split::Gather if last => {
                        divider.by_outputs(layer, None, Some(ExchangeKind::GatherOutput))
                    }
                    Split::Gather => divider.by_outputs(layer, None, Some(ExchangeKind::Gather)),
                    Split::Pairs => {
                        let before = (number > 0).then_some(ExchangeKind::SumGradient);
                        match (number % 2, last) {
                            (0, false) => divider.by_outputs(layer, before, None),
                            (0, true) => divider.by_outputs(layer, before, Some(ExchangeKind::GatherOutput)),
                            _ => divider.by_inputs(layer),
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
        let tensors = layer.tensors().map(|tensor| (tensor, TensorShard::whole(&self.model.tensors[tensor])));
        let mut layer = layer.clone();
        if let (Layer::Linear { inputs, outputs, input_terms, output_terms, .. }, true) =
            (&mut layer, self.has_leaves)
        {
            (*input_terms, *output_terms) = (self.division.whole(*inputs), self.division.whole(*outputs));
        }
        let pieces = vec![Piece::Layer(layer.with_tensors_from(0))];
        LayerPart { number: 0, pieces, tensors: tensors.collect() }
    }

    fn by_outputs(
        &self,
        layer: &Layer,
        before: Option<ExchangeKind>,
        after: Option<ExchangeKind>,
    ) -> LayerPart {
        let Layer::Linear { inputs, outputs, layout, activation, weight, bias, .. } = *layer else {
            unreachable!("only linear layers are divided");
        };
        let (input_terms, output_terms) =
            (self.division.whole(inputs), self.division.section(outputs, self.rank));
        let own = output_terms.terms();
        let mut part = LayerPart::default();
        part.pieces.extend(before.map(|kind| self.exchange(kind, inputs)));
        let bias_number = bias.map(|_| 1);
        let local = Layer::Linear {
            outputs: own.len(),
            inputs,
            layout,
            input_terms,
            output_terms,
            activation,
            weight: 0,
            bias: bias_number,
        };
        part.pieces.push(Piece::Layer(local));
        part.pieces.extend(after.map(|kind| self.exchange(kind, outputs)));
        part.tensors.push((weight, self.block(weight, layout, 0..inputs, own.clone())));
        if let Some(bias) = bias {
            let spec = self.model.tensors[bias].clone();
            part.tensors.push((bias, TensorShard { spec, rows: own, columns: 0..1 }));
        }
        part
    }

    fn by_inputs(&self, layer: &Layer) -> LayerPart {
        let Layer::Linear { inputs, outputs, layout, activation, weight, bias, .. } = *layer else {
            unreachable!("only linear layers are divided");
        };
        let (input_terms, output_terms) =
            (self.division.section(inputs, self.rank), self.division.whole(outputs));
        let own = input_terms.terms();
        let bias = bias.filter(|_| self.rank == 0);
        let local = Layer::Linear {
            inputs: own.len(),
            outputs,
            layout,
            input_terms,
            output_terms,
            activation: Activation::Identity,
            weight: 0,
            bias: bias.map(|_| 1),
        };
        let mut part = LayerPart::default();
        part.pieces.extend([Piece::Layer(local), self.exchange(ExchangeKind::SumValues, outputs)]);
        if activation != Activation::Identity {
            part.pieces.push(Piece::Layer(Layer::Activation(activation, Features::Flat(outputs))));
        }
        part.tensors.push((weight, self.block(weight, layout, own, 0..outputs)));
        part.tensors.extend(bias.map(|bias| (bias, TensorShard::whole(&self.model.tensors[bias]))));
        part
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
