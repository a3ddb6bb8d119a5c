//! [`Divider`], which cuts a rank's shard out of a layer.

use std::ops::Range;

use super::division::{ColumnShares, FeatureDivision};
use super::exchange::{Exchange, ExchangeKind};
use super::part::Piece;
use super::positions::SharedShape;
use crate::device::{Activation, AttentionShape, EmbeddingShape, WeightLayout};
use crate::nn::{
    ActivationLayer, EmbeddingLayer, Features, Layer, LayerKind, LinearLayer, Model, PositionRule,
    TensorShard,
};

/// The operations of a layer on a rank, and its tensors: see [`LayerPart`](super::LayerPart).
pub(super) struct Divided {
    pub(super) pieces: Vec<Piece>,
    pub(super) tensors: Vec<(usize, TensorShard)>,
    pub(super) position_sums: Option<Exchange>,
}

impl Divided {
    fn new(pieces: Vec<Piece>, tensors: Vec<(usize, TensorShard)>) -> Divided {
        Divided { pieces, tensors, position_sums: None }
    }

    pub(super) fn without_tensors(kind: LayerKind) -> Divided {
        Divided::new(vec![Piece::Layer(Layer { kind, tensors: 0..0 })], Vec::new())
    }

    /// Gathers the positions of the input if they are `shared`.
    pub(super) fn with_all_positions(
        mut self,
        divider: &Divider<'_>,
        shared: Option<SharedShape>,
    ) -> Divided {
        let gather = shared.map(|shape| divider.positions(ExchangeKind::GatherOutput, shape));
        self.pieces.splice(0..0, gather);
        self
    }

    /// Takes this rank's positions of the output if they are `shared`.
    pub(super) fn with_own_positions(
        mut self,
        divider: &Divider<'_>,
        shared: Option<SharedShape>,
    ) -> Divided {
        self.pieces.extend(shared.map(|shape| divider.positions(ExchangeKind::TakeOwn, shape)));
        self
    }
}

/// The exchange before a layer that is split by outputs.
#[derive(Debug, Clone, Copy)]
pub(super) enum Before {
    /// None.
    Nothing,
    /// A sum of the gradient.
    SumGradient,
    /// A gather of positions, whose gradient is summed and scattered.
    Gather(SharedShape),
}

/// A model that is divided, and the rank whose part is cut out.
pub(super) struct Divider<'m> {
    pub(super) model: &'m Model,
    pub(super) rank: usize,
    pub(super) division: FeatureDivision,
}

