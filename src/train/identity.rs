//! What a run is, in settings with names: what may not change when it goes on, and what may.

use serde_json::Value;

use super::TrainOptions;
use super::model_options::{ModelName, describe};
use super::samples::Samples;
use crate::app;
use crate::checkpoint::{self, Settings};
use crate::comm::{Grid, World, library_version};
use crate::nn::Model;

/// What decides the numbers of every step: with another value it would be another run.
pub fn config(options: &TrainOptions, model: &Model, samples: &Samples) -> Settings {
    let dataset = samples.train.dataset();
    let num_samples = dataset.num_samples();
    let mut config = Settings::new();
    let mut set = |name: &str, value: Value| config.insert(name.to_owned(), value);
    set("--model", model.name.as_str().into());
    match options.model() {
        ModelName::Mlp => {
            set("--hidden", options.hidden.0.clone().into());
            set("--activation", format!("{:?}", options.activation).to_lowercase().into());
            set("--no-bias", options.no_bias.into());
        }
        ModelName::DeepMlp => {
            set("--layers", options.layers.into());
        }
        ModelName::Lenet | ModelName::Cifar => {}
    }
    set("inputs", model.input.to_string().into());
    set("outputs", model.outputs.into());
    set("targets", describe(dataset.targets()).into());
    set("training samples", num_samples.into());
    set("checksum of the data", samples.checksum.clone().into());
    set("--batch-size", options.batch_size.min(num_samples).into());
    set("--optimizer", format!("{:?}", options.optimizer).to_lowercase().into());
    set("--seed", options.seed.into());
    set("--standardise", format!("{:?}", options.data.standardise).to_lowercase().into());
    config
}

/// What may change from one start to the next; the change is logged.
pub fn changeable(options: &TrainOptions, num_steps: u64) -> Settings {
    let optimizer = options.optimizer_settings();
    let schedule = format!("{:?}", options.learning_rate_schedule).to_lowercase();
    [
        ("--data", options.data.data.as_str().into()),
        ("--precision", options.machine.precision.name().into()),
        ("--learning-rate", options.base_learning_rate().into()),
        ("--learning-rate-schedule", schedule.into()),
        ("--warmup-steps", options.warmup_steps.into()),
        ("--final-learning-rate", options.final_learning_rate.into()),
        ("--decay-interval", options.decay_interval.into()),
        ("--decay-factor", options.decay_factor.into()),
        ("--momentum", optimizer.momentum.into()),
        ("--nesterov", optimizer.nesterov.into()),
        ("--weight-decay", optimizer.weight_decay.into()),
        ("--clip-norm", options.clip_norm.into()),
        ("steps in all", num_steps.into()),
    ]
    .map(|(name, value): (_, Value)| (name.to_owned(), value))
    .into()
}

/// Who writes a file. Not collective.
pub fn written_by(program: &str, world: &World, grid: &Grid, (threads, compares): (usize, bool)) -> Settings {
    let replicas = match grid.shape.data {
        1 => "one",
        _ if compares => "the same bits",
        _ => "not compared",
    };
    [
        ("program", program.into()),
        ("version", app::VERSION.into()),
        ("ranks", world.size().into()),
        ("data", grid.shape.data.into()),
        ("stage", grid.shape.stage.into()),
        ("tensor", grid.shape.tensor.into()),
        ("threads", threads.into()),
        ("replicas", replicas.into()),
        ("mpi", library_version().into()),
        ("hdf5", checkpoint::hdf5_version().into()),
    ]
    .map(|(name, value): (_, Value)| (name.to_owned(), value))
    .into()
}
