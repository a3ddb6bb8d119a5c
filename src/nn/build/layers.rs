//! The layer of each kind of module. A new module has an arm in [`Builder::add_layer`] and its function here.

use super::{Builder, Built, Embedding, one_leaf};
use crate::device::{
    Activation, ConvolutionShape, EmbeddingShape, Gate, GroupNormShape, NormShape, PoolShape,
};
use crate::nn::layer::{
    ActivationLayer, ConvolutionLayer, DropoutLayer, EmbeddingLayer, FlattenLayer, GatedLayer, LayerKind,
    Norm, NormLayer, PoolLayer, Pooling, PositionsLayer, ScaleLayer, torch_tensors,
};
use crate::nn::network::{Convolution, PoolWindows};
use crate::nn::{DROPOUT_RATES, Features, Initial, Module, TensorSpec};

/// PyTorch's default ε of `LayerNorm`.
const NORM_EPSILON: f32 = 1e-5;

impl Builder {
    /// Adds the layer of `module`, fused with as many of those `following` it as it can perform, and returns
    /// their number, that of the module included.
    pub(super) fn add_layer(&mut self, module: &Module, following: &[Module]) -> Result<usize, String> {
        let first_tensor = self.tensors.len();
        let (kind, taken) = match *module {
            Module::Linear { outputs, bias, deviation } => {
                self.linear(outputs, bias, deviation, following)?
            }
            Module::Product { outputs } => self.product(outputs, following)?,
            Module::Convolution(convolution) => self.convolution(convolution, following)?,
            Module::MaxPool(windows) => (self.pool(Pooling::Max, windows)?, 1),
            Module::AveragePool(windows) => (self.pool(Pooling::Average, windows)?, 1),
            Module::GlobalAverage => (self.global_average()?, 1),
            Module::LayerNorm { bias } => (self.layer_norm(true, bias)?, 1),
            Module::RmsNorm => (self.layer_norm(false, false)?, 1),
            Module::GroupNorm { groups } => self.group_norm(groups, following)?,
            Module::LayerScale { initial } => (self.layer_scale(initial)?, 1),
            Module::GatedLinearUnit { gate } => (self.gated(gate)?, 1),
            Module::Dropout { rate } => (self.dropout(rate)?, 1),
            Module::Embedding { width, deviation } => (self.embedding(width, deviation)?, 1),
            Module::Positions { deviation } => (self.positions(deviation)?, 1),
            Module::Attention(attention) => return self.attention(attention),
            Module::TiedOutput => return self.tied_output(),
            Module::Activation(activation) => {
                let features = self.no_tokens("an activation")?;
                (LayerKind::Activation(ActivationLayer { activation, features }), 1)
            }
            Module::Flatten => match self.flatten()? {
                Some(kind) => (kind, 1),
                None => return Ok(1),
            },
            Module::Residual { .. } | Module::Named { .. } | Module::Scope { .. } => {
                unreachable!("modules of modules are no layers")
            }
        };
        self.push(kind, first_tensor, None)?;
        Ok(taken)
    }

    /// Makes a vector of the features, and returns the layer that it takes, if it takes one.
    fn flatten(&mut self) -> Result<Option<LayerKind>, String> {
        match self.features {
            Features::Flat(_) => Ok(None),
            // in one order already, as channels first and channels last are with one channel
            Features::Image { channels: 1, .. } | Features::Sequence { .. } => {
                self.features = Features::Flat(self.features.len());
                Ok(None)
            }
            Features::Tokens { .. } => {
                Err(format!("tokens have no features, but the input is {}", self.features))
            }
            Features::Image { height, width, channels } => {
                Ok(Some(LayerKind::Flatten(FlattenLayer { positions: height * width, channels })))
            }
        }
    }