impl Divider<'_> {
    /// Returns all of a layer. Every rank has it, and the first rank's tensors count.
    pub(super) fn whole(&self, layer: &Layer) -> Divided {
        let is_copy = self.rank > 0;
        let whole = |tensor| TensorShard { is_copy, ..TensorShard::whole(&self.model.tensors[tensor]) };
        let mut tensors: Vec<_> = layer.tensors.clone().map(|tensor| (tensor, whole(tensor))).collect();
        let mut layer = layer.clone();
        if let LayerKind::Linear(linear) = &layer.kind {
            let rows = linear.output_rows(0..linear.outputs);
            if linear.layout == WeightLayout::OutputsByInputs {
                tensors.iter_mut().for_each(|(_, shard)| shard.rows.clone_from(&rows));
            }
        }
        if let (PositionRule::Alike, Features::Sequence { len, .. }) = (layer.position_rule(), layer.output())
        {
            layer = layer.of_positions(self.division.positions(len));
        }
        Divided::new(vec![Piece::Layer(layer.with_tensors_from(0))], tensors)
    }

    /// Returns a layer that is split by outputs, `after` which there may be an exchange. The positions of its
    /// input are gathered if they are shared; or else the gradient is summed, unless that is done elsewhere.
    pub(super) fn by_outputs(
        &self,
        layer: &Layer,
        linear: &LinearLayer,
        before: Before,
        after: Option<ExchangeKind>,
    ) -> Divided {
        let LinearLayer { inputs, outputs, bias, .. } = *linear;
        let [_, output_unit] = linear.units();
        let output_terms = self.division.section(outputs, output_unit, self.rank);
        let own = output_terms.terms();
        let weight = layer.tensors.start;
        let mut tensors = vec![(weight, self.block(weight, linear, 0..inputs, own.clone()))];
        if bias {
            let spec = self.model.tensors[weight + 1].clone();
            let rows = linear.output_rows(own.clone());
            tensors.push((weight + 1, TensorShard { spec, rows, columns: 0..1, is_copy: false }));
        }
        let local = LinearLayer { outputs: own.len(), output_terms, ..linear.clone() };
        let sum = |kind| self.exchange(kind, linear, inputs, outputs, output_unit);
        let before = match before {
            Before::Nothing => None,
            Before::SumGradient => Some(sum(ExchangeKind::SumGradient)),
            Before::Gather(shape) => Some(self.of_positions(sum(ExchangeKind::Gather), shape)),
        };
        let after = after.map(|kind| self.exchange(kind, linear, outputs, outputs, 1));
        let layer = Piece::Layer(Layer { kind: LayerKind::Linear(local), tensors: 0..tensors.len() });
        let [before, after] = [before, after].map(|exchange| exchange.map(Piece::Exchange));
        Divided::new(before.into_iter().chain([layer]).chain(after).collect(), tensors)
    }

    /// Returns a layer that is split by inputs, whose outputs are summed, and scattered if they are `shared`.
    pub(super) fn by_inputs(
        &self,
        layer: &Layer,
        linear: &LinearLayer,
        shared: Option<SharedShape>,
    ) -> Divided {
        let LinearLayer { inputs, outputs, activation, bias, .. } = *linear;
        let [input_unit, _] = linear.units();
        let input_terms = self.division.section(inputs, input_unit, self.rank);
        let own = input_terms.terms();
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
            bias,
            activation: Activation::Identity,
            ..linear.clone()
        };
        let sum = self.exchange(ExchangeKind::SumValues, linear, outputs, inputs, input_unit);
        let mut pieces = vec![
            Piece::Layer(Layer { kind: LayerKind::Linear(local), tensors: 0..tensors.len() }),
            Piece::Exchange(self.scattered(sum, shared)),
        ];
        if activation != Activation::Identity {
            let own = shared.map(|shape| self.division.own_positions(shape.len, self.rank).len());
            let features = own.map_or(layer.output(), |own| layer.output().with_positions(own));
            let kind = LayerKind::Activation(ActivationLayer { activation, features });
            pieces.push(Piece::Layer(Layer { kind, tensors: 0..0 }));
        }
        Divided::new(pieces, tensors)
    }

    /// Returns the groups of heads of this rank, and the number of the first of them.
    pub(super) fn own_groups(&self, shape: AttentionShape) -> (AttentionShape, usize) {
        let (width, unit) = (shape.input_width(), shape.group_width());
        let own = self.division.section(width, unit, self.rank).terms();
        (AttentionShape { groups: own.len() / unit, ..shape }, own.start / unit)
    }

    /// Returns the rows of this rank's tokens. The sum over the ranks has one term that is not 0.
    pub(super) fn by_tokens(
        &self,
        layer: &Layer,
        embedding: &EmbeddingLayer,
        shared: Option<SharedShape>,
    ) -> Divided {
        let own = self.division.columns(embedding.vocabulary).of_rank(self.rank);
        let spec = self.model.tensors[layer.tensors.start].clone();
        let columns = 0..embedding.shape.columns;
        let shard = TensorShard { spec, rows: vec![own.clone(); 1], columns, is_copy: false };
        let shape = EmbeddingShape { first: own.start, rows: own.len(), ..embedding.shape };
        let local = EmbeddingLayer { shape, ..embedding.clone() };
        let (kind, width) = (ExchangeKind::SumValues, embedding.shape.columns);
        let (columns, num_leaves) = (self.division.columns(width), self.division.num_ranks());
        let sum = self.of_columns(kind, embedding.positions, width, columns, num_leaves);
        let piece = Piece::Layer(Layer { kind: LayerKind::Embedding(local), tensors: 0..1 });
        let sum = Piece::Exchange(self.scattered(sum, shared));
        Divided::new(vec![piece, sum], vec![(layer.tensors.start, shard); 1])
    }

    /// Returns a layer that works on this rank's positions.
    pub(super) fn by_positions(&self, layer: &Layer) -> Divided {
        let Features::Sequence { len, .. } = layer.output() else { return self.whole(layer) };
        let own = self.division.own_positions(len, self.rank);
        let rule = layer.position_rule();
        let mut divided = self.whole(layer);
        for (_, shard) in divided.tensors.iter_mut().filter(|_| rule == PositionRule::Row) {
            (shard.rows, shard.is_copy) = (vec![own.terms(); 1], false);
        }
        let elements: usize = divided.tensors.iter().map(|(_, shard)| shard.num_elements()).sum();
        divided.pieces = vec![Piece::Layer(layer.of_positions(own).with_tensors_from(0))];
        if rule == PositionRule::Alike && elements > 0 {
            let num_leaves = self.division.position_leaves(len).num;
            let (kind, columns) = (ExchangeKind::SumValues, self.division.columns(elements));
            divided.position_sums = Some(self.of_columns(kind, 1, elements, columns, num_leaves));
        }
        divided
    }

    /// Returns an exchange of all positions of a value, without sums.
    pub(super) fn positions(&self, kind: ExchangeKind, shape: SharedShape) -> Piece {
        let SharedShape { len, width } = shape;
        let columns = self.division.position_columns(len, width);
        Piece::Exchange(Exchange {
            num_sums: 1,
            num_own_sums: 1,
            ..self.of_columns(kind, 1, len * width, columns, 1)
        })
    }

    /// Returns the `sum`, of which each rank gets its positions if they are `shared`.
    fn scattered(&self, sum: Exchange, shared: Option<SharedShape>) -> Exchange {
        match shared {
            None => sum,
            Some(shape) => Exchange { kind: ExchangeKind::Scatter, ..self.of_positions(sum, shape) },
        }
    }

    /// Returns `exchange`, with the positions of `shape` as the columns that ranks divide.
    fn of_positions(&self, exchange: Exchange, shape: SharedShape) -> Exchange {
        let SharedShape { len, width } = shape;
        let columns = self.division.position_columns(len, width);
        let own_width = columns.of_rank(self.rank).len();
        Exchange { positions: 1, width: len * width, columns, own_width, ..exchange }
    }

    fn of_columns(
        &self,
        kind: ExchangeKind,
        positions: usize,
        width: usize,
        columns: ColumnShares,
        num_leaves: usize,
    ) -> Exchange {
        Exchange::of_columns(self.division, self.rank, kind, [positions, width], columns, num_leaves)
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
    ) -> Exchange {
        let (positions, columns) = (linear.positions(), self.division.columns(width));
        self.of_columns(kind, positions, width, columns, self.division.num_leaves(terms, unit))
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
