//! Networks as a list of modules, like PyTorch's `Sequential`, and their translation into layers.

use super::layer::{
    ActivationLayer, ConvolutionLayer, FlattenLayer, Layer, LayerKind, LinearLayer, MaxPoolLayer,
    torch_tensors,
};
use super::{Features, Initial, LARGEST_SIZE, Loss, Model, TensorSpec};
use crate::device::{Activation, ConvolutionShape, PoolShape, WeightLayout};
use crate::sums::{Leaves, Section};
use crate::{Error, Result};

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

    /// Builds the layers and tensors of this network for inputs of shape `input`. Modules that one
    /// device operation performs together become one layer.
    ///
    /// # Errors
    /// A size is 0, or a module does not fit its input.
    pub fn build(&self, input: Features) -> Result<Model> {
        let mut builder =
            Builder { features: input, tensors: Vec::new(), layers: Vec::new(), counts: [0; 3] };
        if input.len() == 0 {
            return Err(self.misfit(0, format!("the inputs are {input}, and no size may be 0")));
        }
        if input.len() > LARGEST_SIZE {
            return Err(
                self.misfit(0, format!("the inputs are {input}, and {LARGEST_SIZE} values are the limit"))
            );
        }
        let mut at = 0;
        while at < self.modules.len() {
            let taken = builder.add(&self.modules[at..]).map_err(|why| self.misfit(at, why))?;
            at += taken;
        }
        let Builder { features, tensors, layers, .. } = builder;
        let model = Model {
            name: self.name.clone(),
            layers,
            tensors,
            input,
            outputs: features.len(),
            loss: self.loss,
        };
        let num_parameters = model.num_parameters();
        if num_parameters > MOST_PARAMETERS {
            let why =
                format!("it would have {num_parameters} parameters, and {MOST_PARAMETERS} are the limit");
            return Err(Error::input(format!("building {}", self.name), why));
        }
        Ok(model)
    }

    fn misfit(&self, module: usize, why: String) -> Error {
        Error::input(format!("building {} (module {module})", self.name), why)
    }
}

/// The largest number of parameters of a network: 4 TB of `f32`.
const MOST_PARAMETERS: usize = 1 << 40;

/// Returns the terms of a sum over `len` features in one leaf.
fn one_leaf(len: usize) -> Section {
    Section::whole(Leaves { len, num: 1 })
}

/// A partly built network.
struct Builder {
    features: Features,
    tensors: Vec<TensorSpec>,
    layers: Vec<Layer>,
    /// The numbers of convolutions, linear layers and products so far, from which PyTorch's
    /// tutorials number their names.
    counts: [usize; 3],
}

impl Builder {
    /// Adds the first of `modules`, fused with as many of those that follow as one layer can
    /// perform, and returns their number.
    fn add(&mut self, modules: &[Module]) -> std::result::Result<usize, String> {
        let first_tensor = self.tensors.len();
        let (kind, taken) = match modules[0] {
            Module::Linear { outputs, bias } => self.linear(outputs, bias, &modules[1..])?,
            Module::Product { outputs } => self.product(outputs, &modules[1..])?,
            Module::Convolution { outputs, kernel } => self.convolution(outputs, kernel, &modules[1..])?,
            Module::MaxPool { size } => (self.max_pool(size)?, 1),
            Module::Activation(activation) => {
                (LayerKind::Activation(ActivationLayer { activation, features: self.features }), 1)
            }
            Module::Flatten => match self.features {
                Features::Flat(_) => return Ok(1),
                // with one channel, channels first and channels last are the same order
                Features::Image { height, width, channels: 1 } => {
                    self.features = Features::Flat(height * width);
                    return Ok(1);
                }
                Features::Image { height, width, channels } => {
                    (LayerKind::Flatten(FlattenLayer { positions: height * width, channels }), 1)
                }
            },
        };
        let layer = Layer { kind, tensors: first_tensor..self.tensors.len() };
        self.features = layer.output();
        if self.features.len() == 0 {
            return Err(format!("its outputs would be {}, and no size may be 0", self.features));
        }
        if self.features.len() > LARGEST_SIZE {
            return Err(format!(
                "its outputs would be {}, and no size may be above {LARGEST_SIZE}",
                self.features
            ));
        }
        self.layers.push(layer);
        Ok(taken)
    }

