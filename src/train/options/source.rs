//! The options of the place where samples come from.

use std::path::Path;
use std::str::FromStr;

use clap::{Args, ValueEnum};

use super::given::Given;
use super::range::at_most;
use crate::app::FileOption;
use crate::dataset::{self, LARGEST_SIZE, Targets, TextSettings, TextTokens};
use crate::nn::Features;
use crate::{Error, Result};

/// The options of the place where samples come from, which training and prediction share.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Data")]
pub struct SourceOptions {
    /// Source of the samples: digits (10,000 embedded in the program), synthetic, a directory with
    /// the files of MNIST, Fashion-MNIST or CIFAR-10, an HDF5 file, a pattern such as 'run-*.h5' of
    /// several, which are one set in the order of their names, shakespeare (a text embedded in the
    /// program), a text (.txt), or tokens: numbers of 16 bits (.bin), or HDF5 files (one, a directory or a
    /// pattern) with a dataset tokens, one sequence or a row for each sample
    /// [default: digits, for gpt shakespeare]
    #[arg(long, value_name = "SOURCE")]
    pub data: Option<String>,

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

    /// Number of synthetic training samples; a tenth as many are generated for testing
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    pub synthetic_samples: usize,

    /// Shape of one synthetic sample: FEATURES, CHANNELSxHEIGHTxWIDTH, or tokens:LENGTH for a sequence of
    /// LENGTH tokens out of as many different ones as --synthetic-targets has classes [default: what the
    /// network takes]
    #[arg(long, value_name = "SHAPE")]
    pub synthetic_shape: Option<ShapeText>,

    /// Targets of synthetic data: classes:N or values:N
    #[arg(long, value_name = "KIND", default_value = "classes:10")]
    pub synthetic_targets: TargetsText,
}

/// The samples of a source that a program looks at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum SamplePart {
    /// The training samples, then the test samples
    All,
    /// The training samples
    Train,
    /// The test samples
    Test,
}

/// The share of a text to test with if none is given.
const TEXT_TEST_FRACTION: f64 = 0.1;

/// The sources that are no files.
const OWN_SOURCES: [&str; 3] = ["digits", "shakespeare", "synthetic"];

/// The most samples that can be numbered.
const MOST_SAMPLES: usize = 1 << 40;

/// The reasons for which a source refuses the options of other sources; `None` where it takes them.
pub(super) struct SourceKind<'a> {
    /// The name of the source.
    source: &'a str,
    /// The reason to refuse options of HDF5 files.
    pub(super) for_file: Option<String>,
    /// The reason to refuse options of texts and tokens.
    pub(super) for_text: Option<String>,
    /// The reason to refuse options of texts that are not tokens already.
    pub(super) for_characters: Option<String>,
    /// The reason to refuse options that cut a sequence into samples, if samples are rows of tokens.
    pub(super) for_sequence: Option<String>,
    /// The reason to refuse options of synthetic samples.
    pub(super) for_synthetic: Option<String>,
}

impl SourceKind<'_> {
    /// Returns the kind of `source`.
    pub(super) fn of(source: &str) -> SourceKind<'_> {
        let (has_characters, is_own) = (dataset::has_characters(source), OWN_SOURCES.contains(&source));
        let files = if is_own { Vec::new() } else { dataset::token_files(source) };
        let is_text = has_characters || !is_own && dataset::is_text_name(source) || !files.is_empty();
        let is_synthetic = source == "synthetic";
        let is_file = !is_own && !is_text && !Path::new(source).is_dir();
        let unless = |is_right: bool, what: &str| {
            let is_directory = !files.is_empty() && Path::new(source).is_dir();
            let kind =
                if is_directory { ", a directory of tokens; a pattern names files of samples" } else { "" };
            (!is_right).then(|| format!("it is for {what}, and --data is {source}{kind}"))
        };
        SourceKind {
            source,
            for_file: unless(is_file, "HDF5 files with inputs"),
            for_text: unless(is_text, "texts"),
            for_characters: unless(has_characters, "texts of characters"),
            for_sequence: dataset::has_token_rows(&files)
                .then(|| format!("each row of {source} is a sample as it is")),
            for_synthetic: unless(is_synthetic, "--data synthetic"),
        }
    }
}

