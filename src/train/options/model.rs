//! The options of the network.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::builder::PossibleValue;
use clap::{Args, ValueEnum};

use super::given::Given;
use super::names::name_of;
use super::range::{at_least_one, at_most};
use super::text::read_text;
use crate::comm::Communicator;
use crate::dataset::{LARGEST_SIZE, Targets};
use crate::device::Activation;
use crate::nn::{DROPOUT_RATES, Features, GptSizes, Loss, Model, Network, RESNET_GROUPS};
use crate::{Error, Result};

/// The networks that programs know.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ModelName {
    /// Linear layers of the --hidden sizes, with --activation between them
    Mlp,
    /// --layers times gelu(x · W) of --width features, no bias, for measurements: the loss is the mean of
    /// the squares of the outputs and reads no targets
    DeepMlp,
    /// Two convolutions and two linear layers, for grey images of 28 × 28
    Lenet,
    /// Two convolutions and three linear layers, for colour images of 32 × 32
    Cifar,
    /// Residual blocks for images, 3 stages of --layers blocks (3 make the network of 20 layers of He et
    /// al., 2016), with --width channels in the first, and group norms
    Resnet,
    /// A transformer decoder of --layers blocks, --heads heads and --width features, for sequences of
    /// tokens
    Gpt,
}

/// The activations between the layers of an mlp. Checkpoints record their names.
impl ValueEnum for Activation {
    fn value_variants<'a>() -> &'a [Activation] {
        &[Activation::Relu, Activation::Gelu, Activation::GeluTanh, Activation::Silu, Activation::Tanh]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        let (name, help) = match self {
            Activation::Identity => return None,
            Activation::Relu => ("relu", "max(x, 0)"),
            Activation::Gelu => ("gelu", "x Φ(x), exact"),
            Activation::GeluTanh => ("gelu-tanh", "GELU, approximated with tanh"),
            Activation::Silu => ("silu", "x σ(x), with the logistic function σ"),
            Activation::Tanh => ("tanh", "Hyperbolic tangent"),
        };
        Some(PossibleValue::new(name).help(help))
    }
}

/// The width of gpt if none is given.
const GPT_WIDTH: usize = 128;

/// The width of resnet if none is given.
const RESNET_WIDTH: usize = 16;

/// A list of sizes separated by commas, or `none`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SizeList(pub Vec<usize>);

impl FromStr for SizeList {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<SizeList, String> {
        if text == "none" {
            return Ok(SizeList(Vec::new()));
        }
        SizeList::parse(text, "a size of 0 leaves nothing to learn with", "sizes such as 128,64, or none")
    }
}

impl SizeList {
    /// Parses sizes separated by commas; the errors say why a size is not `zero`, and what was
    /// `expected`.
    pub(super) fn parse(text: &str, zero: &str, expected: &str) -> std::result::Result<SizeList, String> {
        let size = |part: &str| match part.trim().parse() {
            Ok(0) => Err(zero.to_owned()),
            Ok(size) => Ok(size),
            Err(_) => Err(format!("{part:?} is not a whole number; expected {expected}")),
        };
        text.split(',').map(size).collect::<std::result::Result<_, _>>().map(SizeList)
    }
}

/// The options of the network.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Model")]
pub struct ModelOptions {
    /// The network [default: lenet, with tensor_mlp mlp]
    #[arg(long, value_enum)]
    pub model: Option<ModelName>,

    /// Text file with a network, a module a line, in place of --model; see --show-network [default: none]
    #[arg(long, value_name = "FILE", conflicts_with = "model")]
    pub network: Option<PathBuf>,

    /// Print the network as such a file, with a table of its layers in comments, and end
    #[arg(long)]
    pub show_network: bool,

    /// Sizes of the hidden layers of mlp, such as 128,64, or none
    #[arg(long, value_name = "SIZES", default_value = "128,64")]
    pub hidden: SizeList,

    /// Width of deep-mlp or gpt, in features, or of resnet, in channels (a multiple of 8) [default: with
    /// deep-mlp that of the data, 1024 with synthetic data; with gpt 128; with resnet 16]
    #[arg(long, value_name = "N")]
    pub width: Option<usize>,

    /// Number of layers of deep-mlp, of blocks of gpt, or of blocks of a stage of resnet
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub layers: usize,

    /// Rate of dropout of gpt: after the embeddings, of the weights of attention, at the end of each branch
    #[arg(long, value_name = "RATE", default_value_t = 0.0)]
    pub dropout: f32,

