//! From options to a network.

use std::str::FromStr;

use clap::ValueEnum;

use super::TrainOptions;
use crate::dataset::Targets;
use crate::device::Activation;
use crate::nn::{Features, Loss, Model, Network};
use crate::{Error, Result};

/// The networks that programs know.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ModelName {
    /// Linear layers of the --hidden sizes, with --activation between them
    Mlp,
    /// --layers times gelu(x · W) of --width features, no bias; the loss is the mean of squares
    DeepMlp,
    /// Two convolutions and two linear layers, for grey images of 28 × 28
    Lenet,
    /// Two convolutions and three linear layers, for colour images of 32 × 32
    Cifar,
}

/// Functions between the layers of an mlp.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ActivationName {
    /// max(x, 0)
    Relu,
    /// x Φ(x), exact
    Gelu,
    /// Hyperbolic tangent
    Tanh,
}

/// Sizes separated by commas, or `none`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SizeList(pub Vec<usize>);

impl FromStr for SizeList {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<SizeList, String> {
        if text == "none" {
            return Ok(SizeList(Vec::new()));
        }
        let size = |part: &str| match part.trim().parse() {
            Ok(0) => Err("a size of 0 leaves nothing to learn with".to_owned()),
            Ok(size) => Ok(size),
            Err(_) => Err(format!("{part:?} is no whole number; expected sizes such as 128,64, or none")),
        };
        text.split(',').map(size).collect::<std::result::Result<_, _>>().map(SizeList)
    }
}

impl TrainOptions {
    /// The network that the options name, built for inputs of shape `features` and for `targets`.
    ///
    /// # Errors
    /// Network and data do not fit; the message has both shapes.
    pub fn build_model(&self, features: Features, targets: Targets) -> Result<Model> {
        let fail = |why: String| Err(Error::input("fitting the model to the data", why));
        let classes = || match targets {
            Targets::Classes(classes) => Ok(classes),
            other => Err(Error::input(
                "fitting the model to the data",
                format!("this model tells classes apart, but the targets are {}", describe(other)),
            )),
        };
        let network = match self.model() {
            ModelName::Mlp => {
                let activation = match self.activation {
                    ActivationName::Relu => Activation::Relu,
                    ActivationName::Gelu => Activation::Gelu,
                    ActivationName::Tanh => Activation::Tanh,
                };
                let (outputs, loss) = match targets {
                    Targets::Classes(classes) => (classes, Loss::CrossEntropy),
                    Targets::Values(values) => (values, Loss::MeanSquaredError),
                    Targets::Nothing => return fail("mlp needs targets, and there are none".into()),
                };
                Network::mlp(&self.hidden.0, activation, !self.no_bias, outputs, loss)
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
        };
        let hint = match (self.model(), features) {
            (ModelName::Lenet | ModelName::Cifar, Features::Flat(_)) => "; for tables there is --model mlp",
            (ModelName::Lenet | ModelName::Cifar, Features::Image { .. }) => {
                "; images in an HDF5 file are [samples, channels, height, width]"
            }
            _ => "",
        };
        network.build(features).map_err(|error| match error {
            Error::Input(text) => Error::Input(text + hint),
            other => other,
        })
    }
}

pub(super) fn describe(targets: Targets) -> String {
    match targets {
        Targets::Classes(classes) => format!("{classes} classes"),
        Targets::Values(1) => "one real value a sample".into(),
        Targets::Values(values) => format!("{values} real values a sample"),
        Targets::Nothing => "missing".into(),
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
