//! Tensor parallelism: every linear layer is divided among the ranks of the tensor axis, by its outputs
//! (column-parallel) or by its inputs (row-parallel). Each rank computes a narrower layer; between the
//! layers the ranks [`exchange`] values in the forward pass and gradients in the backward pass. Attention
//! is divided by heads, between two linear layers that are a pair in every [`Split`], and embeddings by
//! tokens. Other layers are replicated: every rank computes
//! all of them; or each rank computes some of the positions of a sequence ([`positions`]). If the last layer
//! is split by outputs and the loss is a cross-entropy, its outputs stay where they are too
//! ([`cross_entropy`]).
//!
//! Invariants: every element of every tensor counts on exactly one of the ranks (the bias of a layer
//! that is split by inputs on the first, whose first leaf of the sum begins with it; the tensors of a
//! replicated layer on the first too), so norms and digests count it once; outside a pair, all ranks
//! hold the same values, bit for bit, which are those of whole layers, or their positions of these; widths
//! need not be divisible by the number of ranks.

pub mod cross_entropy;
mod divider;
pub mod division;
pub mod exchange;
mod part;
pub mod positions;

use clap::ValueEnum;

use self::cross_entropy::{ClassShare, FEWEST_DIVIDED};
use self::divider::{Before, Divided, Divider};
use self::division::FeatureDivision;
use self::exchange::ExchangeKind;
pub use self::part::{LayerPart, Piece};
use self::positions::SharedValues;
use crate::nn::{AttentionLayer, Layer, LayerInputs, LayerKind, Loss, Model, RotaryLayer, SplitRule};

/// The way in which linear layers are divided among ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Split {
    /// In pairs, the first by its outputs (column-parallel), the second by its inputs (row-parallel): one
    /// sum forward and one backward per pair
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

/// The part of a linear layer in the division of the model, in the words of Megatron-LM, where a weight is
/// applied from the right, so that its columns are the outputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LinearRole {
    /// By outputs, which stay where they are, for the layer after it is row-parallel.
    ColumnParallel,
    /// By inputs.
    RowParallel,
    /// By outputs, which are gathered.
    GatheredColumnParallel,
    /// By outputs, which the loss reads where they are.
    Logits,
    /// By outputs, which are gathered for a layer that is split by outputs too. The gradients of its
    /// inputs are summed in the exchange that gathers them.
    Chained,
}

/// Returns the shard of each layer of `model` for rank `rank` of the tensor axis, among whose ranks
/// `division` divides features, and positions if it says so. Not collective.
pub fn split(model: &Model, split: Split, rank: usize, division: FeatureDivision) -> Vec<LayerPart> {
    let shared = SharedValues::new(model, division.shares_positions());
    let divider = Divider { model, rank, division };
    let roles = roles(model, split);
    let layers = with_sums(model, division);
    let with_tensors = |layer: &Layer| !layer.tensors.is_empty();
    let first = model.layers.iter().position(with_tensors).unwrap_or(model.layers.len());
    let part = |(at, layer): (usize, &Layer)| {
        let inputs = model.inputs[at];
        // the input and the output, if they are shared, as they are before and after this layer
        let [input, output] = [inputs.first, at + 1].map(|value| shared.shape(model, value));
        let Divided { pieces, mut tensors, position_sums } = match (roles[at], &layer.kind) {
            _ if division.num_ranks() == 1 => divider.whole(layer),
            (_, LayerKind::Embedding(embedding)) => divider.by_tokens(layer, embedding, output),
            (_, LayerKind::Attention(attention)) => {
                let (shape, first_group) = divider.own_groups(attention.shape);
                let first_head = first_group * shape.heads;
                let layer = AttentionLayer { shape, first_head, ..attention.clone() };
                Divided::without_tensors(LayerKind::Attention(layer))
            }
            (_, LayerKind::Rotary(rotary)) => {
                let (shape, _) = divider.own_groups(rotary.shape);
                Divided::without_tensors(LayerKind::Rotary(RotaryLayer { shape, ..rotary.clone() }))
            }
            (Some(role), LayerKind::Linear(linear)) => {
                let is_summed_before = at > 0 && roles[at - 1] == Some(LinearRole::Chained);
                let before = match input {
                    Some(shape) => Before::Gather(shape),
                    None if inputs.first > first && !is_summed_before => Before::SumGradient,
                    None => Before::Nothing,
                };
                match role {
                    LinearRole::ColumnParallel | LinearRole::Logits => {
                        divider.by_outputs(layer, linear, before, None)
                    }
                    LinearRole::RowParallel => divider.by_inputs(layer, linear, output),
                    LinearRole::GatheredColumnParallel => divider
                        .by_outputs(layer, linear, before, Some(ExchangeKind::GatherOutput))
                        .with_own_positions(&divider, output),
                    LinearRole::Chained => {
                        divider.by_outputs(layer, linear, before, Some(ExchangeKind::Gather))
                    }
                }
            }
            _ if shared.has_own_positions(model, at) => divider.by_positions(layer),
            _ => {
                divider.whole(layer).with_all_positions(&divider, input).with_own_positions(&divider, output)
            }
        };
        if layer.is_tied() {
            tensors.iter_mut().for_each(|(_, shard)| shard.is_copy = true);
        }
        LayerPart { number: at, inputs, pieces, tensors, position_sums }
    };
    let mut parts: Vec<LayerPart> = layers.iter().enumerate().map(part).collect();
    // the loss needs all positions
    if let (Some(last), Some(shape)) = (parts.last_mut(), shared.shape(model, model.layers.len())) {
        last.pieces.push(divider.positions(ExchangeKind::GatherOutput, shape));
    }
    parts
}