    /// Number of heads of gpt, which must divide the width
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub heads: usize,

    /// Function between the layers of mlp
    #[arg(long, value_enum, default_value = "relu")]
    pub activation: Activation,

    /// Leave the biases out of mlp or gpt
    #[arg(long)]
    pub no_bias: bool,
}

impl ModelOptions {
    /// Returns the name of the network, unless it is from a file.
    pub fn name(&self) -> Option<ModelName> {
        match self.network {
            Some(_) => None,
            None => Some(self.model.unwrap_or(ModelName::Lenet)),
        }
    }

    /// Returns false if the network is known to have a loss that reads no targets. That of a file is known if
    /// its `text` is.
    pub fn reads_targets(&self, text: Option<&str>) -> bool {
        let network = text.and_then(|text| self.network_of(text, Loss::CrossEntropy).ok());
        self.name() != Some(ModelName::DeepMlp)
            && network.is_none_or(|network| network.loss != Loss::MeanOfSquares)
    }

    /// Reads the network of a file, whose loss is `loss` unless the text says otherwise.
    fn network_of(&self, text: &str, loss: Loss) -> Result<Network> {
        let path = self.network.as_deref().unwrap_or(Path::new(""));
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        Network::from_text(text, &path.display().to_string(), &name, loss)
    }

    /// Returns the text of the network's file, if there is one. Rank 0 reads it for all ranks.
    /// Collective.
    ///
    /// # Errors
    /// The file cannot be read: the same error on every rank.
    pub(in crate::train) fn read_network(&self, all: &Communicator) -> Result<Option<String>> {
        self.network.as_deref().map(|path| read_text(all, path, "the network")).transpose()
    }

    /// Checks the ranges of these options. Not collective.
    ///
    /// # Errors
    /// An option is out of its range.
    pub(super) fn check(&self) -> Result<()> {
        at_most("--layers", self.layers, 10_000)?;
        at_most("--width", self.width.unwrap_or(1), LARGEST_SIZE)?;
        at_least_one("--width", self.width)?;
        at_least_one("--heads", Some(self.heads))?;
        if !DROPOUT_RATES.contains(&self.dropout) {
            let (least, most) = DROPOUT_RATES.into_inner();
            let why = format!("it is {}, but must be from {least} to {most}", self.dropout);
            return Err(Error::input("--dropout", why));
        }
        Ok(())
    }

    /// Refuses the options in `given` that are for another network. Not collective.
    ///
    /// # Errors
    /// An option has no effect.
    pub(super) fn check_used(&self, given: &Given) -> Result<()> {
        let for_mlp = (self.name() != Some(ModelName::Mlp)).then_some("it is for --model mlp");
        let is_gpt = self.name() == Some(ModelName::Gpt);
        let for_gpt = (!is_gpt).then_some("it is for --model gpt");
        let is_deep = is_gpt || matches!(self.name(), Some(ModelName::DeepMlp | ModelName::Resnet));
        let for_deep = (!is_deep).then_some("it is for --model deep-mlp, resnet and gpt");
        let for_biased = for_mlp.filter(|_| !is_gpt).map(|_| "it is for --model mlp and gpt");
        given.refuse("hidden", for_mlp)?;
        given.refuse("activation", for_mlp)?;
        given.refuse("no-bias", for_biased)?;
        given.refuse("width", for_deep)?;
        given.refuse("layers", for_deep)?;
        given.refuse("dropout", for_gpt)?;
        given.refuse("heads", for_gpt)
    }

    /// Builds the network, whose `text` is that of its file if it has one, for inputs of shape `features`
    /// and for `targets`.
    ///
    /// # Errors
    /// Network and data do not fit; the message has both shapes.
    pub fn build(&self, features: Features, targets: Targets, text: Option<&str>) -> Result<Model> {
        let Some(name) = self.name() else {
            return self.build_file(features, targets, text.unwrap_or_default());
        };
        let hint = match (name, features) {
            (ModelName::Lenet | ModelName::Cifar | ModelName::Resnet, Features::Flat(_)) => {
                "; for tables there is --model mlp"
            }
            (ModelName::Lenet | ModelName::Cifar | ModelName::Resnet, Features::Image { .. }) => {
                "; images in an HDF5 file are [samples, channels, height, width]"
            }
            _ => "",
        };
        self.network(name, features, targets)?.build(features).map_err(|error| match error {
            Error::Input(text) => Error::Input(text + hint),
            other => other,
        })
    }

