//! The options of the samples.

use clap::{Args, ValueEnum};

use super::given::Given;
use super::range::{at_least_one, at_most};
use super::source::{SamplePart, ShapeText, SourceKind, SourceOptions};
use crate::Result;
use crate::dataset::{LARGEST_SIZE, TextSettings, TextTokens};

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
    /// On if all samples fit into half of the free memory of every node, or of its /dev/shm for several ranks
    Auto,
    /// All samples are read before training, each once in the whole job, and kept by the nodes
    On,
    /// Blocks of samples are read ahead, and kept as long as they are needed
    Off,
}

/// The order of the training samples in an epoch. Checkpoints record its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Shuffle {
    /// Full where all samples are in memory, else blocks; a resumed run keeps its order
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
    /// A token for each value of a byte, 256 in all
    Bytes,
}

/// The options of the samples.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Data")]
pub struct DataOptions {
    #[command(flatten)]
    /// The place of the samples.
    pub source: SourceOptions,

    /// Number of tokens of a sequence, unless a file has rows of tokens
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub context: usize,

    /// Tokens of a text
    #[arg(long, value_enum, default_value = "characters")]
    pub tokens: TokenKind,

    /// Number of tokens from the start of a training sample to that of the next; with 1, a sequence may
    /// start anywhere [default: --context, so that an epoch has each token once]
    #[arg(long, value_name = "N")]
    pub stride: Option<usize>,

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
}

impl DataOptions {
    /// Returns the cut of a text into samples.
    pub(in crate::train) fn text(&self) -> TextSettings {
        let tokens = match self.tokens {
            TokenKind::Characters => TextTokens::Characters,
            TokenKind::Bytes => TextTokens::Bytes,
        };
        self.source.text(tokens, self.context, self.stride.unwrap_or(self.context), SamplePart::Train)
    }

    /// Returns true if `source` is an HDF5 file with inputs, or several. Not collective.
    pub(in crate::train) fn is_of_file(source: &str) -> bool {
        SourceKind::of(source).for_file.is_none()
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
        self.source.check()
    }

    /// Refuses the options in `given` that are for other sources than `source`, for networks that read
    /// targets, or for sequences. Synthetic samples are of shape `synthetic`, unless an option says
    /// otherwise. Not collective.
    ///
    /// # Errors
    /// An option has no effect.
    pub(super) fn check_used(
        &self,
        given: &Given,
        source: &str,
        synthetic: ShapeText,
        reads_targets: bool,
    ) -> Result<()> {
        let kind = SourceKind::of(source);
        self.source.check_used_of(given, &kind, synthetic, SamplePart::Train, reads_targets)?;
        let (for_file, for_text) = (kind.for_file.as_deref(), kind.for_text.as_deref());
        let for_sequence = kind.for_sequence.as_deref();
        let for_characters = for_text.or(kind.for_characters.as_deref());
        given.refuse("data-store", for_file)?;
        let by_blocks = (self.shuffle == Shuffle::Blocks).then_some(()).and(for_file);
        given.refuse("shuffle", by_blocks)?;
        let full =
            matches!(self.shuffle, Shuffle::Full | Shuffle::Off).then_some("it is for --shuffle blocks");
        given.refuse("shuffle-window", for_file.or(full))?;
        let for_either = match (for_text, kind.for_synthetic) {
            (None, _) => None,
            (_, Some(_)) => Some(format!("it is for texts and synthetic tokens, and --data is {source}")),
            // the length of synthetic sequences
            (_, None) if self.source.synthetic_shape.is_some() => Some("--synthetic-shape is given".into()),
            (_, None) if matches!(synthetic, ShapeText::Tokens(_)) => None,
            (_, None) => Some("--synthetic-shape tokens:LENGTH makes sequences".into()),
        };
        given.refuse("context", for_either.as_deref().or(for_sequence))?;
        given.refuse("tokens", for_characters)?;
        given.refuse("stride", for_text.or(for_sequence))
    }
}