    fn convolution(&mut self, convolution: Convolution, next: &[Module]) -> Built {
        let (height, width, channels) = self.image("a convolution needs")?;
        let Convolution { outputs, kernel, stride, padding, bias } = convolution;
        if padding >= kernel {
            return Err(format!("a padding of {padding} must be smaller than the kernel, {kernel}"));
        }
        if kernel == 0 || stride == 0 || height + 2 * padding < kernel || width + 2 * padding < kernel {
            let padded = padded_words(padding);
            return Err(format!(
                "a kernel of {kernel} × {kernel} does not fit images of {height} × {width}{padded}"
            ));
        }
        let name = self.tensor_name("conv", 1);
        self.tensors.extend(torch_tensors(&name, vec![outputs, channels, kernel, kernel], bias));
        // ReLU and max-pooling commute, so either order is one operation
        let is_pool = |module: &Module| stride == 1 && *module == Module::MaxPool(PoolWindows::of(2));
        let is_relu = |module: &Module| *module == Module::Activation(Activation::Relu);
        let (pool, relu) = match next {
            [a, b, ..] if is_pool(a) && is_relu(b) || is_relu(a) && is_pool(b) => (true, true),
            [a, ..] => (is_pool(a), is_relu(a)),
            [] => (false, false),
        };
        let taken = 1 + usize::from(pool) + usize::from(relu);
        // with one channel, the order of an image is that of features
        let flattens = relu && outputs > 1 && next.get(taken - 1) == Some(&Module::Flatten);
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
            flattens,
        };
        Ok((LayerKind::Convolution(ConvolutionLayer { shape, bias }), taken + usize::from(flattens)))
    }

    fn pool(&self, pooling: Pooling, windows: PoolWindows) -> Result<LayerKind, String> {
        let (height, width, channels) = self.image("pooling needs")?;
        let PoolWindows { size, stride, padding } = windows;
        if padding > size / 2 {
            return Err(format!("a padding of {padding} is more than half of windows of {size} × {size}"));
        }
        if size == 0 || stride == 0 || height + 2 * padding < size || width + 2 * padding < size {
            let padded = padded_words(padding);
            return Err(format!(
                "windows of {size} × {size} do not fit images of {height} × {width}{padded}"
            ));
        }
        let shape = PoolShape {
            window_height: size,
            window_width: size,
            stride_height: stride,
            stride_width: stride,
            padding,
            ..PoolShape::whole(height, width, channels)
        };
        Ok(LayerKind::Pool(PoolLayer { pooling, shape }))
    }

    fn global_average(&self) -> Result<LayerKind, String> {
        let (height, width, channels) = self.image("pooling needs")?;
        let shape = PoolShape::whole(height, width, channels);
        Ok(LayerKind::Pool(PoolLayer { pooling: Pooling::GlobalAverage, shape }))
    }

    /// Returns the features, which `what` needs; says so if they are tokens.
    fn no_tokens(&self, what: &str) -> Result<Features, String> {
        match self.features {
            tokens @ Features::Tokens { .. } => Err(format!("{what} needs features, not {tokens}")),
            features => Ok(features),
        }
    }

    /// Returns a normalisation over the innermost dimension, or a root mean square norm.
    fn layer_norm(&mut self, is_centred: bool, bias: bool) -> Result<LayerKind, String> {
        let features = self.no_tokens("a norm")?;
        self.norm_tensors(bias);
        let epsilon = if is_centred { NORM_EPSILON } else { f32::EPSILON };
        let positions = match features {
            Features::Sequence { len, .. } => Some(one_leaf(len)),
            _ => None,
        };
        let columns = features.last_dimension();
        let shape = NormShape { rows: 0, columns, epsilon, is_centred, positions };
        Ok(LayerKind::Norm(NormLayer { features, norm: Norm::Layer(shape), bias, adds: false }))
    }

    fn group_norm(&mut self, groups: usize, next: &[Module]) -> Built {
        let (height, width, channels) = self.image("a group norm needs")?;
        if groups == 0 || !channels.is_multiple_of(groups) {
            return Err(format!("{groups} groups do not divide {channels} channels"));
        }
        self.norm_tensors(true);
        let (positions, epsilon) = (height * width, NORM_EPSILON);
        let relu = next.first() == Some(&Module::Activation(Activation::Relu));
        let shape = GroupNormShape { rows: 0, positions, channels, groups, epsilon, relu };
        let layer = NormLayer { features: self.features, norm: Norm::Group(shape), bias: true, adds: false };
        Ok((LayerKind::Norm(layer), 1 + usize::from(relu)))
    }

    fn layer_scale(&mut self, initial: f32) -> Result<LayerKind, String> {
        let features = self.no_tokens("a layer scale")?;
        let name = format!("{}.weight", self.tensor_name("scale", 1));
        let initial = Initial::Constant { value: initial };
        self.tensors.push(TensorSpec { name, shape: vec![features.last_dimension()], initial });
        Ok(LayerKind::Scale(ScaleLayer { features }))
    }

    fn gated(&self, gate: Gate) -> Result<LayerKind, String> {
        let features = self.features;
        if matches!(features, Features::Tokens { .. }) || !features.last_dimension().is_multiple_of(2) {
            return Err(format!("a gated linear unit needs an even number of features, not {features}"));
        }
        Ok(LayerKind::Gated(GatedLayer { gate, features }))
    }

    /// Returns the number of the next module that draws, which the fusion of others does not change.
    pub(super) fn next_draw(&mut self) -> usize {
        self.num_draws += 1;
        self.num_draws - 1
    }

    fn dropout(&mut self, rate: f32) -> Result<LayerKind, String> {
        let features = self.features;
        if matches!(features, Features::Tokens { .. }) || !DROPOUT_RATES.contains(&rate) {
            let (least, most) = DROPOUT_RATES.into_inner();
            return Err(format!(
                "a dropout needs features and a rate from {least} to {most}, not {features} and {rate}"
            ));
        }
        Ok(LayerKind::Dropout(DropoutLayer::whole(rate, self.next_draw(), features)))
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

    fn embedding(&mut self, width: usize, deviation: f32) -> Result<LayerKind, String> {
        let Features::Tokens { len, vocabulary } = self.features else {
            return Err(format!("an embedding needs tokens, as texts have, not {}", self.features));
        };
        let name = format!("{}.weight", self.tensor_name("embedding", 1));
        let tensor = self.tensors.len();
        self.embedding.get_or_insert(Embedding { tensor, vocabulary, width, is_tied: false });
        let initial = Initial::Normal { deviation };
        self.tensors.push(TensorSpec { name, shape: vec![vocabulary, width], initial });
        let shape = EmbeddingShape { tokens: 0, first: 0, rows: vocabulary, columns: width };
        Ok(LayerKind::Embedding(EmbeddingLayer { positions: len, vocabulary, shape }))
    }

    fn positions(&mut self, deviation: f32) -> Result<LayerKind, String> {
        let (len, width) = self.sequence("positions are added to")?;
        let name = format!("{}.weight", self.tensor_name("positions", 1));
        let initial = Initial::Normal { deviation };
        self.tensors.push(TensorSpec { name, shape: vec![len, width], initial });
        Ok(LayerKind::Positions(PositionsLayer { len, width }))
    }
}

/// Returns what errors say of the padding of an image.
fn padded_words(padding: usize) -> String {
    if padding == 0 { String::new() } else { format!(", padded by {padding} on each side") }
}
