//! The options of every training program.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::model_options::{ModelName, SizeList};
use crate::app::{CommonOptions, ProgressMode};
use crate::optim::{LearningRate, OptimizerSettings, Rule, ScheduleKind};
use crate::parallel::data::{Reduction, SyncSettings};

/// `on` or `off`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Switch {
    /// Yes
    On,
    /// No
    Off,
}

/// How inputs are brought to a common scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum StandardiseName {
    /// With the usual mean and deviation of MNIST, Fashion-MNIST (of their training sets) and CIFAR-10 (0.5 and 0.5); other data
    /// as they are
    Preset,
    /// With the mean and deviation of each feature, or of each channel of images, over the training samples
    Features,
    /// Not at all (bytes of images are divided by 255 all the same)
    None,
}

/// The rule by which parameters are updated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum OptimizerName {
    /// Stochastic gradient descent, with momentum
    Sgd,
    /// Adam
    Adam,
    /// Adam with decoupled weight decay
    Adamw,
}

/// How the learning rate goes on after the warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ScheduleName {
    /// The same all the time
    Constant,
    /// Times --decay-factor every --decay-interval steps
    Step,
    /// Down to --final-learning-rate along half a cosine
    Cosine,
    /// Down to --final-learning-rate along a line
    Linear,
}

/// How a bucket of gradients becomes new parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ReductionName {
    /// Whichever is faster for the size of the model
    Auto,
    /// Sum on every rank, update on every rank
    AllReduce,
    /// Sum and update each part on one rank, then gather
    ReduceScatter,
}

/// The options of every training program.
#[derive(Debug, Clone, Args)]
pub struct TrainOptions {
    #[command(flatten)]
    /// What was given; first, see there.
    pub given: super::given::Given,

    /// The network [default: lenet, with tensor_mlp mlp]
    #[arg(long, value_enum, help_heading = "Model")]
    pub model: Option<ModelName>,

    /// Sizes of the hidden layers of mlp, such as 128,64, or none
    #[arg(long, value_name = "SIZES", default_value = "128,64", help_heading = "Model")]
    pub hidden: SizeList,

    /// Width of deep-mlp, in features [default: that of the data, 1024 with synthetic data]
    #[arg(long, value_name = "N", help_heading = "Model")]
    pub width: Option<usize>,

    /// Layers of deep-mlp
    #[arg(long, value_name = "N", default_value_t = 4, help_heading = "Model")]
    pub layers: usize,

    /// Function between the layers of mlp
    #[arg(long, value_enum, default_value = "relu", help_heading = "Model")]
    pub activation: super::model_options::ActivationName,

    /// Leave the biases out of mlp
    #[arg(long, help_heading = "Model")]
    pub no_bias: bool,

    #[command(flatten)]
    /// Where the samples come from.
    pub data: super::data_options::DataOptions,

    /// Passes over the training samples
    #[arg(long, value_name = "N", default_value_t = 10, help_heading = "Training")]
    pub epochs: u64,

    /// Train for this many steps instead of --epochs
    #[arg(long, value_name = "N", help_heading = "Training")]
    pub steps: Option<u64>,

    /// Samples in a step, over all ranks
    #[arg(long, value_name = "N", default_value_t = 128, help_heading = "Training")]
    pub batch_size: usize,

    /// Parts that a replica's share of a batch is worked on in; gradients are exchanged after the last [default: 1, with pipeline
    /// two to four for each rank]
    #[arg(long, value_name = "K", help_heading = "Training")]
    pub micro_batches: Option<usize>,

    /// The rule by which parameters are updated
    #[arg(long, value_enum, default_value = "sgd", help_heading = "Training")]
    pub optimizer: OptimizerName,

    /// Learning rate, at the end of the warm-up [default: 0.05 with sgd, 0.001 with adam and adamw]
    #[arg(long, allow_negative_numbers = true, value_name = "RATE", help_heading = "Training")]
    pub learning_rate: Option<f64>,

