//! Networks as trees of modules.

use std::ops::RangeInclusive;

use super::Loss;
use crate::device::{Activation, Gate};

/// The rates that dropout may have.
pub const DROPOUT_RATES: RangeInclusive<f32> = 0.0..=0.999;

/// The attention of a position of a sequence to others, with the linear layers before and after it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Attention {
    /// The number of heads.
    pub heads: usize,
    /// The number of heads with keys and values of their own, which divides that of the heads; the heads
    /// of a group share them.
    pub key_value_heads: usize,
    /// True if a position attends only to itself and to those before it.
    pub causal: bool,
    /// The base of the angles by which queries and keys are rotated, for rotary positions.
    pub rotary: Option<f32>,
    /// The probability that dropout sets a weight, a value of the softmax, to 0 in training.
    pub dropout: f32,
    /// True if the linear layers have biases.
    pub bias: bool,
    /// The standard deviation of the initial weights of the layer before, if not PyTorch's default.
    pub deviation: Option<f32>,
    /// The standard deviation of the initial weights of the layer after.
    pub output_deviation: Option<f32>,
}

/// A convolution of images with a square kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Convolution {
    /// Output channels.
    pub outputs: usize,
    /// Height and width of the kernel.
    pub kernel: usize,
    /// The distance between the places of the kernel.
    pub stride: usize,
    /// The rows and columns of zeros around an image, on each side.
    pub padding: usize,
    /// True for a layer with a bias.
    pub bias: bool,
}

/// The square windows of a pooling.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolWindows {
    /// Height and width of a window.
    pub size: usize,
    /// The distance between windows.
    pub stride: usize,
    /// The rows and columns around an image, on each side, that windows reach into: at most half of their
    /// size. A maximum ignores them, and a mean takes them for zeros.
    pub padding: usize,
}

impl PoolWindows {
    /// Returns windows beside each other.
    pub const fn of(size: usize) -> PoolWindows {
        PoolWindows { size, stride: size, padding: 0 }
    }
}

/// One module of a network.
#[derive(Debug, Clone, PartialEq)]
pub enum Module {
    /// y = x · Wᵀ + b, with PyTorch's names, memory layout and initial values, for each position of a
    /// sequence.
    Linear {
        /// Features per output row.
        outputs: usize,
        /// True for a layer with a bias.
        bias: bool,
        /// The standard deviation of normal initial weights, with which biases begin at 0; PyTorch's
        /// default without.
        deviation: Option<f32>,
    },
    /// y = x · W without bias, W normal with deviation 1/√width: a layer of `deep-mlp`.
    Product {
        /// Features per output row.
        outputs: usize,
    },
    /// Convolution with a square kernel: PyTorch's `Conv2d`.
    Convolution(Convolution),
    /// Maximum over square windows: PyTorch's `MaxPool2d`.
    MaxPool(PoolWindows),
    /// Mean over square windows: PyTorch's `AvgPool2d`.
    AveragePool(PoolWindows),
    /// Mean over the whole image, which leaves a feature for each channel.
    GlobalAverage,
    /// An elementwise function.
    Activation(Activation),
    /// Converts an image to a vector of features.
    Flatten,
    /// Normalises each row to mean 0 and variance 1 over its last dimension, then scales it by a weight
    /// and perhaps adds a bias: PyTorch's `LayerNorm`.
    LayerNorm {
        /// True for a layer with a bias.
        bias: bool,
    },
    /// Divides each row by the root of its mean of squares over its last dimension, then scales it by a
    /// weight: PyTorch's `RMSNorm`.
    RmsNorm,
    /// Normalises groups of channels of each image to mean 0 and variance 1, then scales each channel by a
    /// weight and adds a bias: PyTorch's `GroupNorm`.
    GroupNorm {
        /// The number of groups of channels.
        groups: usize,
    },
    /// Multiplies each element of the last dimension by a weight of its own: y = x · γ, the `LayerScale` of
    /// CaiT and ConvNeXt.
    LayerScale {
        /// The initial value of the weights. A small one, such as 1e-4, at the end of a residual's body makes
        /// the residual begin almost as the identity.
        initial: f32,
    },
    /// The product of the first half of the features with a function of the second: PyTorch's `GLU`, if that
    /// is the logistic function.
    GatedLinearUnit {
        /// The function of the second half.
        gate: Gate,
    },
    /// In training, sets values to 0 with probability `rate` and divides the others by 1 − rate: PyTorch's
    /// `Dropout`.
    Dropout {
        /// The probability of 0.
        rate: f32,
    },
    /// Replaces each token by its row of a table: PyTorch's `Embedding`.
    Embedding {
        /// The length of a row.
        width: usize,
        /// The standard deviation of the initial values; 1 is PyTorch's default.
        deviation: f32,
    },
    /// Adds a row of a table to each position.
    Positions {
        /// The standard deviation of the initial values.
        deviation: f32,
    },
    /// Attention by heads.
    Attention(Attention),
    /// A linear layer without bias whose weight is that of the network's embedding: an output for each
    /// token (Press and Wolf, "Using the output embedding to improve language models", 2017).
    TiedOutput,
    /// The sum of two branches with the same input: y = body(x) + shortcut(x). An empty shortcut is x
    /// itself.
    Residual {
        /// The modules of the body.
        body: Vec<Module>,
        /// The modules of the shortcut.
        shortcut: Vec<Module>,
    },
    /// A module whose tensors have names of the user's choice, such as `up.weight` and `up.bias`.
    Named {
        /// The name, without `.weight` or `.bias`.
        name: String,
        /// The module.
        module: Box<Module>,
    },
    /// Modules whose names begin with a prefix and a dot.
    Scope {
        /// The prefix.
        prefix: String,
        /// The modules.
        modules: Vec<Module>,
    },
}

