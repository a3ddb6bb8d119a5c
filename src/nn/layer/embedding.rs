//! Embeddings of tokens.

use super::passes::{LayerPasses, LayerSums, LayerTensors, SplitRule, TapedRows};
use crate::device::{Device, EmbeddingShape, Role};
use crate::nn::Features;

/// Replaces each token of a sequence by its row of a table: PyTorch's `Embedding`. A rank's shard has some
/// of the rows, and returns 0 for other tokens.
#[derive(Debug, Clone)]
pub struct EmbeddingLayer {
    /// The number of tokens in a sequence.
    pub positions: usize,
    /// The number of tokens that there are.
    pub vocabulary: usize,
    /// The sizes of the table; `tokens` is 0 here.
    pub shape: EmbeddingShape,
}

/// The number of the tensor.
const WEIGHT: usize = 0;

impl EmbeddingLayer {
    fn shape(&self, rows: usize) -> EmbeddingShape {
        EmbeddingShape { tokens: rows * self.positions, ..self.shape }
    }
}

impl LayerPasses for EmbeddingLayer {
    fn name(&self) -> &'static str {
        "embedding"
    }

    fn input_len(&self) -> usize {
        self.positions
    }

    fn input_role(&self) -> Role {
        Role::Exact
    }

    fn output(&self) -> Features {
        Features::Sequence { len: self.positions, width: self.shape.columns }
    }

    fn operations(&self) -> usize {
        self.positions * self.shape.columns
    }

    fn split_rule(&self) -> SplitRule {
        SplitRule::Vocabulary
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
        _saved: D::ViewMut<'_>,
        output: D::ViewMut<'_>,
    ) {
        device.embed(&self.shape(rows), input, parameters.get(device, WEIGHT), output);
    }

    fn backward_weight<D: Device>(
        &self,
        device: &D,
        micro_batches: &[TapedRows<'_, D>],
        mut sums: LayerSums<'_, D>,
    ) {
        for TapedRows { tape, gradient, section } in micro_batches {
            let table = sums.get(device, WEIGHT, section.times(self.positions));
            device.embed_backward(&self.shape(section.len()), tape.input, *gradient, table);
        }
    }
}
