//! The settings that identify a run in its checkpoints.
//!
//! Every option is classed here, and only here: as *identity*, which may not change when a run is
//! resumed; as *changeable*, whose changes are logged; or as neither. The structs of options are
//! destructured without `..`, so a new option does not compile until it is classed.

use serde_json::Value;
use xxhash_rust::xxh3::xxh3_64;

use super::options::{
    CheckpointOptions, DataOptions, DeviceOptions, ModelName, ModelOptions, OptimizerOptions, Shuffle,
    SourceOptions, TrainOptions, name_of,
};
use super::samples::Samples;
use crate::app::{self, CommonOptions};
use crate::checkpoint::{self, INPUTS_SETTING, STANDARDISE_SETTING, Settings, TOKENS_SETTING};
use crate::comm::{Grid, World, library_version};
use crate::dataset::{Order, Standardise};
use crate::nn::Model;
use crate::optim::Rule;
use crate::parallel::batch::Summation;

/// The name of the setting with the network.
pub(super) const MODEL: &str = "--model";
/// The name of the setting with the optimizer's rule.
pub(super) const OPTIMIZER: &str = "--optimizer";
/// The name of the setting with the momentum of SGD.
pub(super) const MOMENTUM: &str = "--momentum";
/// The name of the setting with the shape of the learning-rate schedule.
pub(super) const LEARNING_RATE_SCHEDULE: &str = "--learning-rate-schedule";
/// The name of the setting with the number of leaves of canonical sums.
pub(super) const LEAVES: &str = "--leaves";
/// The name of the setting with the order of the samples.
pub(super) const SHUFFLE: &str = "--shuffle";
/// The name of the setting with a hash of the cut of the samples into blocks, which earlier versions lack.
pub(super) const BLOCK_CUT: &str = "cut into blocks";
/// The name of the setting with the number of steps of the whole run.
pub(super) const STEPS_IN_ALL: &str = "steps in all";

/// The settings that identify a run in its checkpoints.
#[derive(Debug, Clone)]
pub(super) struct Identity {
    /// The settings that determine the numbers of every step; a run with other values is another
    /// run.
    pub(super) config: Settings,
    /// The settings that may change from one start of a run to the next.
    pub(super) changeable: Settings,
    /// The standardisation of the inputs, which another program needs to use the network.
    pub(super) standardise: Vec<[f32; 3]>,
}

impl Identity {
    /// Returns the settings of a run of `num_steps` steps that trains `model` with `samples`.
    pub(super) fn new(options: &TrainOptions, model: &Model, samples: &Samples, num_steps: u64) -> Identity {
        let TrainOptions {
            given: _,
            model: model_options,
            data,
            epochs: _,
            steps: _,
            batch_size,
            micro_batches: _,
            optimizer,
            seed,
            machine,
            threads: _,
            bucket_mb: _,
            overlap: _,
            zero: _,
            accumulate: _,
            // by `keep_leaves`, once the layout is known
            leaves: _,
            recompute: _,
            check_replicas: _,
            audit: _,
            eval_every: _,
            metrics: _,
            tuned_products,
            log_every: _,
            progress: _,
            checkpoints,
            common,
        } = options;
        let CommonOptions { trace: _, watchdog: _, verbose: _, quiet: _ } = common;
        let mut identity = Identity {
            config: Settings::new(),
            changeable: Settings::new(),
            standardise: samples.train.standardise().map_or_else(Vec::new, Standardise::numbers),
        };
        let dataset = samples.train.dataset();
        identity.must_stay(INPUTS_SETTING, model.input.to_string());
        identity.must_stay("outputs", model.output.len());
        identity.must_stay("targets", dataset.targets().to_string());
        identity.must_stay("training samples", dataset.num_samples());
        if let Some(tokeniser) = dataset.tokeniser() {
            identity.must_stay(TOKENS_SETTING, tokeniser.to_text());
        }
        identity.must_stay("checksum of the data", samples.checksum.clone());
        identity.must_stay("--batch-size", *(batch_size.min(&dataset.num_samples())));
        identity.must_stay("--seed", *seed);
        identity.may_change(STEPS_IN_ALL, num_steps);
        identity.class_order(samples.train.sampler().order());
        identity.class_model(model_options, model);
        identity.class_data(data, options.source());
        identity.class_optimizer(optimizer);
        identity.class_device(machine);
        if let Some(path) = tuned_products {
            identity.may_change("--tuned-products", path.to_string_lossy());
        }
        Identity::class_checkpoints(checkpoints);
        identity
    }

    /// Records the number of leaves of canonical sums.
    pub(super) fn keep_leaves(&mut self, summation: Summation) {
        if let Summation::Canonical { num_leaves } = summation {
            self.must_stay(LEAVES, num_leaves);
        }
    }

    fn must_stay(&mut self, name: &str, value: impl Into<Value>) {
        self.config.insert(name.to_owned(), value.into());
    }

    fn may_change(&mut self, name: &str, value: impl Into<Value>) {
        self.changeable.insert(name.to_owned(), value.into());
    }