impl SourceOptions {
    /// Checks the ranges of these options. Not collective.
    ///
    /// # Errors
    /// An option is out of its range.
    pub fn check(&self) -> Result<()> {
        if let Some(share) = self.test_fraction.filter(|share| !(0.0..1.0).contains(share)) {
            let why = format!("it is {share}, but must be from 0 to below 1");
            return Err(Error::input("--test-fraction", why));
        }
        at_most("--synthetic-samples", self.synthetic_samples, MOST_SAMPLES)
    }

    /// Returns the cut of a text into samples of `context` tokens, of which `part` is wanted.
    pub fn text(&self, tokens: TextTokens, context: usize, stride: usize, part: SamplePart) -> TextSettings {
        let default = if part == SamplePart::All { 0.0 } else { TEXT_TEST_FRACTION };
        TextSettings { tokens, context, stride, test_fraction: self.test_fraction.unwrap_or(default) }
    }

    /// Returns the path or the pattern of the samples, if the option names one.
    pub(super) fn path(&self) -> Option<&str> {
        self.data.as_deref().filter(|name| !OWN_SOURCES.contains(name))
    }

    /// Returns the files that these options name. Not collective.
    pub fn files(&self) -> Vec<FileOption<'_>> {
        let data = self.path().map(|path| {
            let has_tokens = Path::new(path).is_dir() && !dataset::token_files(path).is_empty();
            let is_read = if has_tokens { dataset::is_hdf5_name } else { dataset::is_published_name };
            FileOption::input_or_directory("--data", Path::new(path), is_read)
        });
        let test = self.test_data.as_deref().map(Path::new);
        data.into_iter().chain(test.map(|path| FileOption::input("--test-data", path))).collect()
    }

    /// Refuses the options in `given` that are for other sources than `source`, for other parts than `part`,
    /// or for networks that read targets. Synthetic samples are of shape `synthetic`. Not collective.
    ///
    /// # Errors
    /// An option has no effect.
    pub fn check_used(
        &self,
        given: &Given,
        source: &str,
        synthetic: ShapeText,
        part: SamplePart,
        reads_targets: bool,
    ) -> Result<()> {
        self.check_used_of(given, &SourceKind::of(source), synthetic, part, reads_targets)
    }

    /// Refuses options as [`SourceOptions::check_used`] does, for a source whose files have been looked at.
    pub(super) fn check_used_of(
        &self,
        given: &Given,
        kind: &SourceKind<'_>,
        synthetic: ShapeText,
        part: SamplePart,
        reads_targets: bool,
    ) -> Result<()> {
        let (source, for_file, for_text) = (kind.source, kind.for_file.as_deref(), kind.for_text.as_deref());
        let for_synthetic = kind.for_synthetic.as_deref();
        let no_targets =
            (!reads_targets).then_some("the loss of the network, mean-of-squares, reads no targets");
        given.refuse("inputs", for_file)?;
        given.refuse("targets", for_file.or(no_targets))?;
        let for_either =
            for_file.and(for_text).map(|_| format!("it is for HDF5 files and texts, and --data is {source}"));
        // a text is cut into samples from the start of each part, so parts of all have other samples
        let for_part =
            (part == SamplePart::All && for_text.is_some()).then_some("it is for --part train and test");
        given.refuse("test-fraction", for_either.as_deref().or(for_part))?;
        given.refuse("test-data", for_file)?;
        given.refuse("synthetic-samples", for_synthetic)?;
        given.refuse("synthetic-shape", for_synthetic)?;
        // of tokens, the targets are the vocabulary
        let has_tokens = matches!(self.synthetic_shape.unwrap_or(synthetic), ShapeText::Tokens(_));
        given.refuse("synthetic-targets", for_synthetic.or(no_targets.filter(|_| !has_tokens)))
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