    /// Momentum of sgd, from 0 to below 1
    #[arg(
        long,
        allow_negative_numbers = true,
        value_name = "M",
        default_value_t = 0.9,
        help_heading = "Training"
    )]
    pub momentum: f64,

    /// Nesterov's momentum in sgd
    #[arg(long, help_heading = "Training")]
    pub nesterov: bool,

    /// Weight decay, per unit of learning rate [default: 0, 0.01 with adamw]
    #[arg(long, allow_negative_numbers = true, value_name = "D", help_heading = "Training")]
    pub weight_decay: Option<f64>,

    /// How the learning rate goes on after the warm-up
    #[arg(long, value_enum, default_value = "cosine", help_heading = "Training")]
    pub learning_rate_schedule: ScheduleName,

    /// Steps over which the learning rate rises from near 0
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Training")]
    pub warmup_steps: u64,

    /// Where the cosine and linear schedules end
    #[arg(
        long,
        allow_negative_numbers = true,
        value_name = "RATE",
        default_value_t = 0.0,
        help_heading = "Training"
    )]
    pub final_learning_rate: f64,

    /// Steps between two decays of the step schedule
    #[arg(long, value_name = "N", default_value_t = 1000, help_heading = "Training")]
    pub decay_interval: u64,

    /// Factor of each decay of the step schedule
    #[arg(
        long,
        allow_negative_numbers = true,
        value_name = "F",
        default_value_t = 0.1,
        help_heading = "Training"
    )]
    pub decay_factor: f64,

    /// Shorten the gradient to this norm where it is longer [default: leave it]
    #[arg(long, allow_negative_numbers = true, value_name = "NORM", help_heading = "Training")]
    pub clip_norm: Option<f64>,

    /// Seed of the initial weights, the order of the samples and synthetic data
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Training")]
    pub seed: u64,

    #[command(flatten)]
    /// Where to compute, and how.
    pub machine: super::device_options::DeviceOptions,

    /// Threads of each rank [default: the cores that it may use, shared with the ranks that may use the same]
    #[arg(long, value_name = "N", help_heading = "Machine")]
    pub threads: Option<usize>,

    /// Largest bucket of gradients that is summed by one operation, in MB
    #[arg(
        long,
        allow_negative_numbers = true,
        value_name = "MB",
        default_value_t = 25.0,
        help_heading = "Machine"
    )]
    pub bucket_mb: f64,

    /// Exchange gradients while the backward pass goes on
    #[arg(long, value_enum, default_value = "on", help_heading = "Machine")]
    pub overlap: Switch,

    /// How a bucket of gradients becomes new parameters
    #[arg(long, value_enum, default_value = "auto", help_heading = "Machine")]
    pub reduction: ReductionName,

    /// Steps between checks that all replicas are the same, bit for bit, which they are before each checkpoint too; 0 for no check
    /// at all
    #[arg(long, value_name = "N", default_value_t = 1000, help_heading = "Machine")]
    pub check_replicas: u64,

    /// Epochs between evaluations on the test samples; 0 for one at the end only
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Output")]
    pub eval_every: u64,

    /// Write one row per step to this file: JSON lines if it ends in .jsonl or .json, else CSV; a run that is resumed goes on in it
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub metrics: Option<PathBuf>,

    /// Steps between log lines; 0 for none
    #[arg(long, value_name = "N", default_value_t = 100, help_heading = "Output")]
    pub log_every: u64,

    /// When to draw a progress bar
    #[arg(long, value_enum, default_value = "auto", help_heading = "Output")]
    pub progress: ProgressMode,

    #[command(flatten)]
    /// Where to go on from, and when to stop.
    pub checkpoints: super::checkpoint_options::CheckpointOptions,

    #[command(flatten)]
    /// What every program takes.
    pub common: CommonOptions,
}

impl TrainOptions {
    /// The network.
    pub fn model(&self) -> ModelName {
        self.model.unwrap_or(ModelName::Lenet)
    }

    /// The same options with `model` unless they name one.
    pub fn with_model(self, model: ModelName) -> TrainOptions {
        TrainOptions { model: Some(self.model.unwrap_or(model)), ..self }
    }

    /// Parts that a replica's share of a batch is worked on in.
    pub fn micro_batches(&self) -> usize {
        self.micro_batches.unwrap_or(1)
    }

    /// The learning rate at the end of the warm-up.
    pub fn base_learning_rate(&self) -> f64 {
        let usual = if self.optimizer == OptimizerName::Sgd { 0.05 } else { 0.001 };
        self.learning_rate.unwrap_or(usual)
    }

    /// The optimizer's rule and constants.
    pub fn optimizer_settings(&self) -> OptimizerSettings {
        let rule = match self.optimizer {
            OptimizerName::Sgd => Rule::Sgd,
            OptimizerName::Adam => Rule::Adam,
            OptimizerName::Adamw => Rule::AdamW,
        };
        let usual = if rule == Rule::AdamW { 0.01 } else { 0.0 };
        OptimizerSettings {
            momentum: self.momentum,
            nesterov: self.nesterov,
            weight_decay: self.weight_decay.unwrap_or(usual),
            ..OptimizerSettings::new(rule)
        }
    }

    /// The learning rate of every one of `num_steps` steps.
    pub fn schedule(&self, num_steps: u64) -> LearningRate {
        let kind = match self.learning_rate_schedule {
            ScheduleName::Constant => ScheduleKind::Constant,
            ScheduleName::Step => ScheduleKind::Step,
            ScheduleName::Cosine => ScheduleKind::Cosine,
            ScheduleName::Linear => ScheduleKind::Linear,
        };
        LearningRate {
            kind,
            base: self.base_learning_rate(),
            last: self.final_learning_rate,
            warmup_steps: self.warmup_steps,
            num_steps,
            interval: self.decay_interval,
            decay: self.decay_factor,
        }
    }

    /// How gradients are brought together.
    pub fn sync_settings(&self) -> SyncSettings {
        let reduction = match self.reduction {
            ReductionName::Auto => None,
            ReductionName::AllReduce => Some(Reduction::AllReduce),
            ReductionName::ReduceScatter => Some(Reduction::ReduceScatter),
        };
        SyncSettings {
            bucket_bytes: (self.bucket_mb * 1e6) as usize,
            reduction,
            overlap: self.overlap == Switch::On,
            clip_norm: self.clip_norm,
        }
    }
}
