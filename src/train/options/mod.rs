//! The options of every training program.

mod audit;
mod check;
mod checkpoint;
mod data;
mod device;
mod evaluation;
mod given;
mod grid;
mod micro_batches;
mod model;
mod names;
mod optimizer;
mod peers;
mod pipeline;
mod range;
mod source;
mod tensor;
mod text;

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use crate::app::{CommonOptions, ProgressMode};
use crate::nn::Features;
use crate::parallel::data::SyncSettings;
use crate::parallel::zero::{Accumulation, ZeroStage};
use names::or_auto;

pub use audit::AuditOptions;
pub use check::check_files;
pub use checkpoint::{CheckpointOptions, Every, Resume};
pub use data::{DataOptions, DataStore, Shuffle, Standardisation};
pub use device::{AnyDevice, DeviceChoice, DeviceOptions};
pub use evaluation::EvaluationInterval;
pub use given::Given;
pub use grid::GridOptions;
pub(super) use micro_batches::check_micro_batches;
pub use model::{ModelName, ModelOptions, SizeList};
pub use names::{OrAuto, name_of};
pub use optimizer::OptimizerOptions;
pub use peers::map_peers;
pub use pipeline::{PipelineOptions, ScheduleChoice};
pub(super) use source::MOST_CLASSES;
pub use source::{SamplePart, ShapeText, SourceOptions};
pub use tensor::TensorOptions;

/// A switch: `on` or `off`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Switch {
    /// Yes
    On,
    /// No
    Off,
}

/// The options of every training program. `identity.rs` says which may change from one start of a
/// run to the next.
#[derive(Debug, Clone, Args)]
pub struct TrainOptions {
    #[command(flatten)]
    /// The options given, as the first field.
    pub given: Given,

    #[command(flatten)]
    /// The network.
    pub model: ModelOptions,

    #[command(flatten)]
    /// The samples.
    pub data: DataOptions,

    /// Passes over the training samples
    #[arg(long, value_name = "N", default_value_t = 10, help_heading = "Training")]
    pub epochs: u64,

    /// Train for this many steps instead of --epochs
    #[arg(long, value_name = "N", help_heading = "Training")]
    pub steps: Option<u64>,

    /// Samples in a step, over all ranks
    #[arg(long, value_name = "N", default_value_t = 128, help_heading = "Training")]
    pub batch_size: usize,

    /// Number of micro-batches into which a replica cuts its share of a batch (gradient accumulation);
    /// gradients are exchanged after the last, unless --accumulate says otherwise [default: in a pipeline,
    /// two to four for each of its ranks; with one stage on the CPU, unless --zero is 2 or 3, as many as keep
    /// large activations in the cache, as long as each has three activations or more for each parameter;
    /// else 1]
    #[arg(long, value_name = "K", help_heading = "Training")]
    pub micro_batches: Option<usize>,

    #[command(flatten)]
    /// The optimizer and its learning rate.
    pub optimizer: OptimizerOptions,

    /// Seed of the initial weights, the order of the samples, dropout and synthetic data
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Training")]
    pub seed: u64,

    #[command(flatten)]
    /// The device.
    pub machine: DeviceOptions,

    /// Measure the algorithms of the matrix products on a GPU after the first step, and use the fastest; this
    /// file keeps them, and runs that start with all of their products in it have the same bits [default: the
    /// algorithms that cuBLASLt names first]
    #[arg(long, value_name = "FILE", help_heading = "Machine")]
    pub tuned_products: Option<PathBuf>,

    /// Threads of each rank [default: one for each core that it may use; cores of several ranks are
    /// divided among them]
    #[arg(long, value_name = "N", help_heading = "Machine")]
    pub threads: Option<usize>,

    /// Largest bucket of gradients that is summed by one operation, in MB, or one layer if that is
    /// larger [default: 25, with --zero 2 or 3, which need memory for several buckets, 4]
    #[arg(long, allow_negative_numbers = true, value_name = "MB", help_heading = "Machine")]
    pub bucket_mb: Option<f64>,

    /// Exchange gradients during the backward pass
    #[arg(long, value_enum, default_value = "on", help_heading = "Machine")]
    pub overlap: Switch,

