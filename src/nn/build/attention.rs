//! Attention, with the linear layers before and after it.

use super::Builder;
use super::linear::linear_layer;
use crate::device::{AttentionShape, WeightLayout};
use crate::nn::layer::{AttentionLayer, Heads, LayerKind, RotaryLayer};
use crate::nn::network::{Attention, DROPOUT_RATES};

/// The most features of a head, which a warp of a GPU holds.
const WIDEST_HEAD: usize = 256;

impl Builder {
    /// Adds the layers of attention: queries, keys and values; rotary positions, if it has them; attention;
    /// the mix of the heads.
    pub(super) fn attention(&mut self, attention: Attention) -> Result<usize, String> {
        let (len, inputs) = self.sequence("attention needs")?;
        let Attention { heads, key_value_heads: groups, causal, rotary, bias, .. } = attention;
        let Attention { dropout, deviation, output_deviation, .. } = attention;
        if heads == 0 || !inputs.is_multiple_of(heads) {
            return Err(format!("{heads} heads do not divide {inputs} features"));
        }
        if groups == 0 || !heads.is_multiple_of(groups) {
            return Err(format!("{groups} heads with keys and values do not divide {heads} heads"));
        }
        if !DROPOUT_RATES.contains(&dropout) {
            let (least, most) = DROPOUT_RATES.into_inner();
            return Err(format!(
                "the dropout of its weights is {dropout}, but must be from {least} to {most}"
            ));
        }
        let width = inputs / heads;
        if width > WIDEST_HEAD {
            return Err(format!("a head would have {width} features, and {WIDEST_HEAD} are the limit"));
        }
        let shape = AttentionShape {
            rows: 0,
            positions: len,
            groups,
            heads: heads / groups,
            width,
            causal,
            dropout: None,
        };
        let name = self.tensor_name("attn", 1);
        let outputs = shape.input_width();

        let first = self.tensors.len();
        self.linear_tensors(&format!("{name}.c_attn"), [outputs, inputs], bias, deviation);
        let mut before = linear_layer(Some(len), inputs, outputs, WeightLayout::OutputsByInputs, bias);
        before.heads = Some(Box::new(Heads::After(shape)));
        self.push(LayerKind::Linear(before), first, None)?;

        if let Some(base) = rotary {
            if !width.is_multiple_of(2) {
                return Err(format!("rotary positions need heads of an even width, not {width}"));
            }
            self.push(LayerKind::Rotary(RotaryLayer { shape, base }), self.tensors.len(), None)?;
        }
        let layer = AttentionLayer::whole(shape, dropout, self.next_draw());
        self.push(LayerKind::Attention(layer), self.tensors.len(), None)?;

        let first = self.tensors.len();
        self.linear_tensors(&format!("{name}.c_proj"), [inputs, inputs], bias, output_deviation);
        let mut after = linear_layer(Some(len), inputs, inputs, WeightLayout::OutputsByInputs, bias);
        after.heads = Some(Box::new(Heads::Before(shape)));
        self.push(LayerKind::Linear(after), first, None)?;
        Ok(1)
    }
}
