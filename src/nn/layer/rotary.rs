//! Rotary positions.

use super::passes::{LayerPasses, LayerSums, LayerTensors, SplitRule, Tape};
use crate::device::{AttentionShape, Device, FusedActivation};
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
    fn rotate<D: Device>(
        &self,
        device: &D,
        inverse: bool,
        from: Option<D::View<'_>>,
        values: D::ViewMut<'_>,
    ) {
        if self.shape.groups > 0 {
            device.rotate(&self.shape, self.base, inverse, from, values);
        }
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
        self.rotate(device, false, Some(input), output);
    }

    fn backward_activation<D: Device>(
        &self,
        device: &D,
        _tape: &Tape<'_, D>,
        gradient: D::ViewMut<'_>,
        _sums: Option<(LayerSums<'_, D>, Section)>,
        _is_backpropagated: bool,
    ) {
        self.rotate(device, true, None, gradient);
    }

    fn backward_input<D: Device>(
        &self,
        _device: &D,
        _parameters: LayerTensors<'_, D>,
        _rows: usize,
        _tape: &Tape<'_, D>,
        _gradient: D::View<'_>,
        _input_gradient: D::ViewMut<'_>,
        _previous: Option<FusedActivation<D::View<'_>>>,
    ) {
        unreachable!("the gradient of an elementwise layer is computed in place")
    }
}
