//! Attention.

use super::passes::{Draws, LayerPasses, LayerTensors, NextPositions, SplitRule, Tape};
use crate::device::{AttentionDropout, AttentionShape, Device};
use crate::nn::Features;

/// Scaled dot-product attention by heads (Vaswani et al., "Attention is all you need", 2017, §3.2), without
/// the products before and after it. A rank's shard has some of the groups of heads.
#[derive(Debug, Clone)]
pub struct AttentionLayer {
    /// The sizes; `rows` is 0 here, and there is no dropout.
    pub shape: AttentionShape,
    /// The probability that dropout sets a weight to 0.
    pub dropout: f32,
    /// The number of the module among those that draw.
    pub number: usize,
    /// The number of the shard's first head among those of the whole layer.
    pub first_head: usize,
    /// The number of heads of the whole layer.
    pub num_heads: usize,
}

impl AttentionLayer {
    /// Returns a layer with all heads.
    pub fn whole(shape: AttentionShape, dropout: f32, number: usize) -> AttentionLayer {
        AttentionLayer { shape, dropout, number, first_head: 0, num_heads: shape.num_heads() }
    }

    /// Returns the sizes of a pass over `rows` sequences. Weights are drawn by sample, head, query and key,
    /// so that every layout draws the same, and again in the backward pass.
    fn shape(&self, rows: usize, draws: Option<Draws>) -> AttentionShape {
        let head_stride = AttentionDropout::head_stride(self.shape.positions);
        let row_stride = self.num_heads as u64 * head_stride;
        let dropout = draws.filter(|_| self.dropout > 0.0).map(|draws| AttentionDropout {
            mask: draws.mask(self.dropout, self.number),
            first: draws.first_row as u64 * row_stride + self.first_head as u64 * head_stride,
            row_stride,
        });
        AttentionShape { rows, dropout, ..self.shape }
    }
}

impl LayerPasses for AttentionLayer {
    fn name(&self) -> &'static str {
        "attention"
    }

    fn input_len(&self) -> usize {
        self.shape.positions * self.shape.input_width()
    }

    fn output(&self) -> Features {
        Features::Sequence { len: self.shape.positions, width: self.shape.output_width() }
    }

    fn saved_len(&self) -> usize {
        self.shape.positions * self.shape.num_heads()
    }

    fn operations(&self) -> usize {
        let AttentionShape { positions, width, causal, .. } = self.shape;
        // a score and a weighted sum for each pair of positions
        let all = 4 * positions * positions * width * self.shape.num_heads();
        if causal { all / 2 } else { all }
    }

    fn split_rule(&self) -> SplitRule {
        SplitRule::Heads
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
        if self.shape.groups > 0 {
            device.attention_forward(&self.shape(rows, parameters.draws), input, saved, output);
        }
    }

    fn continues(&self) -> bool {
        self.shape.causal
    }

    fn forward_next<D: Device>(
        &self,
        device: &D,
        _parameters: LayerTensors<'_, D>,
        next: NextPositions<'_, D>,
    ) {
        let NextPositions { positions, all_inputs, outputs, .. } = next;
        let shape = AttentionShape { rows: 1, positions: positions.end, ..self.shape };
        if shape.groups > 0 {
            device.attention_next(&shape, positions.start, all_inputs, outputs);
        }
    }

    fn backward_input<D: Device>(
        &self,
        device: &D,
        _parameters: LayerTensors<'_, D>,
        rows: usize,
        tape: &Tape<'_, D>,
        gradient: D::View<'_>,
        input_gradient: D::ViewMut<'_>,
    ) {
        if self.shape.groups > 0 {
            let Tape { input, saved, output, draws, .. } = *tape;
            let shape = self.shape(rows, draws);
            device.attention_backward(&shape, input, saved, output, gradient, input_gradient);
        }
    }
}
