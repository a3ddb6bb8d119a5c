//! What options have to be beside what clap sees to: within their ranges, of some use to the run, and about different files.

use std::path::Path;

use super::device_options::{DeviceName, TransfersName};
use super::model_options::ModelName;
use super::options::{OptimizerName, ScheduleName, TrainOptions};
use crate::app::FileOption;
use crate::checkpoint;
use crate::dataset::{self, LARGEST_SIZE};
use crate::{Error, Result};

/// The most samples that can be numbered.
const MOST_SAMPLES: usize = 1 << 40;

impl TrainOptions {
    /// Checks what clap cannot: sizes against each other and against the number of ranks that share a batch.
    ///
    /// # Errors
    /// An option is out of its range, named with its value.
    pub fn check(&self, num_replicas: usize) -> Result<()> {
        let batch = self.batch_size;
        let positive = [
            ("--batch-size", batch as f64),
            ("--micro-batches", self.micro_batches() as f64),
            ("--bucket-mb", self.bucket_mb),
            ("--learning-rate", self.base_learning_rate()),
            ("--clip-norm", self.clip_norm.unwrap_or(1.0)),
            ("--decay-interval", self.decay_interval as f64),
        ];
        for (option, value) in positive {
            if !(value > 0.0 && value.is_finite()) {
                return Err(Error::input(option, format!("it is {value}, but must be above 0 and finite")));
            }
        }
        let not_negative = [
            ("--weight-decay", self.weight_decay.unwrap_or_default()),
            ("--final-learning-rate", self.final_learning_rate),
            ("--decay-factor", self.decay_factor),
        ];
        for (option, value) in not_negative {
            if !(value >= 0.0 && value.is_finite()) {
                return Err(Error::input(
                    option,
                    format!("it is {value}, but must be at least 0 and finite"),
                ));
            }
        }
        if !(0.0..1.0).contains(&self.momentum) {
            return Err(Error::input(
                "--momentum",
                format!("it is {}, but must be from 0 to below 1", self.momentum),
            ));
        }
        if self.nesterov && self.momentum == 0.0 {
            return Err(Error::input("--nesterov", "it needs a --momentum above 0"));
        }
        let limits = [
            ("--layers", self.layers, 10_000),
            ("--threads", self.threads.unwrap_or(1), 1024),
            ("--width", self.width.unwrap_or(1), LARGEST_SIZE),
            ("--batch-size", batch, LARGEST_SIZE),
            ("--synthetic-samples", self.data.synthetic_samples, MOST_SAMPLES),
        ];
        for (option, value, most) in limits {
            if value > most {
                return Err(Error::input(option, format!("it is {value}, but must not be above {most}")));
            }
        }
        for (option, value) in [("--width", self.width), ("--threads", self.threads)] {
            if value == Some(0) {
                return Err(Error::input(option, "it is 0, but must be at least 1"));
            }
        }
        if batch < num_replicas {
            let why = format!(
                "a global batch of {batch} cannot be shared by {num_replicas} ranks; give at least one sample a rank"
            );
            return Err(Error::input("--batch-size", why));
        }
        Ok(())
    }

    /// Checks that a batch, of `largest` samples at most, can be cut into `num` micro-batches: whether it can does not depend on the
    /// number of ranks. Where the share of one of `num_replicas` has fewer samples, the remark that is returned says so. Not collective.
    ///
    /// # Errors
    /// There are fewer samples than micro-batches.
    pub fn check_micro_batches(
        &self,
        num: usize,
        num_replicas: usize,
        largest: usize,
    ) -> Result<Option<String>> {
        let batch = self.batch_size.min(largest);
        if num > batch {
            let why = format!(
                "{num} micro-batches are more than the {batch} samples of a batch; {batch} or fewer would do"
            );
            return Err(Error::input("cutting batches into micro-batches", why));
        }
        let share = (batch / num_replicas).max(1);
        Ok((share < num).then(|| {
            format!(
                "of {num} micro-batches some are empty, for a replica has {share} of the {batch} samples of a batch; --micro-batches {share} would do"
            )
        }))
    }