impl Module {
    /// Returns a linear layer with PyTorch's initial values.
    pub fn linear(outputs: usize, bias: bool) -> Module {
        Module::Linear { outputs, bias, deviation: None }
    }

    /// Returns a convolution with stride 1, without padding, with a bias.
    pub fn convolution(outputs: usize, kernel: usize) -> Module {
        Module::Convolution(Convolution { outputs, kernel, stride: 1, padding: 0, bias: true })
    }

    /// Gives the tensors of this module a name.
    pub fn named(self, name: &str) -> Module {
        Module::Named { name: name.into(), module: Box::new(self) }
    }
}

/// The sizes of a GPT.
#[derive(Debug, Clone, Copy)]
pub struct GptSizes {
    /// The number of blocks.
    pub layers: usize,
    /// The number of heads of a block.
    pub heads: usize,
    /// The number of features.
    pub width: usize,
    /// True if linear layers and norms have biases.
    pub bias: bool,
    /// The rate of dropout, after the embeddings, in attention and at the end of each branch.
    pub dropout: f32,
}

/// The groups of channels of a residual network's norms.
pub const RESNET_GROUPS: usize = 8;

/// A network that can be built for an input shape.
#[derive(Debug, Clone, PartialEq)]
pub struct Network {
    /// The name on the command line and in results.
    pub name: String,
    /// The modules in order.
    pub modules: Vec<Module>,
    /// The loss that training minimises.
    pub loss: Loss,
}

impl Network {
    /// Returns a multilayer perceptron: linear layers of the `hidden` sizes, each followed by
    /// `activation`, then one with `outputs` outputs.
    pub fn mlp(hidden: &[usize], activation: Activation, bias: bool, outputs: usize, loss: Loss) -> Network {
        let mut modules = vec![Module::Flatten];
        for &size in hidden {
            modules.extend([Module::linear(size, bias), Module::Activation(activation)]);
        }
        modules.push(Module::linear(outputs, bias));
        Network { name: "mlp".into(), modules, loss }
    }

    /// Returns `layers` repetitions of x = gelu(x · W), without bias, all `width` wide; the loss is
    /// the mean of squares.
    pub fn deep_mlp(width: usize, layers: usize) -> Network {
        let layer = [Module::Product { outputs: width }, Module::Activation(Activation::Gelu)];
        let layers = std::iter::repeat_n(layer, layers).flatten();
        let modules = std::iter::once(Module::Flatten).chain(layers).collect();
        Network { name: "deep-mlp".into(), modules, loss: Loss::MeanOfSquares }
    }

    /// Returns LeNet as in the tutorials of distributed training: for 28 × 28 grey images, 21,840
    /// parameters with ten classes.
    pub fn lenet(classes: usize) -> Network {
        let relu = Module::Activation(Activation::Relu);
        let modules = vec![
            Module::convolution(10, 5),
            Module::MaxPool(PoolWindows::of(2)),
            relu.clone(),
            Module::convolution(20, 5),
            Module::MaxPool(PoolWindows::of(2)),
            relu.clone(),
            Module::Flatten,
            Module::linear(50, true),
            relu,
            Module::linear(classes, true),
        ];
        Network { name: "lenet".into(), modules, loss: Loss::CrossEntropy }
    }

