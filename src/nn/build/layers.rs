//! The layer of each kind of module.

use super::{Builder, Embedding};
use crate::device::{
    Activation, AttentionShape, ConvolutionShape, EmbeddingShape, Gate, GroupNormShape, NormShape, PoolShape,
    WeightLayout,
};
use crate::nn::layer::{
    AttentionLayer, ConvolutionLayer, DropoutLayer, EmbeddingLayer, GatedLayer, Heads, LayerKind,
    LinearLayer, Norm, NormLayer, PoolLayer, Pooling, PositionsLayer, RotaryLayer, torch_tensors,
};
use crate::nn::network::{Attention, Convolution};
use crate::nn::{Features, Initial, Module, TensorSpec};
use crate::sums::{Leaves, Section};

/// PyTorch's default ε of `LayerNorm`.
const NORM_EPSILON: f32 = 1e-5;

/// The most features of a head, which a warp of a GPU holds.
const WIDEST_HEAD: usize = 256;

/// The kind of a layer, and the number of modules that it stands for.
type Built = Result<(LayerKind, usize), String>;

/// Returns the terms of a sum over `len` features in one leaf.
fn one_leaf(len: usize) -> Section {
    Section::whole(Leaves { len, num: 1 })
}

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
    fn linear_tensors(&mut self, name: &str, shape: [usize; 2], bias: bool, deviation: Option<f32>) {
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

    pub(super) fn convolution(&mut self, convolution: Convolution, next: &[Module]) -> Built {
        let (height, width, channels) = self.image("a convolution needs")?;
        let Convolution { outputs, kernel, stride, padding, bias } = convolution;
        if padding >= kernel {
            return Err(format!(
                "{padding} rows of zeros on each side are no less than a kernel of {kernel}"
            ));
        }
        if kernel == 0 || stride == 0 || height + 2 * padding < kernel || width + 2 * padding < kernel {
            let zeros =
                if padding == 0 { String::new() } else { format!(", padded by {padding} on each side") };
            return Err(format!(
                "a kernel of {kernel} × {kernel} does not fit images of {height} × {width}{zeros}"
            ));
        }
        let name = self.tensor_name("conv", 1);
        self.tensors.extend(torch_tensors(&name, vec![outputs, channels, kernel, kernel], bias));
        // ReLU and max-pooling commute, so either order is one operation
        let is_pool = |module: &Module| stride == 1 && *module == Module::MaxPool { size: 2 };
        let is_relu = |module: &Module| *module == Module::Activation(Activation::Relu);
        let (pool, relu) = match next {
            [a, b, ..] if is_pool(a) && is_relu(b) || is_relu(a) && is_pool(b) => (true, true),
            [a, ..] => (is_pool(a), is_relu(a)),
            [] => (false, false),
        };
        let taken = 1 + usize::from(pool) + usize::from(relu);
        let shape = ConvolutionShape {
            rows: 0,
            channels,
            height,
            width,
            outputs,
            kernel,
            stride,
            padding,
            pool,
            relu,
        };
        Ok((LayerKind::Convolution(ConvolutionLayer { shape, bias }), taken))
    }

    pub(super) fn pool(&self, pooling: Pooling, size: usize) -> Result<LayerKind, String> {
        let (height, width, channels) = self.image("pooling needs")?;
        let [window_height, window_width] = match pooling {
            Pooling::GlobalAverage => [height, width],
            Pooling::Max | Pooling::Average => [size; 2],
        };
        if size == 0 || window_height > height || window_width > width {
            return Err(format!("windows of {size} × {size} do not fit images of {height} × {width}"));
        }
        let shape = PoolShape { rows: 0, height, width, channels, window_height, window_width };
        Ok(LayerKind::Pool(PoolLayer { pooling, shape }))
    }

    /// Returns a normalisation over the innermost dimension, or a root mean square norm.
    pub(super) fn layer_norm(&mut self, is_centred: bool, bias: bool) -> LayerKind {
        self.norm_tensors(bias);
        let epsilon = if is_centred { NORM_EPSILON } else { f32::EPSILON };
        let positions = match self.features {
            Features::Sequence { len, .. } => Some(one_leaf(len)),
            _ => None,
        };
        let columns = self.features.last_dimension();
        let shape = NormShape { rows: 0, columns, epsilon, is_centred, positions };
        LayerKind::Norm(NormLayer { features: self.features, norm: Norm::Layer(shape), bias })
    }

    pub(super) fn group_norm(&mut self, groups: usize) -> Result<LayerKind, String> {
        let (height, width, channels) = self.image("a group norm needs")?;
        if groups == 0 || !channels.is_multiple_of(groups) {
            return Err(format!("{groups} groups do not divide {channels} channels"));
        }
        self.norm_tensors(true);
        let positions = height * width;
        let shape = GroupNormShape { rows: 0, positions, channels, groups, epsilon: NORM_EPSILON };
        Ok(LayerKind::Norm(NormLayer { features: self.features, norm: Norm::Group(shape), bias: true }))
    }

    pub(super) fn gated(&self, gate: Gate) -> Result<LayerKind, String> {
        let features = self.features;
        if matches!(features, Features::Tokens { .. }) || !features.last_dimension().is_multiple_of(2) {
            return Err(format!("a gated linear unit needs an even number of features, not {features}"));
        }
        Ok(LayerKind::Gated(GatedLayer { gate, features }))
    }

    pub(super) fn dropout(&self, rate: f32) -> Result<LayerKind, String> {
        let features = self.features;
        if matches!(features, Features::Tokens { .. }) || !(0.0..1.0).contains(&rate) {
            return Err(format!(
                "a dropout needs features and a rate from 0 to below 1, not {features} and {rate}"
            ));
        }
        Ok(LayerKind::Dropout(DropoutLayer::whole(rate, self.layers.len(), features)))
    }

    /// Adds the tensors of a normalisation.
    fn norm_tensors(&mut self, bias: bool) {
        let columns = self.features.last_dimension();
        let name = self.tensor_name("norm", 1);
        let tensor = |suffix, value| TensorSpec {
            name: format!("{name}.{suffix}"),
            shape: vec![columns],
            initial: Initial::Constant { value },
        };
        self.tensors.push(tensor("weight", 1.0));
        self.tensors.extend(bias.then(|| tensor("bias", 0.0)));
    }

    pub(super) fn embedding(&mut self, width: usize, deviation: f32) -> Result<LayerKind, String> {
        let Features::Tokens { len, vocabulary } = self.features else {
            return Err(format!("an embedding needs tokens, not {}", self.features));
        };
        let name = format!("{}.weight", self.tensor_name("embedding", 1));
        let tensor = self.tensors.len();
        self.embedding.get_or_insert(Embedding { tensor, vocabulary, width, is_tied: false });
        let initial = Initial::Normal { deviation };
        self.tensors.push(TensorSpec { name, shape: vec![vocabulary, width], initial });
        let shape = EmbeddingShape { tokens: 0, first: 0, rows: vocabulary, columns: width };
        Ok(LayerKind::Embedding(EmbeddingLayer { positions: len, vocabulary, shape }))
    }

    pub(super) fn positions(&mut self, deviation: f32) -> Result<LayerKind, String> {
        let (len, width) = self.sequence("positions are added to")?;
        let name = format!("{}.weight", self.tensor_name("positions", 1));
        let initial = Initial::Normal { deviation };
        self.tensors.push(TensorSpec { name, shape: vec![len, width], initial });
        Ok(LayerKind::Positions(PositionsLayer { len, width }))
    }

    /// Adds the layers of attention: queries, keys and values; rotary positions, if it has them; attention;
    /// the mix of the heads.
    pub(super) fn attention(&mut self, attention: Attention) -> Result<usize, String> {
        let (len, inputs) = self.sequence("attention needs")?;
        let Attention { heads, key_value_heads: groups, causal, rotary, bias, .. } = attention;
        let Attention { deviation, output_deviation, .. } = attention;
        if heads == 0 || !inputs.is_multiple_of(heads) {
            return Err(format!("{heads} heads do not divide {inputs} features"));
        }
        if groups == 0 || !heads.is_multiple_of(groups) {
            return Err(format!("{groups} heads with keys and values do not divide {heads} heads"));
        }
        let width = inputs / heads;
        if width > WIDEST_HEAD {
            return Err(format!("a head would have {width} features, and {WIDEST_HEAD} are the limit"));
        }
        let shape = AttentionShape { rows: 0, positions: len, groups, heads: heads / groups, width, causal };
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
        self.push(LayerKind::Attention(AttentionLayer { shape }), self.tensors.len(), None)?;

        let first = self.tensors.len();
        self.linear_tensors(&format!("{name}.c_proj"), [inputs, inputs], bias, output_deviation);
        let mut after = linear_layer(Some(len), inputs, inputs, WeightLayout::OutputsByInputs, bias);
        after.heads = Some(Box::new(Heads::Before(shape)));
        self.push(LayerKind::Linear(after), first, None)?;
        Ok(1)
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

    /// Returns the number of positions, if the features are a sequence, and the features of each.
    fn vectors(&self, what: &str) -> Result<(Option<usize>, usize), String> {
        match self.features {
            Features::Flat(len) => Ok((None, len)),
            Features::Sequence { len, width } => Ok((Some(len), width)),
            Features::Image { .. } => {
                Err(format!("{what} needs features, not {}: flatten first", self.features))
            }
            Features::Tokens { .. } => {
                Err(format!("{what} needs features, not {}: an embedding makes some", self.features))
            }
        }
    }

    /// Returns the height, the width and the channels of images.
    fn image(&self, what: &str) -> Result<(usize, usize, usize), String> {
        match self.features {
            Features::Image { height, width, channels } => Ok((height, width, channels)),
            other => Err(format!("{what} images, not {other}")),
        }
    }

    /// Returns the number of positions and the features of each.
    fn sequence(&self, what: &str) -> Result<(usize, usize), String> {
        match self.features {
            Features::Sequence { len, width } => Ok((len, width)),
            other => Err(format!("{what} sequences of features, not {other}")),
        }
    }
}

/// Returns a linear layer without an activation.
fn linear_layer(
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
