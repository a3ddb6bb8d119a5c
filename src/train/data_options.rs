//! Options about samples.

use std::str::FromStr;

use clap::Args;

use super::options::StandardiseName;
use crate::dataset::{LARGEST_SIZE, Targets};
use crate::nn::Features;

/// Options about samples.
#[derive(Debug, Clone, Args)]
pub struct DataOptions {
    /// digits (10,000 of them are in the program), synthetic, a directory with the files of MNIST, Fashion-MNIST or CIFAR-10,
    /// or an HDF5 file
    #[arg(long, value_name = "SOURCE", default_value = "digits", help_heading = "Data")]
    pub data: String,

    /// Dataset of the inputs in an HDF5 file: [samples, features], [samples, height, width] or [samples, channels, height,
    /// width]; bytes of images come as 0 to 1
    #[arg(long, value_name = "PATH", default_value = "/x", help_heading = "Data")]
    pub inputs: String,

    /// Dataset of the targets in an HDF5 file: integers as class numbers from 0, or real values
    #[arg(long, value_name = "PATH", default_value = "/y", help_heading = "Data")]
    pub targets: String,

    /// Share of the samples of an HDF5 file, at its end, to test with; from 0 to below 1
    #[arg(long, value_name = "SHARE", default_value_t = 0.0, help_heading = "Data")]
    pub test_fraction: f64,

    /// How inputs are brought to a common scale
    #[arg(long, value_enum, default_value = "preset", help_heading = "Data")]
    pub standardise: StandardiseName,

    /// Samples of synthetic data to train with; a tenth as many are made to test with
    #[arg(long, value_name = "N", default_value_t = 10_000, help_heading = "Data")]
    pub synthetic_samples: usize,

    /// Shape of one synthetic sample: FEATURES or CHANNELSxHEIGHTxWIDTH [default: what the model takes]
    #[arg(long, value_name = "SHAPE", help_heading = "Data")]
    pub synthetic_shape: Option<ShapeText>,

    /// Targets of synthetic data: classes:N or values:N
    #[arg(long, value_name = "KIND", default_value = "classes:10", help_heading = "Data")]
    pub synthetic_targets: TargetsText,
}

/// The most classes, or values of a target: a network has an output for each.
pub(super) const MOST_CLASSES: usize = 1 << 20;

/// `784` or `3x32x32`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShapeText(pub Features);

impl FromStr for ShapeText {
    type Err = String;

    fn from_str(text: &str) -> Result<ShapeText, String> {
        let sizes: Option<Vec<usize>> = text
            .split('x')
            .map(|part| part.parse().ok().filter(|size| (1..=LARGEST_SIZE).contains(size)))
            .collect();
        let shape = match sizes.as_deref() {
            Some(&[len]) => Some(Features::Flat(len)),
            Some(&[channels, height, width]) => Some(Features::Image { height, width, channels }),
            _ => None,
        };
        let shape = shape.filter(|shape| shape.len() <= LARGEST_SIZE);
        shape.map(ShapeText).ok_or_else(|| {
            format!(
                "expected a number of features such as 784, or channels, height and width such as 3x32x32, at most {LARGEST_SIZE} values in all"
            )
        })
    }
}

/// `classes:10` or `values:3`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TargetsText(pub Targets);

impl FromStr for TargetsText {
    type Err = String;

    fn from_str(text: &str) -> Result<TargetsText, String> {
        let number = |text: &str| text.parse().ok().filter(|number| (1..=MOST_CLASSES).contains(number));
        let parsed = match text.split_once(':') {
            Some(("classes", n)) => number(n).map(Targets::Classes),
            Some(("values", n)) => number(n).map(Targets::Values),
            _ => None,
        };
        parsed
            .map(TargetsText)
            .ok_or_else(|| format!("expected classes:N or values:N, N from 1 to {MOST_CLASSES}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_and_targets_in_words() {
        assert_eq!("784".parse::<ShapeText>().unwrap().0, Features::Flat(784));
        let image = Features::Image { height: 32, width: 16, channels: 3 };
        assert_eq!("3x32x16".parse::<ShapeText>().unwrap().0, image);
        assert!("3x32".parse::<ShapeText>().is_err() && "0".parse::<ShapeText>().is_err());
        assert!("1048576x1048576x1048576".parse::<ShapeText>().unwrap_err().contains("values in all"));
        assert_eq!("values:3".parse::<TargetsText>().unwrap().0, Targets::Values(3));
        assert!("classes:0".parse::<TargetsText>().is_err() && "10".parse::<TargetsText>().is_err());
    }
}