    /// Returns the small network of the CIFAR-10 tutorials: for 32 × 32 colour images, 62,006
    /// parameters with ten classes.
    pub fn cifar(classes: usize) -> Network {
        let relu = Module::Activation(Activation::Relu);
        let mut modules = Vec::new();
        for outputs in [6, 16] {
            let pool = Module::MaxPool(PoolWindows::of(2));
            modules.extend([Module::convolution(outputs, 5), relu.clone(), pool]);
        }
        modules.push(Module::Flatten);
        for outputs in [120, 84] {
            modules.extend([Module::linear(outputs, true), relu.clone()]);
        }
        modules.push(Module::linear(classes, true));
        Network { name: "cifar".into(), modules, loss: Loss::CrossEntropy }
    }

    /// Returns a residual network for images (He et al., "Deep residual learning for image recognition",
    /// 2016, §4.2) with group norms in place of batch norms: three stages of `blocks` blocks each. The first
    /// stage has `width` channels; each further one halves the image's height and width and doubles the
    /// channels.
    pub fn resnet(blocks: usize, width: usize, classes: usize) -> Network {
        let convolution = |outputs, kernel, stride, name: &str| {
            let padding = kernel / 2;
            Module::Convolution(Convolution { outputs, kernel, stride, padding, bias: false }).named(name)
        };
        let norm = |name: &str| Module::GroupNorm { groups: RESNET_GROUPS }.named(name);
        let relu = Module::Activation(Activation::Relu);
        let block = |outputs, stride| Module::Residual {
            body: vec![
                convolution(outputs, 3, stride, "conv1"),
                norm("norm1"),
                relu.clone(),
                convolution(outputs, 3, 1, "conv2"),
                norm("norm2"),
            ],
            shortcut: if stride == 1 { vec![] } else { vec![convolution(outputs, 1, stride, "downsample")] },
        };
        let mut modules = vec![convolution(width, 3, 1, "conv1"), norm("norm1"), relu.clone()];
        for stage in 0..3 {
            for number in 0..blocks {
                let stride = if stage > 0 && number == 0 { 2 } else { 1 };
                let prefix = format!("layer{}.{number}", stage + 1);
                modules.push(Module::Scope { prefix, modules: vec![block(width << stage, stride)] });
                modules.push(relu.clone());
            }
        }
        modules.extend([Module::GlobalAverage, Module::linear(classes, true).named("fc")]);
        Network { name: "resnet".into(), modules, loss: Loss::CrossEntropy }
    }

    /// Returns a GPT: a decoder of transformer blocks with the norms before the branches, learnt positions
    /// and a tied output (Radford et al., "Language models are unsupervised multitask learners", 2019), with
    /// nanoGPT's names.
    ///
    /// Initial weights are normal, with the deviation of PyTorch's `Linear`, 1/√(3 · width), which is GPT-2's
    /// 0.02 at its width of 768; as there, the outputs of branches have 1/√(2 · layers) of that.
    pub fn gpt(sizes: GptSizes) -> Network {
        let GptSizes { layers, heads, width, bias, dropout } = sizes;
        let with_dropout = |modules: Vec<Module>| {
            let dropout = (dropout > 0.0).then_some(Module::Dropout { rate: dropout });
            modules.into_iter().chain(dropout).collect()
        };
        let norm = |name: &str| Module::LayerNorm { bias }.named(name);
        let own_deviation = 1.0 / (3.0 * width as f32).sqrt();
        let output_deviation = Some(own_deviation / (2.0 * layers as f32).sqrt());
        let linear = |outputs, deviation| Module::Linear { outputs, bias, deviation };
        let deviation = Some(own_deviation);
        let attention = Attention {
            heads,
            key_value_heads: heads,
            causal: true,
            rotary: None,
            dropout,
            bias,
            deviation,
            output_deviation,
        };
        let mlp = vec![
            linear(4 * width, deviation).named("c_fc"),
            Module::Activation(Activation::Gelu),
            linear(width, output_deviation).named("c_proj"),
        ];
        let branch = |body| Module::Residual { body, shortcut: vec![] };
        let block = vec![
            branch(with_dropout(vec![norm("ln_1"), Module::Attention(attention).named("attn")])),
            branch(with_dropout(vec![norm("ln_2"), Module::Scope { prefix: "mlp".into(), modules: mlp }])),
        ];
        let mut modules: Vec<Module> = with_dropout(vec![
            Module::Embedding { width, deviation: own_deviation }.named("wte"),
            Module::Positions { deviation: own_deviation }.named("wpe"),
        ]);
        let scope = |number| Module::Scope { prefix: format!("h.{number}"), modules: block.clone() };
        modules.extend((0..layers).map(scope));
        modules.push(norm("ln_f"));
        let modules = vec![Module::Scope { prefix: "transformer".into(), modules }, Module::TiedOutput];
        Network { name: "gpt".into(), modules, loss: Loss::CrossEntropy }
    }
}
