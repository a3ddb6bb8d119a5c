//! Rotary positions.

use super::passes::{LayerPasses, LayerSums, LayerTensors, NextPositions, SplitRule, Tape};
use crate::device::{AttentionShape, Device, Rotation};
use crate::nn::Features;
use crate::sums::Section;

/// The rotation of the queries and keys of attention by angles that grow with the position (Su et al.,
/// "RoFormer: enhanced transformer with rotary position embedding", 2021). A rank's shard has some of
/// the groups of heads.
#[derive(Debug, Clone)]
pub struct RotaryLayer {
    /// The sizes of the attention that follows; `rows` is 0 here.
    pub shape: AttentionShape,
    /// The base of the angles.
    pub base: f32,
}

impl RotaryLayer {
    fn rotation(&self, inverse: bool) -> Rotation {
        Rotation { base: self.base, first: 0, inverse }
    }
}

impl LayerPasses for RotaryLayer {
    fn name(&self) -> &'static str {
        "rotary positions"
    }

    fn input_len(&self) -> usize {
        self.shape.positions * self.shape.input_width()
    }

    fn output(&self) -> Features {
        Features::Sequence { len: self.shape.positions, width: self.shape.input_width() }
    }

    fn is_elementwise(&self) -> bool {
        true
    }

    fn split_rule(&self) -> SplitRule {
        SplitRule::Heads
    }

    fn forward<D: Device>(
        &self,
        device: &D,
        _parameters: LayerTensors<'_, D>,
        _rows: usize,
        input: D::View<'_>,
        _saved: D::ViewMut<'_>,
        output: D::ViewMut<'_>,
    ) {
        if self.shape.groups > 0 {
            device.rotate(&self.shape, self.rotation(false), Some(input), output);
        }
    }

    fn changes_gradient(&self) -> bool {
        true
    }

    fn continues(&self) -> bool {
        true
    }

    fn forward_next<D: Device>(
        &self,
        device: &D,
        _parameters: LayerTensors<'_, D>,
        next: NextPositions<'_, D>,
    ) {
        let NextPositions { positions, inputs, outputs, .. } = next;
        if self.shape.groups > 0 {
            let shape = AttentionShape { rows: 1, positions: positions.len(), ..self.shape };
            let rotation = Rotation { first: positions.start, ..self.rotation(false) };
            device.rotate(&shape, rotation, Some(inputs), outputs);
        }
    }

    fn backward_activation<D: Device>(
        &self,
        device: &D,
        _tape: &Tape<'_, D>,
        gradient: D::ViewMut<'_>,
        _sums: Option<(LayerSums<'_, D>, Section)>,
    ) {
        if self.shape.groups > 0 {
            device.rotate(&self.shape, self.rotation(true), None, gradient);
        }
    }
}