    /// Refuses options that say nothing about this run; `has_replicas` if the strategy puts ranks on the data axis. Not collective.
    ///
    /// # Errors
    /// There is one; it is named, with what it would be for.
    pub(super) fn check_used(&self, has_replicas: bool) -> Result<()> {
        let model = self.model();
        let name = |value: &dyn std::fmt::Debug| format!("{value:?}").to_lowercase();
        let for_model =
            |wanted: ModelName, text: &str| (model != wanted).then(|| format!("it is for --model {text}"));
        let source = self.data.data.as_str();
        let is_file = !["digits", "synthetic"].contains(&source) && !Path::new(source).is_dir();
        let for_file = (!is_file).then(|| format!("it is for HDF5 files, and --data is {source}"));
        let for_synthetic =
            (source != "synthetic").then(|| format!("it is for --data synthetic, and --data is {source}"));
        let no_targets =
            (model == ModelName::DeepMlp).then(|| "the loss of deep-mlp looks at no targets".to_owned());
        let for_sgd = (self.optimizer != OptimizerName::Sgd)
            .then(|| format!("it is for --optimizer sgd, and {} is chosen", name(&self.optimizer)));
        let schedule = self.learning_rate_schedule;
        let for_schedule = |wanted: &[ScheduleName], text: &str| {
            let schedule = name(&schedule);
            (!wanted.contains(&self.learning_rate_schedule))
                .then(|| format!("it is for --learning-rate-schedule {text}, and {schedule} is chosen"))
        };
        let for_step = for_schedule(&[ScheduleName::Step], "step");
        let for_cuda = (self.machine.device == DeviceName::Cpu)
            .then(|| "it is about the memory of GPUs, and --device is cpu".to_owned());
        let for_auto = (self.machine.device_transfers != TransfersName::Auto)
            .then(|| "it is for --device-transfers auto, and another is chosen".to_owned());
        let for_replicas = (!has_replicas)
            .then(|| "it is about replicas, and this program has one; that is for sync_sgd".to_owned());
        let reasons = [
            ("hidden", for_model(ModelName::Mlp, "mlp")),
            ("activation", for_model(ModelName::Mlp, "mlp")),
            ("no-bias", for_model(ModelName::Mlp, "mlp")),
            ("width", for_model(ModelName::DeepMlp, "deep-mlp")),
            ("layers", for_model(ModelName::DeepMlp, "deep-mlp")),
            ("inputs", for_file.clone()),
            ("targets", for_file.clone().or_else(|| no_targets.clone())),
            ("test-fraction", for_file),
            ("synthetic-samples", for_synthetic.clone()),
            ("synthetic-shape", for_synthetic.clone()),
            ("synthetic-targets", for_synthetic.or(no_targets)),
            ("momentum", for_sgd.clone()),
            ("nesterov", for_sgd),
            (
                "final-learning-rate",
                for_schedule(&[ScheduleName::Cosine, ScheduleName::Linear], "cosine or linear"),
            ),
            ("decay-interval", for_step.clone()),
            ("decay-factor", for_step),
            ("epochs", self.steps.is_some().then(|| "--steps says how long the run is".to_owned())),
            ("device-transfers", for_cuda.clone()),
            ("probe", for_cuda.or(for_auto)),
            ("bucket-mb", for_replicas.clone()),
            ("overlap", for_replicas.clone()),
            ("reduction", for_replicas.clone()),
            ("check-replicas", for_replicas),
        ];
        for (option, reason) in reasons {
            if let (Some(why), true) = (reason, self.given.has(option)) {
                return Err(Error::input(
                    format!("--{option}"),
                    format!("this run has no use for it: {why}"),
                ));
            }
        }
        Ok(())
    }

    /// The files that these options name. Not collective.
    pub fn files(&self) -> Vec<FileOption<'_>> {
        let mut files = self.common.files();
        if !matches!(self.data.data.as_str(), "digits" | "synthetic") {
            files.push(FileOption::input_or_directory(
                "--data",
                Path::new(&self.data.data),
                dataset::is_published_name,
            ));
        }
        files.extend(self.machine.probe.iter().map(|path| FileOption::input("--probe", path)));
        let is_checkpoint = |name: &str| checkpoint::step_of(name).is_some();
        let directory = self.checkpoints.checkpoint_dir.as_deref().map(|path| ("--checkpoint-dir", path));
        let checkpoints = self.checkpoints.inputs().chain(directory);
        files.extend(
            checkpoints.map(|(option, path)| FileOption::input_or_directory(option, path, is_checkpoint)),
        );
        files.extend(self.metrics.iter().map(|path| FileOption::output_or_pipe("--metrics", path)));
        files.extend(self.checkpoints.export.iter().map(|path| FileOption::output("--export", path)));
        files
    }
}

/// Refuses files that cannot be what their options say: see [`crate::app::check_files`]; and to write to what has the name of a
/// checkpoint. Not collective.
///
/// # Errors
/// A file is refused.
pub fn check_files(files: &[FileOption<'_>]) -> Result<()> {
    for file in files.iter().filter(|file| file.is_output()) {
        let name = file.path().file_name().unwrap_or_default().to_string_lossy();
        if checkpoint::step_of(&name).is_some() {
            file.refuse("that is the name of a checkpoint, which a run would go on from; give another")?;
        }
    }
    crate::app::check_files(files)
}