    /// Stage of ZeRO: what is divided among the replicas instead of kept whole by each
    #[arg(
        long,
        value_name = "STAGE",
        value_parser = or_auto::<ZeroStage>(
            "1; 0 with a single replica or fewer than 65,536 parameters a rank; never 2 or 3"
        ),
        default_value = "auto",
        help_heading = "Machine"
    )]
    pub zero: OrAuto<ZeroStage>,

    /// With --zero 2 or 3, the memory in which gradients of several micro-batches are added up
    #[arg(long, value_enum, default_value = "whole", help_heading = "Machine")]
    pub accumulate: Accumulation,

    /// Number of parts (leaves) into which sums over the batch and over divided features are cut; layouts
    /// with the same number end with the same bits [default: 8, or more if an axis has more ranks; a GPU has
    /// none]
    #[arg(long, value_name = "N", help_heading = "Machine")]
    pub leaves: Option<usize>,

    /// Keep only the activations between groups of layers, and repeat the forward pass of a group in
    /// the backward pass (activation checkpointing)
    #[arg(long, help_heading = "Machine")]
    pub recompute: bool,

    /// Steps between checks that all replicas are equal, bit for bit; there is also one before each
    /// checkpoint; 0 for no checks at all
    #[arg(long, value_name = "N", default_value_t = 1000, help_heading = "Machine")]
    pub check_replicas: u64,

    #[command(flatten)]
    /// The audits.
    pub audit: AuditOptions,

    /// Epochs (2) or, with the unit, steps (250steps) between evaluations on the test samples; 0 for one at
    /// the end only
    #[arg(long, value_name = "N|Nsteps", default_value = "1", help_heading = "Output")]
    pub eval_every: EvaluationInterval,

    /// Write one row per step to this file: JSON lines if it ends in .jsonl or .json, else CSV; a
    /// resumed run continues the file
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub metrics: Option<PathBuf>,

    /// Steps between log lines; 0 for none
    #[arg(long, value_name = "N", default_value_t = 100, help_heading = "Output")]
    pub log_every: u64,

    /// Condition for drawing a progress bar
    #[arg(long, value_enum, default_value = "auto", help_heading = "Output")]
    pub progress: ProgressMode,

    #[command(flatten)]
    /// Checkpoints, and stopping in time.
    pub checkpoints: CheckpointOptions,

    #[command(flatten)]
    /// The options of every program.
    pub common: CommonOptions,
}

impl TrainOptions {
    /// Returns these options, with `model` unless they name a network.
    pub fn with_model(mut self, model: ModelName) -> TrainOptions {
        if self.model.network.is_none() {
            self.model.model.get_or_insert(model);
        }
        self
    }

    /// Returns the source of the samples.
    pub fn source(&self) -> &str {
        let default = if self.model.name() == Some(ModelName::Gpt) { "shakespeare" } else { "digits" };
        self.data.source.data.as_deref().unwrap_or(default)
    }

    /// Returns the shape of synthetic samples, unless --synthetic-shape says otherwise: one that suits the
    /// network.
    pub fn synthetic_shape(&self) -> ShapeText {
        let image =
            |size, channels| ShapeText::Values(Features::Image { height: size, width: size, channels });
        match self.model.name() {
            None | Some(ModelName::Mlp) => ShapeText::Values(Features::Flat(784)),
            Some(ModelName::DeepMlp) => ShapeText::Values(Features::Flat(self.model.width.unwrap_or(1024))),
            Some(ModelName::Lenet) => image(28, 1),
            Some(ModelName::Cifar | ModelName::Resnet) => image(32, 3),
            Some(ModelName::Gpt) => ShapeText::Tokens(self.data.context),
        }
    }

    /// Returns the settings for the sum of gradients over the replicas.
    pub fn sync_settings(&self) -> SyncSettings {
        let are_divided = self.zero.0.is_some_and(ZeroStage::divides_gradients);
        let bucket_mb = self.bucket_mb.unwrap_or(if are_divided { 4.0 } else { 25.0 });
        SyncSettings {
            bucket_bytes: (bucket_mb * 1e6) as usize,
            zero: self.zero.0,
            accumulation: self.accumulate,
            overlap: self.overlap == Switch::On,
            clip_norm: self.optimizer.clip_norm,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{Activation, Precision};
    use crate::optim::{DecayScope, LearningRateScheduleKind, Rule};

    fn names<T: ValueEnum>() -> String {
        T::value_variants().iter().map(name_of).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn names_in_checkpoints_stay_as_they_are() {
        assert_eq!(names::<ModelName>(), "mlp deep-mlp lenet cifar resnet gpt");
        assert_eq!(names::<Activation>(), "relu gelu gelu-tanh silu tanh");
        assert!(names::<Rule>().starts_with("sgd adam adamw"));
        assert_eq!(names::<LearningRateScheduleKind>(), "constant step cosine linear");
        assert_eq!(names::<DecayScope>(), "all matrices");
        assert_eq!(names::<Precision>(), "f32 tf32 bf16");
        assert_eq!(names::<Standardisation>(), "preset features none");
        assert_eq!(names::<Shuffle>(), "on off full blocks");
    }
}
