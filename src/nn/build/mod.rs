//! The translation of a network's modules into layers and tensors.
//!
//! Layers stand in the order in which they run: those of a residual body, then those of its shortcut,
//! then the addition, unless a group norm that ends the last branch performs it. Value 0 is the input,
//! value i + 1 the output of layer i; [`LayerInputs`] says which values a layer reads.

mod attention;
mod layers;
mod linear;

use std::collections::{HashMap, HashSet};

use super::layer::{AddLayer, Layer, LayerInputs, LayerKind};
use super::text::head;
use super::{Features, LARGEST_SIZE, Model, Module, Network, TensorSpec};
use crate::device::Activation;
use crate::sums::{Leaves, Section};
use crate::{Error, Result};

/// The largest number of parameters of a network: 4 TB of `f32`.
const MOST_PARAMETERS: usize = 1 << 40;

impl Network {
    /// Builds the layers and tensors of this network for inputs of shape `input`. Modules that one
    /// device operation performs together become one layer.
    ///
    /// # Errors
    /// A size is 0, or a module does not fit its input.
    pub fn build(&self, input: Features) -> Result<Model> {
        let fail = |at: &str, why| Error::input(format!("building {} ({at})", self.name), why);
        if input.len() == 0 {
            return Err(fail("its inputs", format!("the inputs are {input}, and no size may be 0")));
        }
        if input.len() > LARGEST_SIZE {
            let why = format!("the inputs are {input}, and {LARGEST_SIZE} values are the limit");
            return Err(fail("its inputs", why));
        }
        let mut builder = Builder::new(input);
        builder
            .add_all(&self.modules, &[])
            .map_err(|ModuleError { at, why }| fail(&format!("module {at}"), why))?;
        let Builder { features, tensors, layers, inputs, .. } = builder;
        let model = Model {
            name: self.name.clone(),
            text: self.to_text(),
            layers,
            inputs,
            tensors,
            input,
            output: features,
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
}

/// Returns the terms of a sum over `len` terms in one leaf.
fn one_leaf(len: usize) -> Section {
    Section::whole(Leaves { len, num: 1 })
}

/// A module that does not fit.
struct ModuleError {
    /// The module's number, after those of the modules that it is in.
    at: String,
    why: String,
}

/// The kind of a layer, and the number of modules that it stands for.
type Built = std::result::Result<(LayerKind, usize), String>;

/// A partly built network.
struct Builder {
    /// The value that the next module reads, and its shape.
    value: usize,
    features: Features,
    tensors: Vec<TensorSpec>,
    /// The names of the tensors of all layers so far.
    tensor_names: HashSet<String>,
    layers: Vec<Layer>,
    inputs: Vec<LayerInputs>,
    /// The beginning of the names in this scope.
    prefix: String,
    /// The name that the user gave to the module.
    name: Option<String>,
    /// The numbers of modules so far, by the beginning of their names.
    counts: HashMap<String, usize>,
    /// The first embedding.
    embedding: Option<Embedding>,
    /// The number of modules so far that draw.
    num_draws: usize,
}

/// An embedding, whose weight a tied output uses.
#[derive(Clone, Copy)]
struct Embedding {
    /// The number of its tensor.
    tensor: usize,
    vocabulary: usize,
    width: usize,
    /// True if an output uses it.
    is_tied: bool,
}

impl Builder {
    fn new(features: Features) -> Builder {
        Builder {
            value: 0,
            features,
            tensors: Vec::new(),
            tensor_names: HashSet::new(),
            layers: Vec::new(),
            inputs: Vec::new(),
            prefix: String::new(),
            name: None,
            counts: HashMap::new(),
            embedding: None,
            num_draws: 0,
        }
    }

    /// Adds `modules`, the last fused with as many of those `following` them as one layer can perform, and
    /// returns the number of these.
    fn add_all(
        &mut self,
        modules: &[Module],
        following: &[Module],
    ) -> std::result::Result<usize, ModuleError> {
        let mut at = 0;
        while at < modules.len() {
            let module = &modules[at];
            let next = if at + 1 < modules.len() { &modules[at + 1..] } else { following };
            at += self.add(module, next).map_err(|error| error.within(at, module))?;
        }
        Ok(at - modules.len())
    }

    /// Adds `module`, fused with as many of those `following` it as one layer can perform, and returns
    /// their number, that of the module included.
    fn add(&mut self, module: &Module, following: &[Module]) -> std::result::Result<usize, ModuleError> {
        match module {
            Module::Residual { body, shortcut } => self.residual(body, shortcut, following),
            Module::Scope { prefix, modules } => {
                let longer = format!("{}{prefix}.", self.prefix);
                let outer = std::mem::replace(&mut self.prefix, longer);
                let taken = self.add_all(modules, following).map_err(|error| error.in_branch("its"))?;
                self.prefix = outer;
                Ok(1 + taken)
            }
            Module::Named { name, module } => {
                self.name = Some(name.clone());
                let num_tensors = self.tensors.len();
                let taken = self.add(module, following)?;
                self.name = None;
                if self.tensors.len() == num_tensors {
                    return Err(ModuleError::here(format!("it is named {name}, but has no tensors")));
                }
                Ok(taken)
            }
            _ => self.add_layer(module, following).map_err(ModuleError::here),
        }
    }

    /// Adds the branches of a residual, and their sum with a ReLU that follows. The sum is part of a group
    /// norm that ends the last branch, or a layer of its own.
    fn residual(
        &mut self,
        body: &[Module],
        shortcut: &[Module],
        following: &[Module],
    ) -> std::result::Result<usize, ModuleError> {
        let (start, features) = (self.value, self.features);
        self.add_all(body, &[]).map_err(|error| error.in_branch("body"))?;
        let (body_end, body_features) = (self.value, self.features);
        if body_end == start {
            return Err(ModuleError::here("the body of a residual needs a layer".into()));
        }
        (self.value, self.features) = (start, features);
        self.add_all(shortcut, &[]).map_err(|error| error.in_branch("shortcut"))?;
        if self.features != body_features {
            return Err(ModuleError::here(format!(
                "the branches of a residual must end alike, but the body ends with {body_features}, the \
                 shortcut with {}",
                self.features
            )));
        }
        let added = if self.value == start { start } else { body_end };
        self.value = self.layers.len();
        let relu = following.first() == Some(&Module::Activation(Activation::Relu));
        let taken = 1 + usize::from(relu);
        let last = self.layers.last_mut().zip(self.inputs.last_mut());
        if let Some((Layer { kind: LayerKind::Norm(norm), .. }, inputs)) = last
            && inputs.first != added
            && norm.takes_addition()
        {
            norm.add_before_relu(relu);
            inputs.added = Some(added);
            return Ok(taken);
        }
        let kind = LayerKind::Add(AddLayer { features: body_features, relu });
        self.push(kind, self.tensors.len(), Some(added)).map_err(ModuleError::here)?;
        Ok(taken)
    }

    /// Adds a layer that reads the current value, and to whose output the value `added` is added.
    fn push(
        &mut self,
        kind: LayerKind,
        first_tensor: usize,
        added: Option<usize>,
    ) -> std::result::Result<(), String> {
        let layer = Layer { kind, tensors: first_tensor..self.tensors.len() };
        let features = layer.output();
        if features.len() == 0 {
            return Err(format!("its outputs would be {features}, and no size may be 0"));
        }
        if features.len() > LARGEST_SIZE {
            return Err(format!("its outputs would be {features}, and no size may be above {LARGEST_SIZE}"));
        }
        for tensor in &self.tensors[first_tensor..] {
            if !self.tensor_names.insert(tensor.name.clone()) {
                return Err(format!("there is another tensor named {}", tensor.name));
            }
        }
        self.inputs.push(LayerInputs { first: self.value, added });
        self.layers.push(layer);
        (self.value, self.features) = (self.layers.len(), features);
        Ok(())
    }

    /// Returns the name of a module's tensors: the user's, or else that of a kind with its number,
    /// counted from `first`.
    fn tensor_name(&mut self, kind: &str, first: usize) -> String {
        let own = self.name.take().unwrap_or_else(|| {
            let count = self.counts.entry(format!("{}{kind}", self.prefix)).or_insert(first);
            *count += 1;
            format!("{kind}{}", *count - 1)
        });
        format!("{}{own}", self.prefix)
    }

    /// Returns the number of positions, if the features are a sequence, and the features of each.
    fn vectors(&self, what: &str) -> std::result::Result<(Option<usize>, usize), String> {
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
    fn image(&self, what: &str) -> std::result::Result<(usize, usize, usize), String> {
        match self.features {
            Features::Image { height, width, channels } => Ok((height, width, channels)),
            other => Err(format!("{what} images, not {other}")),
        }
    }

    /// Returns the number of positions and the features of each.
    fn sequence(&self, what: &str) -> std::result::Result<(usize, usize), String> {
        match self.features {
            Features::Sequence { len, width } => Ok((len, width)),
            other => Err(format!("{what} sequences of features, not {other}")),
        }
    }
}

impl ModuleError {
    fn here(why: String) -> ModuleError {
        ModuleError { at: String::new(), why }
    }

    /// Says that the module is number `at` of a list, or in that one.
    fn within(self, at: usize, module: &Module) -> ModuleError {
        ModuleError { at: format!("{at} `{}`{}", head(module), self.at), ..self }
    }

    /// Says that the module is in another's `branch`, or among its modules.
    fn in_branch(self, branch: &str) -> ModuleError {
        ModuleError { at: format!(", {branch} module {}", self.at), ..self }
    }
}
