//! Sequence parallelism: between divided layers, each rank of the tensor axis works on some of the
//! positions of every sequence (Korthikanti et al., "Reducing activation recomputation in large transformer
//! models", 2022, §4.2).
//!
//! # The path of the data
//!
//! Without it, the sum after a pair of divided layers leaves every rank all values, and all ranks compute
//! the same norms, dropouts and additions. With it, a reduce-scatter ([`ExchangeKind::Scatter`]) leaves each
//! rank its positions of the sum; layers that treat positions alike work on those; and an all-gather
//! ([`ExchangeKind::Gather`]) gives all positions to the next divided layer. The backward pass does the
//! converse. Together they move as many values as the sums.
//!
//! ```text
//! embedding of own tokens → scatter → positions, norm → gather → own heads of attention → scatter
//!   → add, norm → gather → own features → scatter → add, norm → … → gather → own logits
//! ```
//!
//! Gathered values and partial sums are needed for a moment only, so they lie in one array of a micro-batch
//! that all layers of a stage use: the input of a divided layer is gathered again for the gradient of its
//! weight, as in the paper. All other arrays have the rank's own positions, `[rows, own positions · width]`.
//!
//! A value is *shared* if each rank has its positions of it. [`SharedValues`] finds the largest set of them:
//! sequences that come from a layer, with a layer on either side that can work on some of the positions
//! ([`PositionRule`]). A value that is added to one that cannot be shared, the network's input, is whole. A
//! layer that needs all positions gathers them. A layer with whole outputs, such as a linear layer without a
//! partner, is followed by [`ExchangeKind::TakeOwn`].
//!
//! # Parameters
//!
//! A norm has all of its parameters on every rank, and its positions' terms of their gradients. The sum over
//! the positions of a sample is canonical: positions are cut into leaves, and each rank has whole ones. Each
//! rank adds up its own for every row of the micro-batch, the sums are added over the ranks
//! (`LayerPart::position_sums`; a message as long as one position), while the gradient of the layer's
//! input is computed, and the sums of rows are added in the order of the batch. So the gradient has the bits
//! of a whole layer, on all ranks. A layer of learnt positions has the rows of its own.
//!
//! # Invariants
//!
//! Every rank has whole leaves of positions, which need not divide evenly, or none. An element has the bits
//! that it has in a whole layer, so layouts with and without shared positions end with the same bits, and
//! continue each other's checkpoints. Random draws depend on an element's number in the whole value.
//!
//! [`ExchangeKind::TakeOwn`]: super::exchange::ExchangeKind::TakeOwn
//! [`ExchangeKind::Scatter`]: super::exchange::ExchangeKind::Scatter
//! [`ExchangeKind::Gather`]: super::exchange::ExchangeKind::Gather

use crate::nn::{Features, Model, PositionRule};

/// The shape of a value that is shared: a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SharedShape {
    /// All positions.
    pub len: usize,
    /// The features of a position.
    pub width: usize,
}

/// The values of a model of which each rank of the tensor axis has its positions.
#[derive(Debug, Clone)]
pub struct SharedValues {
    /// For each value, whether it is shared.
    is_shared: Vec<bool>,
}

impl SharedValues {
    /// Finds the values of `model` that can be shared; none unless it `shares_positions`.
    pub fn new(model: &Model, shares_positions: bool) -> SharedValues {
        let num = model.layers.len();
        let can_have_some = |at: &usize| {
            let layer = &model.layers[*at];
            layer.position_rule() != PositionRule::Mixed
                && matches!(layer.output(), Features::Sequence { .. })
        };
        let readers = |value: usize| (0..num).filter(move |at| model.inputs[*at].first == value);
        let adders = |value: usize| (0..num).filter(move |at| model.inputs[*at].added == Some(value));
        let can_be_shared = |value: usize| {
            let producer = value.checked_sub(1).filter(|at| {
                shares_positions && matches!(model.layers[*at].output(), Features::Sequence { .. })
            });
            producer.is_some_and(|at| {
                can_have_some(&at) || readers(value).chain(adders(value)).any(|at| can_have_some(&at))
            })
        };
        let mut shared = SharedValues { is_shared: (0..=num).map(can_be_shared).collect() };
        loop {
            let has_own = |at: &usize| shared.has_own_positions(model, *at);
            let stays = |value: usize| {
                let is_used = value.checked_sub(1).is_some_and(|at| has_own(&at))
                    || readers(value).chain(adders(value)).any(|at| has_own(&at));
                shared.is_shared[value] && is_used && adders(value).all(|at| has_own(&at))
            };
            let next: Vec<bool> = (0..=num).map(stays).collect();
            if next == shared.is_shared {
                return shared;
            }
            shared.is_shared = next;
        }
    }

    /// Returns true if no value is shared.
    pub fn is_empty(&self) -> bool {
        !self.is_shared.contains(&true)
    }

    /// Returns the shape of `value` if it is shared.
    pub fn shape(&self, model: &Model, value: usize) -> Option<SharedShape> {
        let producer = value.checked_sub(1).filter(|_| self.is_shared[value])?;
        match model.layers[producer].output() {
            Features::Sequence { len, width } => Some(SharedShape { len, width }),
            _ => None,
        }
    }

    /// Returns true if the layer at `at` works on this rank's positions.
    pub fn has_own_positions(&self, model: &Model, at: usize) -> bool {
        let inputs = model.inputs[at];
        let is_sequence = matches!(model.layers[at].output(), Features::Sequence { .. });
        is_sequence
            && model.layers[at].position_rule() != PositionRule::Mixed
            && self.is_shared[inputs.first]
            && inputs.added.is_none_or(|added| self.is_shared[added])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nn::{GptSizes, LayerKind, Network};

    fn shared(network: &Network, input: Features) -> (Model, SharedValues) {
        let model = network.build(input).unwrap();
        let shared = SharedValues::new(&model, true);
        (model, shared)
    }

    #[test]
    fn all_values_of_a_gpt_between_divided_layers_are_shared() {
        let sizes = GptSizes { layers: 2, heads: 2, width: 16, bias: true, dropout: 0.1 };
        let (model, values) = shared(&Network::gpt(sizes), Features::Tokens { len: 8, vocabulary: 30 });
        for (at, layer) in model.layers.iter().enumerate() {
            let is_divided = matches!(
                layer.kind,
                LayerKind::Embedding(_) | LayerKind::Linear(_) | LayerKind::Attention(_)
            );
            assert_eq!(values.has_own_positions(&model, at), !is_divided, "{}", layer.words());
            // the outputs of attention are divided by heads
            let is_between = layer.output().last_dimension() == 16;
            let is_attention = matches!(layer.kind, LayerKind::Attention(_));
            assert_eq!(values.shape(&model, at + 1).is_some(), is_between && !is_attention, "{at}");
        }
        assert!(SharedValues::new(&model, false).is_empty());
    }

    #[test]
    fn images_and_features_are_not_shared() {
        let image = Features::Image { height: 28, width: 28, channels: 1 };
        assert!(shared(&Network::lenet(10), image).1.is_empty());
        assert!(shared(&Network::resnet(1, 16, 10), image).1.is_empty());
        assert!(shared(&Network::deep_mlp(32, 4), Features::Flat(32)).1.is_empty());
    }
}