/// Returns the classes whose logits `split` leaves rank `rank`. Not collective.
pub fn split_classes(model: &Model, split: Split, rank: usize, division: FeatureDivision) -> ClassShare {
    let (predictions, num) = (model.num_predictions(), model.outputs_per_prediction());
    match roles(model, split).last() {
        Some(Some(LinearRole::Logits)) if division.num_ranks() > 1 => {
            ClassShare::of_rank(num, predictions, rank, division)
        }
        _ => ClassShare::whole(num, division),
    }
}

/// Returns the layers of `model` with the order of their sums over features. Those that some [`Split`]
/// divides have leaves, whatever the split of this run, so that all have the same bits. The others are one
/// chain, which takes less time.
fn with_sums(model: &Model, division: FeatureDivision) -> Vec<Layer> {
    let roles: Vec<_> = Split::value_variants().iter().map(|split| roles(model, *split)).collect();
    let with_order = |(at, layer): (usize, &Layer)| {
        let mut layer = layer.clone();
        if let LayerKind::Linear(linear) = &mut layer.kind {
            let is_by_inputs = |roles: &Vec<_>| roles[at] == Some(LinearRole::RowParallel);
            let [input_unit, output_unit] = linear.units();
            if roles.iter().any(is_by_inputs) {
                linear.input_terms = division.whole(linear.inputs, input_unit);
            }
            if !roles.iter().all(is_by_inputs) {
                linear.output_terms = division.whole(linear.outputs, output_unit);
            }
        }
        layer
    };
    model.layers.iter().enumerate().map(with_order).collect()
}

/// Returns the role of each linear layer.
fn roles(model: &Model, split: Split) -> Vec<Option<LinearRole>> {
    let rule = |at: usize| model.layers.get(at).map(Layer::split_rule);
    let is_linear = |at: usize| rule(at) == Some(SplitRule::Features);
    // the number of positions of a linear layer's input, if it is a sequence
    let positions = |at: usize| match &model.layers[at].kind {
        LayerKind::Linear(linear) => linear.sequence,
        _ => None,
    };
    // true if the output of layer `at` goes to the next layer alone, which is linear too, and has the same
    // features: a vector of all positions is divided otherwise than each position
    let feeds_next = |at: usize| {
        let readers = |inputs: &&LayerInputs| inputs.first == at + 1 || inputs.added == Some(at + 1);
        // a tied output is divided as the embedding is, by outputs
        is_linear(at + 1)
            && positions(at + 1) == positions(at)
            && !model.layers[at + 1].is_tied()
            && model.inputs[at + 1] == LayerInputs { first: at + 1, added: None }
            && model.inputs[at].added.is_none()
            && model.inputs.iter().filter(readers).count() == 1
    };
    // true if the loss can read some of the outputs of layer `at`
    let feeds_loss = |at: usize| {
        let is_divided = model.loss == Loss::CrossEntropy && model.outputs_per_prediction() >= FEWEST_DIVIDED;
        is_divided
            && at + 1 == model.layers.len()
            && model.inputs[at].added.is_none()
            && model.layers[at].output() == model.output
    };
    let mut roles = vec![None; model.layers.len()];
    for at in (0..roles.len()).filter(|at| is_linear(*at)) {
        let is_after_first = at > 0 && roles[at - 1] == Some(LinearRole::ColumnParallel);
        roles[at] = match split {
            _ if rule(at + 1) == Some(SplitRule::Heads) => Some(LinearRole::ColumnParallel),
            _ if is_after_first || at > 0 && rule(at - 1) == Some(SplitRule::Heads) => {
                Some(LinearRole::RowParallel)
            }
            // of two layers before attention, the second is a pair with that after it
            Split::Pairs if feeds_next(at) && rule(at + 2) != Some(SplitRule::Heads) => {
                Some(LinearRole::ColumnParallel)
            }
            Split::Gather if feeds_next(at) && rule(at + 2) != Some(SplitRule::Heads) => {
                Some(LinearRole::Chained)
            }
            _ if feeds_loss(at) => Some(LinearRole::Logits),
            _ => Some(LinearRole::GatheredColumnParallel),
        };
    }
    roles
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nn::{Features, GptSizes, Network};
    use crate::parallel::batch::Summation;

    #[test]
    fn sums_have_leaves_where_a_split_divides_them() {
        let division = FeatureDivision::new(Summation::Canonical { num_leaves: 8 }, 1);
        let gpt = Network::gpt(GptSizes { layers: 1, heads: 8, width: 64, bias: true, dropout: 0.0 });
        let model = gpt.build(Features::Tokens { len: 16, vocabulary: 32 }).unwrap();
        let layers = with_sums(&model, division);
        let num_leaves: Vec<[usize; 2]> = layers
            .iter()
            .filter_map(|layer| match &layer.kind {
                LayerKind::Linear(linear) => Some([linear.input_terms, linear.output_terms]),
                _ => None,
            })
            .map(|sums| sums.map(|terms| terms.steps().count()))
            .collect();
        // queries, keys and values; the layer after attention; a pair; the logits
        assert_eq!(num_leaves, [[1, 8], [8, 1], [1, 8], [8, 8], [1, 8]]);
    }
}
