//! Linear layers, each with the activation that follows it.

use super::{Builder, Built, Embedding, one_leaf};
use crate::device::{Activation, WeightLayout};
use crate::nn::layer::{LayerKind, LinearLayer, torch_tensors};
use crate::nn::{Initial, Module, TensorSpec};

impl Builder {
    pub(super) fn linear(
        &mut self,
        outputs: usize,
        bias: bool,
        deviation: Option<f32>,
        next: &[Module],
    ) -> Built {
        let (sequence, inputs) = self.vectors("a linear layer")?;
        let name = self.tensor_name("fc", 1);
        self.linear_tensors(&name, [outputs, inputs], bias, deviation);
        let layer = linear_layer(sequence, inputs, outputs, WeightLayout::OutputsByInputs, bias);
        Ok(with_activation(layer, next))
    }

    /// Adds the tensors of a linear layer, whose weight has PyTorch's default initial values or normal
    /// ones.
    pub(super) fn linear_tensors(
        &mut self,
        name: &str,
        shape: [usize; 2],
        bias: bool,
        deviation: Option<f32>,
    ) {
        let mut tensors = torch_tensors(name, shape.to_vec(), bias);
        if let Some(deviation) = deviation {
            let initials = [Initial::Normal { deviation }, Initial::Constant { value: 0.0 }];
            tensors.iter_mut().zip(initials).for_each(|(tensor, initial)| tensor.initial = initial);
        }
        self.tensors.extend(tensors);
    }

    pub(super) fn product(&mut self, outputs: usize, next: &[Module]) -> Built {
        let (sequence, inputs) = self.vectors("a product")?;
        let name = self.tensor_name("w.", 0);
        let initial = Initial::Normal { deviation: 1.0 / (inputs as f32).sqrt() };
        self.tensors.push(TensorSpec { name, shape: vec![inputs, outputs], initial });
        let layer = linear_layer(sequence, inputs, outputs, WeightLayout::InputsByOutputs, false);
        Ok(with_activation(layer, next))
    }

    pub(super) fn tied_output(&mut self) -> Result<usize, String> {
        let Some(Embedding { tensor, vocabulary, width, is_tied }) = self.embedding else {
            return Err("there is no embedding before it whose weight it could use".into());
        };
        if is_tied {
            return Err("an output uses the weight of the embedding already".into());
        }
        let (sequence, inputs) = self.vectors("a tied output")?;
        if inputs != width {
            return Err(format!("the embedding has {width} features, but its input is {}", self.features));
        }
        let mut layer = linear_layer(sequence, inputs, vocabulary, WeightLayout::OutputsByInputs, false);
        layer.is_tied = true;
        self.push(LayerKind::Linear(layer), self.tensors.len(), None)?;
        if let Some(layer) = self.layers.last_mut() {
            layer.tensors = tensor..tensor + 1;
        }
        self.embedding = Some(Embedding { tensor, vocabulary, width, is_tied: true });
        Ok(1)
    }
}

/// Returns a linear layer without an activation.
pub(super) fn linear_layer(
    sequence: Option<usize>,
    inputs: usize,
    outputs: usize,
    layout: WeightLayout,
    bias: bool,
) -> LinearLayer {
    let (input_terms, output_terms) = (one_leaf(inputs), one_leaf(outputs));
    LinearLayer {
        sequence,
        inputs,
        outputs,
        heads: None,
        is_tied: false,
        layout,
        input_terms,
        output_terms,
        activation: Activation::Identity,
        bias,
    }
}

/// Fuses a linear layer with the activation that comes `next`, if one does, and returns the number of
/// modules that it then stands for.
fn with_activation(layer: LinearLayer, next: &[Module]) -> (LayerKind, usize) {
    match next.first() {
        Some(Module::Activation(activation)) => {
            (LayerKind::Linear(LinearLayer { activation: *activation, ..layer }), 2)
        }
        _ => (LayerKind::Linear(layer), 1),
    }
}