    /// Returns the built-in network `name` for inputs of shape `features` and for `targets`.
    ///
    /// # Errors
    /// The network takes no such inputs, or predicts no such targets.
    fn network(&self, name: ModelName, features: Features, targets: Targets) -> Result<Network> {
        let fail = |why: String| Err(Error::input("fitting the model to the data", why));
        let classes = || match targets {
            Targets::Classes(classes) => Ok(classes),
            other => {
                let hint = match other {
                    Targets::Tokens { .. } => "for sequences there is --model gpt",
                    _ => "class numbers are whole numbers, and --model mlp fits values",
                };
                let why = format!("{} predicts classes, but the targets are {other}; {hint}", name_of(&name));
                Err(Error::input("fitting the model to the data", why))
            }
        };
        Ok(match name {
            ModelName::Mlp => {
                let (outputs, loss) = match targets {
                    Targets::Classes(classes) => (classes, Loss::CrossEntropy),
                    Targets::Values(values) => (values, Loss::MeanSquaredError),
                    Targets::Tokens { .. } => {
                        return fail("mlp predicts no tokens; for sequences there is --model gpt".into());
                    }
                    Targets::Nothing => return fail("mlp needs targets, and there are none".into()),
                };
                Network::mlp(&self.hidden.0, self.activation, !self.no_bias, outputs, loss)
            }
            ModelName::DeepMlp => {
                let width = self.width.unwrap_or(features.len());
                if width != features.len() {
                    return fail(format!(
                        "--width is {width}, but a sample has {} values; leave it out or make them equal",
                        features.len()
                    ));
                }
                if self.layers == 0 {
                    return fail("--layers is 0, but must be at least 1".into());
                }
                Network::deep_mlp(width, self.layers)
            }
            ModelName::Lenet => Network::lenet(classes()?),
            ModelName::Cifar => Network::cifar(classes()?),
            ModelName::Resnet => {
                let width = self.width.unwrap_or(RESNET_WIDTH);
                if !width.is_multiple_of(RESNET_GROUPS) {
                    return fail(format!(
                        "--width is {width}, but must be a multiple of {RESNET_GROUPS}, because the norms of \
                         resnet have {RESNET_GROUPS} groups of channels"
                    ));
                }
                Network::resnet(self.layers, width, classes()?)
            }
            ModelName::Gpt => {
                let (Features::Tokens { .. }, Targets::Tokens { .. }) = (features, targets) else {
                    return fail(format!(
                        "gpt needs sequences of tokens, but the samples are {features}; choose a text: \
                         --data FILE.txt, or shakespeare"
                    ));
                };
                Network::gpt(GptSizes {
                    layers: self.layers,
                    heads: self.heads,
                    width: self.width.unwrap_or(GPT_WIDTH),
                    bias: !self.no_bias,
                    dropout: self.dropout,
                })
            }
        })
    }

    /// Builds the network of a file.
    fn build_file(&self, features: Features, targets: Targets, text: &str) -> Result<Model> {
        let loss = match targets {
            Targets::Classes(_) | Targets::Tokens { .. } => Loss::CrossEntropy,
            Targets::Values(_) => Loss::MeanSquaredError,
            Targets::Nothing => Loss::MeanOfSquares,
        };
        let model = self.network_of(text, loss)?.build(features)?;
        if model.num_parameters() == 0 {
            let why = "no module has parameters, so there is nothing to train";
            return Err(Error::input(format!("building {}", model.name), why));
        }
        if model.loss == Loss::MeanOfSquares || targets.suit(model.loss, model.output) {
            return Ok(model);
        }
        let outputs = model.output;
        let wanted = match model.loss {
            Loss::CrossEntropy => "cross-entropy needs classes or tokens, and an output for each",
            _ if matches!(outputs, Features::Image { channels: 2.., .. }) => {
                "mean-squared-error needs a real value for each output, in one order: end with flatten"
            }
            _ => "mean-squared-error needs a real value for each output",
        };
        let why = format!("{} gives {outputs}, and the targets are {targets}: {wanted}", model.name);
        Err(Error::input("fitting the model to the data", why))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_sizes() {
        assert_eq!("128,64".parse::<SizeList>().unwrap().0, [128, 64]);
        assert_eq!("none".parse::<SizeList>().unwrap().0, [0; 0]);
        assert!("128,0".parse::<SizeList>().unwrap_err().contains("size of 0"));
        assert!("12x".parse::<SizeList>().unwrap_err().contains("\"12x\""));
        assert!("".parse::<SizeList>().is_err());
    }
}
