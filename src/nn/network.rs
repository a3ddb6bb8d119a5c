//! Networks as trees of modules.

use super::Loss;
use crate::device::Activation;

/// One module of a network.
#[derive(Debug, Clone, PartialEq)]
pub enum Module {
    /// y = x · Wᵀ + b, with PyTorch's names, memory layout and initial values.
    Linear {
        /// Features per output row.
        outputs: usize,
        /// True for a layer with a bias.
        bias: bool,
    },
    /// y = x · W without bias, W normal with deviation 1/√width: a layer of `deep-mlp`.
    Product {
        /// Features per output row.
        outputs: usize,
    },
    /// Convolution with a square kernel, valid, stride 1, with bias.
    Convolution {
        /// Output channels.
        outputs: usize,
        /// Height and width of the kernel.
        kernel: usize,
    },
    /// Maximum over square windows, with a stride equal to their size.
    MaxPool {
        /// Height and width of the window.
        size: usize,
    },
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
    /// Gives the tensors of this module a name.
    pub fn named(self, name: &str) -> Module {
        Module::Named { name: name.into(), module: Box::new(self) }
    }
}

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
            modules.extend([Module::Linear { outputs: size, bias }, Module::Activation(activation)]);
        }
        modules.push(Module::Linear { outputs, bias });
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
        let convolution = |outputs| Module::Convolution { outputs, kernel: 5 };
        let modules = vec![
            convolution(10),
            Module::MaxPool { size: 2 },
            relu.clone(),
            convolution(20),
            Module::MaxPool { size: 2 },
            relu.clone(),
            Module::Flatten,
            Module::Linear { outputs: 50, bias: true },
            relu,
            Module::Linear { outputs: classes, bias: true },
        ];
        Network { name: "lenet".into(), modules, loss: Loss::CrossEntropy }
    }

    /// Returns the small network of the CIFAR-10 tutorials: for 32 × 32 colour images, 62,006
    /// parameters with ten classes.
    pub fn cifar(classes: usize) -> Network {
        let relu = Module::Activation(Activation::Relu);
        let mut modules = Vec::new();
        for outputs in [6, 16] {
            modules.extend([
                Module::Convolution { outputs, kernel: 5 },
                relu.clone(),
                Module::MaxPool { size: 2 },
            ]);
        }
        modules.push(Module::Flatten);
        for outputs in [120, 84] {
            modules.extend([Module::Linear { outputs, bias: true }, relu.clone()]);
        }
        modules.push(Module::Linear { outputs: classes, bias: true });
        Network { name: "cifar".into(), modules, loss: Loss::CrossEntropy }
    }
}
