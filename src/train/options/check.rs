//! Checks of all options of a training program that clap cannot make.

use std::path::Path;

use super::range::{at_least_one, at_most, positive};
use super::{DeviceChoice, Resume, TrainOptions};
use crate::app::FileOption;
use crate::checkpoint;
use crate::dataset::{self, LARGEST_SIZE};
use crate::parallel::zero::ZeroStage;
use crate::{Error, Result};

impl TrainOptions {
    /// Checks the ranges of all options, and the batch against the number of replicas that share it, in a
    /// job of `num_ranks`. Not collective.
    ///
    /// # Errors
    /// An option is out of its range; the message has its name and its value.
    pub fn check(&self, num_ranks: usize, num_replicas: usize) -> Result<()> {
        let batch = self.batch_size;
        positive("--batch-size", batch as f64)?;
        positive("--micro-batches", self.micro_batches.unwrap_or(1) as f64)?;
        positive("--bucket-mb", self.bucket_mb.unwrap_or(1.0))?;
        self.optimizer.check()?;
        self.model.check()?;
        at_most("--threads", self.threads.unwrap_or(1), 1024)?;
        at_least_one("--threads", self.threads)?;
        at_most("--batch-size", batch, LARGEST_SIZE)?;
        self.data.check()?;
        self.audit.check(num_ranks)?;
        if batch < num_replicas {
            let why = format!(
                "a global batch of {batch} cannot be shared by {num_replicas} replicas; \
                 give at least one sample a replica"
            );
            return Err(Error::input("--batch-size", why));
        }
        Ok(())
    }

    /// Refuses options that have no effect in this run. `has_replicas` is true if the strategy puts
    /// ranks on the data axis; `reads_targets` if the network's loss reads them. Not collective.
    ///
    /// # Errors
    /// An option has no effect; the message says when it would have one.
    pub(in crate::train) fn check_used(&self, has_replicas: bool, reads_targets: bool) -> Result<()> {
        let given = &self.given;
        self.model.check_used(given)?;
        self.data.check_used(given, self.source(), self.synthetic_shape(), reads_targets)?;
        self.check_places()?;
        self.optimizer.check_used(given)?;
        given.refuse("epochs", self.steps.map(|_| "--steps sets the length of the run"))?;
        let has_directory = self.checkpoints.checkpoint_dir.is_some();
        let nowhere = (self.checkpoints.resume == Resume::Auto && !has_directory)
            .then_some("auto looks in --checkpoint-dir, which is not given");
        given.refuse("resume", nowhere)?;
        self.machine.check_used(given)?;
        let on_gpu = (self.machine.device == DeviceChoice::Cuda)
            .then_some("a GPU sums in orders of its own, and --device is cuda");
        given.refuse("leaves", on_gpu)?;
        let on_cpu = (self.machine.device == DeviceChoice::Cpu)
            .then_some("the CPU has one algorithm, and --device is cpu");
        given.refuse("tuned-products", on_cpu)?;
        self.audit.check_used(given, on_gpu)?;
        let divides_gradients = self.zero.0.is_some_and(ZeroStage::divides_gradients);
        given.refuse("accumulate", (!divides_gradients).then_some("it is for --zero 2 and 3"))?;
        let has_parts = self.zero.0.is_some_and(ZeroStage::divides_parameters);
        let why = "with --zero 3 replicas have no parameters in common";
        given.refuse(
            "check-replicas",
            (has_replicas && has_parts && self.check_replicas > 0).then_some(why),
        )?;
        let for_replicas = (!has_replicas)
            .then_some("it is about replicas, and this program has one; use sync_sgd or hybrid");
        for option in ["bucket-mb", "overlap", "check-replicas"] {
            given.refuse(option, for_replicas)?;
        }
        Ok(())
    }

    /// Refuses checkpoints in a directory of which all HDF5 files are data: they would be read as tokens at
    /// the next start.
    fn check_places(&self) -> Result<()> {
        let directory = self.checkpoints.checkpoint_dir.as_deref();
        let Some((directory, source)) = directory.zip(self.data.source.path()) else { return Ok(()) };
        let [own, data] = [directory, Path::new(source)].map(|path| path.canonicalize().ok());
        if own.is_some() && own == data && !dataset::token_files(source).is_empty() {
            let why = "--data reads all HDF5 files of this directory; give another";
            return Err(Error::input(format!("--checkpoint-dir {}", directory.display()), why));
        }
        Ok(())
    }

    /// Returns the files that these options name. Not collective.
    pub fn files(&self) -> Vec<FileOption<'_>> {
        let mut files = self.common.files();
        files.extend(self.data.source.files());
        files.extend(self.model.network.iter().map(|path| FileOption::input("--network", path)));
        files.extend(self.machine.probe.iter().map(|path| FileOption::input("--probe", path)));
        let is_checkpoint = |name: &str| checkpoint::step_of(name).is_some();
        let directory = self.checkpoints.checkpoint_dir.as_deref().map(|path| ("--checkpoint-dir", path));
        let checkpoints = self.checkpoints.inputs().chain(directory);
        files.extend(
            checkpoints.map(|(option, path)| FileOption::input_or_directory(option, path, is_checkpoint)),
        );
        let tuned = self.tuned_products.iter();
        files.extend(tuned.map(|path| FileOption::whole_output("--tuned-products", path)));
        files.extend(self.metrics.iter().map(|path| FileOption::output_or_pipe("--metrics", path)));
        files.extend(self.checkpoints.export.iter().map(|path| FileOption::whole_output("--export", path)));
        files
    }
}

/// Refuses files that cannot be used as their options say (see [`crate::app::check_files`]), and
/// output files with the name of a checkpoint. Not collective.
///
/// # Errors
/// A file is refused.
pub fn check_files(files: &[FileOption<'_>]) -> Result<()> {
    for file in files.iter().filter(|file| file.is_output()) {
        let name = file.path().file_name().unwrap_or_default().to_string_lossy();
        if checkpoint::step_of(&name).is_some() {
            file.refuse("that is the name of a checkpoint, from which a run would resume; give another")?;
        }
    }
    crate::app::check_files(files)
}
