//! The options of the samples.

use std::path::Path;
use std::str::FromStr;

use clap::{Args, ValueEnum};

use super::given::Given;
use super::range::{at_least_one, at_most};
use crate::dataset::{self, LARGEST_SIZE, Targets, TextSettings};
use crate::nn::Features;
use crate::{Error, Result};

/// The standardisation of inputs. Checkpoints record its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Standardisation {
    /// Published mean and deviation of MNIST and Fashion-MNIST (training sets), and 0.5 and 0.5 for
    /// CIFAR-10; other data unchanged
    #[value(name = "preset")]
    Preset,
    /// Mean and deviation of each feature, or of each channel of images, over the training samples
    #[value(name = "features")]
    Features,
    /// No standardisation (bytes of images are still divided by 255)
    #[value(name = "none")]
    None,
}

/// The memory for the samples of files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DataStore {
    /// On if all samples fit into half of the free memory of every node
    Auto,
    /// All samples are read before training, each once in the whole job, and kept by the nodes
    On,
    /// Blocks of samples are read ahead, and kept as long as they are needed
    Off,
}

/// The order of the training samples in an epoch. Checkpoints record its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Shuffle {
    /// Full where all samples are in memory, else blocks
    #[value(name = "on")]
    On,
    /// The order of the file
    #[value(name = "off")]
    Off,
    /// Any sample may follow any other
    #[value(name = "full")]
    Full,
    /// Blocks in random order, with their samples mixed within a window of blocks
    #[value(name = "blocks")]
    Blocks,
}

/// The tokens of a text. Checkpoints have the vocabulary.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum TokenKind {
    /// A token for each character that is in the text
    Characters,
    /// A token for each byte, of 256
    Bytes,
}

/// The share of a text to test with if none is given.
const TEXT_TEST_FRACTION: f64 = 0.1;

/// The options of the samples.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Data")]
pub struct DataOptions {
    /// Source of the samples: digits (10,000 embedded in the program), synthetic, a directory with
    /// the files of MNIST, Fashion-MNIST or CIFAR-10, an HDF5 file, a pattern such as 'run-*.h5' of
    /// several, which are one set in the order of their names, shakespeare (a text embedded in the
    /// program), a text (.txt), or tokens as numbers of 16 bits (.bin) [default: digits, with --model
    /// gpt shakespeare]
    #[arg(long, value_name = "SOURCE")]
    pub data: Option<String>,

    /// Number of tokens of a sequence
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub context: usize,

    /// Tokens of a text
    #[arg(long, value_enum, default_value = "characters")]
    pub tokens: TokenKind,

    /// Number of tokens from the start of a training sample to that of the next; with 1, a sequence may
    /// start anywhere [default: --context, so that an epoch has each token once]
    #[arg(long, value_name = "N")]
    pub stride: Option<usize>,

    /// Dataset of the inputs in an HDF5 file: [samples, features], [samples, height, width] or
    /// [samples, channels, height, width]; bytes of images come as 0 to 1
    #[arg(long, value_name = "PATH", default_value = "/x")]
    pub inputs: String,

    /// Dataset of the targets in an HDF5 file: integers as class numbers from 0, or real values
    #[arg(long, value_name = "PATH", default_value = "/y")]
    pub targets: String,

    /// Fraction of the samples of an HDF5 file, or of the tokens of a text, at its end, to test with; from
    /// 0 to below 1 [default: 0, of a text 0.1]
    #[arg(long, value_name = "SHARE")]
    pub test_fraction: Option<f64>,

    /// HDF5 file, or pattern of files, with the samples to test with [default: the part of --data
    /// that --test-fraction gives]
    #[arg(long, value_name = "FILE", conflicts_with = "test_fraction")]
    pub test_data: Option<String>,

    /// Memory for the samples of HDF5 files
    #[arg(long, value_enum, default_value = "auto")]
    pub data_store: DataStore,

    /// Order of the training samples in an epoch
    #[arg(long, value_enum, default_value = "on")]
    pub shuffle: Shuffle,

    /// Number of blocks, of at least a megabyte, within which --shuffle blocks mixes samples
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub shuffle_window: usize,

    /// Standardisation of the inputs
    #[arg(long, value_enum, default_value = "preset")]
    pub standardise: Standardisation,

    /// Number of synthetic training samples; a tenth as many are generated for testing
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    pub synthetic_samples: usize,

    /// Shape of one synthetic sample: FEATURES, CHANNELSxHEIGHTxWIDTH, or tokens:LENGTH for a sequence of
    /// as many tokens as --synthetic-targets has classes [default: what the model takes]
    #[arg(long, value_name = "SHAPE")]
    pub synthetic_shape: Option<ShapeText>,

    /// Targets of synthetic data: classes:N or values:N
    #[arg(long, value_name = "KIND", default_value = "classes:10")]
    pub synthetic_targets: TargetsText,
}

/// The most samples that can be numbered.
const MOST_SAMPLES: usize = 1 << 40;

