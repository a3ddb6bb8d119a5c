//! Attention.

use super::passes::{LayerPasses, LayerTensors, NextPositions, SplitRule, Tape};
use crate::device::{AttentionShape, Device, FusedActivation};
use crate::nn::Features;

/// Scaled dot-product attention by heads (Vaswani et al., "Attention is all you need", 2017, §3.2), without
/// the products before and after it. A rank's shard has some of the groups of heads.
#[derive(Debug, Clone)]
pub struct AttentionLayer {
    /// The sizes; `rows` is 0 here.
    pub shape: AttentionShape,
}

impl AttentionLayer {
    fn shape(&self, rows: usize) -> AttentionShape {
        AttentionShape { rows, ..self.shape }
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
        _parameters: LayerTensors<'_, D>,
        rows: usize,
        input: D::View<'_>,
        saved: D::ViewMut<'_>,
        output: D::ViewMut<'_>,
    ) {
        if self.shape.groups > 0 {
            device.attention_forward(&self.shape(rows), input, saved, output);
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
        _previous: Option<FusedActivation<D::View<'_>>>,
    ) {
        if self.shape.groups > 0 {
            let Tape { input, saved, output, .. } = *tape;
            device.attention_backward(&self.shape(rows), input, saved, output, gradient, input_gradient);
        }
    }
}