    fn linear(
        &mut self,
        outputs: usize,
        bias: bool,
        next: &[Module],
    ) -> std::result::Result<(LayerKind, usize), String> {
        let inputs = self.flat("a linear layer")?;
        self.counts[1] += 1;
        self.tensors.extend(torch_tensors(&format!("fc{}", self.counts[1]), vec![outputs, inputs], bias));
        Ok(linear_layer(inputs, outputs, WeightLayout::OutputsByInputs, bias, next))
    }

    fn product(
        &mut self,
        outputs: usize,
        next: &[Module],
    ) -> std::result::Result<(LayerKind, usize), String> {
        let inputs = self.flat("a product")?;
        let name = format!("w.{}", self.counts[2]);
        self.counts[2] += 1;
        let initial = Initial::Normal { deviation: 1.0 / (inputs as f32).sqrt() };
        self.tensors.push(TensorSpec { name, shape: vec![inputs, outputs], initial });
        Ok(linear_layer(inputs, outputs, WeightLayout::InputsByOutputs, false, next))
    }

    fn convolution(
        &mut self,
        outputs: usize,
        kernel: usize,
        next: &[Module],
    ) -> std::result::Result<(LayerKind, usize), String> {
        let Features::Image { height, width, channels } = self.features else {
            return Err(format!("a convolution needs images, not {}", self.features));
        };
        if kernel == 0 || height < kernel || width < kernel {
            return Err(format!("a kernel of {kernel} × {kernel} does not fit images of {height} × {width}"));
        }
        self.counts[0] += 1;
        let name = format!("conv{}", self.counts[0]);
        self.tensors.extend(torch_tensors(&name, vec![outputs, channels, kernel, kernel], true));
        // ReLU and max-pooling commute, so either order is one operation
        let is_pool = |module: &Module| *module == Module::MaxPool { size: 2 };
        let is_relu = |module: &Module| *module == Module::Activation(Activation::Relu);
        let (pool, relu) = match next {
            [a, b, ..] if is_pool(a) && is_relu(b) || is_relu(a) && is_pool(b) => (true, true),
            [a, ..] => (is_pool(a), is_relu(a)),
            [] => (false, false),
        };
        let taken = 1 + usize::from(pool) + usize::from(relu);
        let shape = ConvolutionShape { rows: 0, channels, height, width, outputs, kernel, pool, relu };
        Ok((LayerKind::Convolution(ConvolutionLayer { shape }), taken))
    }

    fn max_pool(&self, size: usize) -> std::result::Result<LayerKind, String> {
        match self.features {
            Features::Image { height, width, channels } if size > 0 => {
                let shape = PoolShape { rows: 0, height, width, channels, size };
                Ok(LayerKind::MaxPool(MaxPoolLayer { shape }))
            }
            features => Err(format!("max-pooling of size {size} does not fit {features}")),
        }
    }

    fn flat(&self, what: &str) -> std::result::Result<usize, String> {
        match self.features {
            Features::Flat(len) => Ok(len),
            image => Err(format!("{what} needs features, not {image}: flatten first")),
        }
    }
}

/// Returns a linear layer fused with the activation that comes `next`, if one does, and the number of
/// modules that it stands for.
fn linear_layer(
    inputs: usize,
    outputs: usize,
    layout: WeightLayout,
    bias: bool,
    next: &[Module],
) -> (LayerKind, usize) {
    let (activation, taken) = match next.first() {
        Some(Module::Activation(activation)) => (*activation, 2),
        _ => (Activation::Identity, 1),
    };
    let (input_terms, output_terms) = (one_leaf(inputs), one_leaf(outputs));
    let layer = LinearLayer { inputs, outputs, layout, input_terms, output_terms, activation, bias };
    (LayerKind::Linear(layer), taken)
}