    fn class_model(&mut self, options: &ModelOptions, model: &Model) {
        // the shapes of tensors show the width
        let ModelOptions {
            model: _,
            network: _,
            show_network: _,
            hidden,
            width: _,
            layers,
            heads,
            dropout,
            activation,
            no_bias,
        } = options;
        self.must_stay(MODEL, model.name.as_str());
        match options.name() {
            None => self.must_stay("--network", format!("{:016x}", xxh3_64(model.text.as_bytes()))),
            Some(ModelName::Mlp) => {
                self.must_stay("--hidden", hidden.0.clone());
                self.must_stay("--activation", name_of(activation));
                self.must_stay("--no-bias", *no_bias);
            }
            Some(ModelName::DeepMlp) => self.must_stay("--layers", *layers),
            Some(ModelName::Gpt) => {
                self.must_stay("--layers", *layers);
                self.must_stay("--heads", *heads);
                self.may_change("--dropout", dropout.to_string());
                self.must_stay("--no-bias", *no_bias);
            }
            Some(ModelName::Resnet) => {
                self.must_stay("--layers", *layers);
            }
            Some(ModelName::Lenet | ModelName::Cifar) => {}
        }
    }

    /// Records the order of the samples if it is by blocks or that of the file: the one in use, also if
    /// it was chosen because the samples do not fit into memory.
    fn class_order(&mut self, order: &Order) {
        if *order == Order::Sequential {
            self.must_stay(SHUFFLE, name_of(&Shuffle::Off));
        }
        if let Order::Blocks(order) = order {
            self.must_stay(SHUFFLE, name_of(&Shuffle::Blocks));
            self.must_stay("--shuffle-window", order.window());
            self.must_stay("blocks of samples", order.blocks().num_blocks());
            self.must_stay(BLOCK_CUT, format!("{:016x}", order.blocks().hash()));
        }
    }

    fn class_data(&mut self, options: &DataOptions, source: &str) {
        // the checksum and the shapes of the samples stand for all options that choose them
        let DataOptions {
            source: place,
            context: _,
            tokens: _,
            stride: _,
            data_store: _,
            shuffle: _,
            shuffle_window: _,
            standardise,
        } = options;
        let SourceOptions {
            data: _,
            inputs: _,
            targets: _,
            test_fraction: _,
            test_data: _,
            synthetic_samples: _,
            synthetic_shape: _,
            synthetic_targets: _,
        } = place;
        self.must_stay(STANDARDISE_SETTING, name_of(standardise));
        self.may_change("--data", source);
    }

    fn class_optimizer(&mut self, options: &OptimizerOptions) {
        let OptimizerOptions {
            optimizer,
            learning_rate: _,
            momentum,
            nesterov,
            beta1: _,
            beta2: _,
            epsilon,
            weight_decay: _,
            decay,
            learning_rate_schedule,
            warmup_steps,
            final_learning_rate,
            decay_interval,
            decay_factor,
            clip_norm,
        } = options;
        self.must_stay(OPTIMIZER, name_of(optimizer));
        // the values in use, also of options that were not given
        self.may_change("--learning-rate", options.schedule(1).base);
        let settings = options.settings();
        self.may_change("--weight-decay", settings.weight_decay);
        if matches!(optimizer, Rule::Adam | Rule::AdamW | Rule::Lion) {
            let [beta1, beta2] = settings.betas;
            self.may_change("--beta1", beta1);
            self.may_change("--beta2", beta2);
            self.may_change("--epsilon", *epsilon);
        }
        if settings.weight_decay != 0.0 {
            self.may_change("--decay", name_of(decay));
        }
        self.may_change(MOMENTUM, *momentum);
        self.may_change("--nesterov", *nesterov);
        self.may_change(LEARNING_RATE_SCHEDULE, name_of(learning_rate_schedule));
        self.may_change("--warmup-steps", *warmup_steps);
        self.may_change("--final-learning-rate", *final_learning_rate);
        self.may_change("--decay-interval", *decay_interval);
        self.may_change("--decay-factor", *decay_factor);
        self.may_change("--clip-norm", *clip_norm);
    }

    fn class_device(&mut self, options: &DeviceOptions) {
        let DeviceOptions { device: _, precision, vectors: _, device_transfers: _, probe: _ } = options;
        self.may_change("--precision", name_of(precision));
    }

    fn class_checkpoints(options: &CheckpointOptions) {
        let CheckpointOptions {
            checkpoint_dir: _,
            checkpoint_every: _,
            keep: _,
            resume: _,
            init: _,
            export: _,
            time_limit: _,
            stop_before: _,
            pace: _,
        } = options;
    }
}

/// Returns the program, the ranks and the versions that write a checkpoint, and the relation of its
/// `replicas`. Not collective.
pub(super) fn written_by(
    program: &str,
    world: &World,
    grid: &Grid,
    threads: usize,
    replicas: &str,
) -> Settings {
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