impl DataOptions {
    /// Returns the cut of a text into samples.
    pub(in crate::train) fn text(&self) -> TextSettings {
        TextSettings {
            bytes: self.tokens == TokenKind::Bytes,
            context: self.context,
            stride: self.stride.unwrap_or(self.context),
            test_fraction: self.test_fraction.unwrap_or(TEXT_TEST_FRACTION),
        }
    }

    /// Checks the ranges of these options. Not collective.
    ///
    /// # Errors
    /// An option is out of its range.
    pub(super) fn check(&self) -> Result<()> {
        at_least_one("--shuffle-window", Some(self.shuffle_window))?;
        at_least_one("--context", Some(self.context))?;
        at_most("--context", self.context, LARGEST_SIZE)?;
        at_least_one("--stride", self.stride)?;
        if let Some(share) = self.test_fraction.filter(|share| !(0.0..1.0).contains(share)) {
            let why = format!("it is {share}, but must be from 0 to below 1");
            return Err(Error::input("--test-fraction", why));
        }
        at_most("--synthetic-samples", self.synthetic_samples, MOST_SAMPLES)
    }

    /// Refuses the options in `given` that are for other sources or for other networks than
    /// `model`. Not collective.
    ///
    /// # Errors
    /// An option has no effect.
    pub(super) fn check_used(&self, given: &Given, source: &str, reads_targets: bool) -> Result<()> {
        let is_text = source == "shakespeare" || dataset::is_text(source);
        let is_file = !["digits", "synthetic"].contains(&source) && !is_text && !Path::new(source).is_dir();
        let for_file = (!is_file).then(|| format!("it is for HDF5 files, and --data is {source}"));
        let for_synthetic =
            (source != "synthetic").then(|| format!("it is for --data synthetic, and --data is {source}"));
        let (for_file, for_synthetic) = (for_file.as_deref(), for_synthetic.as_deref());
        let for_text = (!is_text).then(|| format!("it is for texts, and --data is {source}"));
        let for_text = for_text.as_deref();
        let for_sequence = for_text.filter(|_| source != "synthetic");
        let no_targets = (!reads_targets).then_some("the loss of deep-mlp reads no targets");
        given.refuse("inputs", for_file)?;
        given.refuse("targets", for_file.or(no_targets))?;
        given.refuse("test-fraction", for_file.and(for_text))?;
        given.refuse("test-data", for_file)?;
        given.refuse("data-store", for_file)?;
        let by_blocks = (self.shuffle == Shuffle::Blocks).then_some(()).and(for_file);
        given.refuse("shuffle", by_blocks)?;
        let full =
            matches!(self.shuffle, Shuffle::Full | Shuffle::Off).then_some("it is for --shuffle blocks");
        given.refuse("shuffle-window", for_file.or(full))?;
        given.refuse("context", for_sequence)?;
        given.refuse("tokens", for_text)?;
        given.refuse("stride", for_text)?;
        given.refuse("synthetic-samples", for_synthetic)?;
        given.refuse("synthetic-shape", for_synthetic)?;
        given.refuse("synthetic-targets", for_synthetic.or(no_targets))
    }
}

/// The most classes, or values of a target: a network has an output for each.
pub(in crate::train) const MOST_CLASSES: usize = 1 << 20;

/// The shape of a sample, as `784` or `3x32x32`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShapeText {
    /// Features or an image.
    Values(Features),
    /// A sequence of this length.
    Tokens(usize),
}

impl FromStr for ShapeText {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<ShapeText, String> {
        let size = |part: &str| part.parse().ok().filter(|size| (1..=LARGEST_SIZE).contains(size));
        if let Some(len) = text.strip_prefix("tokens:").and_then(size) {
            return Ok(ShapeText::Tokens(len));
        }
        let sizes: Option<Vec<usize>> = text.split('x').map(size).collect();
        let shape = match sizes.as_deref() {
            Some(&[len]) => Some(Features::Flat(len)),
            Some(&[channels, height, width]) => Some(Features::Image { height, width, channels }),
            _ => None,
        };
        let shape = shape.filter(|shape| shape.len() <= LARGEST_SIZE);
        shape.map(ShapeText::Values).ok_or_else(|| {
            format!(
                "expected a number of features such as 784, channels, height and width such as 3x32x32, or \
                 tokens:64, at most {LARGEST_SIZE} values in all"
            )
        })
    }
}

/// The kind of the targets, as `classes:10` or `values:3`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TargetsText(pub Targets);

impl FromStr for TargetsText {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<TargetsText, String> {
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
        assert_eq!("784".parse(), Ok(ShapeText::Values(Features::Flat(784))));
        assert_eq!("tokens:64".parse(), Ok(ShapeText::Tokens(64)));
        let image = Features::Image { height: 32, width: 16, channels: 3 };
        assert_eq!("3x32x16".parse(), Ok(ShapeText::Values(image)));
        assert!("3x32".parse::<ShapeText>().is_err() && "0".parse::<ShapeText>().is_err());
        assert!("1048576x1048576x1048576".parse::<ShapeText>().unwrap_err().contains("values in all"));
        assert_eq!("values:3".parse::<TargetsText>().unwrap().0, Targets::Values(3));
        assert!("classes:0".parse::<TargetsText>().is_err() && "10".parse::<TargetsText>().is_err());
    }
}
