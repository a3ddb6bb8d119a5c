//! [`Checkpoints`]: writes a run's checkpoints when they are due, and compares the replicas before.

mod collect;
mod copy;
mod provide;
mod state_writer;

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

pub(super) use self::collect::AHEAD;
use self::state_writer::StateWriter;
use super::options::{CheckpointOptions, Every};
use super::resume::{Resumed, RunPosition};
use super::stop::StopRequest;
use super::trainer::{RunRequests, Trainer};
use crate::checkpoint::{self, Contents, Description, Written};
use crate::comm::{self, Grid};
use crate::device::Device;
use crate::nn::Model;
use crate::parallel::data::StateParts;
use crate::trace::{self, Name};
use crate::{Error, Result};

/// The settings of the [`Checkpoints`] of a run.
pub(super) struct CheckpointSettings<'a> {
    /// The options.
    pub(super) options: &'a CheckpointOptions,
    /// The model in training.
    pub(super) model: &'a Model,
    /// The names of the optimizer's slots.
    pub(super) slots: &'static [&'static str],
    /// The ranks that provide each tensor.
    pub(super) parts: Arc<StateParts>,
    /// The description of the run in every file, without the step.
    pub(super) description: Description,
    /// The number of steps of an epoch.
    pub(super) steps_per_epoch: u64,
    /// True if replicas are compared before each checkpoint.
    pub(super) compares_replicas: bool,
}

/// The checkpoints of a run.
pub(super) struct Checkpoints<'a> {
    grid: &'a Grid,
    settings: CheckpointSettings<'a>,
    /// The writer, if there is a directory.
    writer: Option<StateWriter>,
    stop: Option<StopRequest>,
    /// The step of the last checkpoint.
    last: Option<u64>,
    last_time: Instant,
    /// The result of writing the last file, on rank 0.
    outcome: Option<Result<Written>>,
    /// The number of checkpoints in a row that could not be written, or not without removing
    /// others.
    num_failures: u32,
}

impl<'a> Checkpoints<'a> {
    /// Creates the directory, if the options name one, and allocates memory for copies of the
    /// state. The run began at `start`, stops early if `stop` asks for it, and continues after
    /// `resumed`. Collective.
    ///
    /// # Errors
    /// The directory or the file of --export cannot be written, there is no memory, or
    /// --stop-before does not fit: the same error on every rank.
    pub(super) fn begin(
        grid: &'a Grid,
        settings: CheckpointSettings<'a>,
        resumed: Option<Resumed>,
        stop: Option<StopRequest>,
        start: Instant,
    ) -> Result<Checkpoints<'a>> {
        let CheckpointSettings { options, slots, parts, .. } = &settings;
        let prepare = || prepare(options).and_then(|()| options.deadline(start));
        let deadline = grid.all.agree_with_root(prepare)?.flatten();
        let writer = match &options.checkpoint_dir {
            Some(_) => Some(StateWriter::new(grid, parts, slots.len(), options.keep)?),
            None => None,
        };
        let stop = stop.map(|stop| stop.at(deadline));
        // the next start would not find a checkpoint that lies elsewhere
        let last =
            resumed.filter(|resumed| resumed.is_in_checkpoint_dir).map(|resumed| resumed.position.step);
        let last_time = Instant::now();
        Ok(Checkpoints { grid, settings, writer, stop, last, last_time, outcome: None, num_failures: 0 })
    }

    /// Returns the requests of this rank at the end of a step. Not collective.
    pub(super) fn requests(&self) -> RunRequests {
        let stop = self.stop.as_ref().is_some_and(StopRequest::is_made);
        let checkpoint = match self.settings.options.checkpoint_every {
            Every::Time(interval) => {
                self.grid.all.is_root() && self.writer.is_some() && self.last_time.elapsed() >= interval
            }
            Every::Steps(_) => false,
        };
        RunRequests { stop: usize::from(stop), checkpoint: usize::from(checkpoint) }
    }

    /// Returns true if the number of steps, `done`, makes a checkpoint due.
    pub(super) fn is_due_after(&self, done: u64) -> bool {
        let options = self.settings.options;
        let is_due = matches!(options.checkpoint_every, Every::Steps(steps) if done.is_multiple_of(steps));
        is_due && options.checkpoint_dir.is_some()
    }

    /// Begins a checkpoint at `position`, if one is due or the ranks ask for it. Collective.
    ///
    /// # Errors
    /// Those of [`Checkpoints::save`].
    pub(super) fn after_step<D: Device>(
        &mut self,
        trainer: &Trainer<'_, D>,
        position: RunPosition,
        requests: RunRequests,
    ) -> Result<()> {
        comm::advance();
        if let Some(written) = self.writer.as_mut().and_then(StateWriter::poll) {
            self.report(written);
        }
        if self.is_due_after(position.step) || requests.checkpoint > 0 {
            self.save(trainer, position)
        } else {
            Ok(())
        }
    }

    /// Begins a checkpoint at `position`, unless the last one was there. Replicas are compared
    /// before, so that no file holds parameters that a fault of the hardware has changed.
    /// Collective.
    ///
    /// # Errors
    /// The replicas differ (the same error on every rank), or the copy or the thread cannot be made
    /// (one rank alone).
    pub(super) fn save<D: Device>(&mut self, trainer: &Trainer<'_, D>, position: RunPosition) -> Result<()> {
        let RunPosition { step: done, loss } = position;
        self.settings.description.loss = loss;
        let Some(directory) = self.settings.options.checkpoint_dir.clone() else { return Ok(()) };
        if self.last == Some(done) {
            return Ok(());
        }
        let _span = trace::work(Name::Checkpoint);
        if self.settings.compares_replicas {
            self.check_replicas(trainer, done)?;
        }
        (self.last, self.last_time) = (Some(done), Instant::now());
        if let Some(written) = self.wait()? {
            self.report(written);
        }
        let contents = self.contents(done, self.settings.slots);
        match &mut self.writer {
            Some(writer) => writer.start(trainer, directory.join(checkpoint::file_name(done)), contents),
            None => Ok(()),
        }
    }

    /// Compares the replicas after `done` steps. Collective.
    ///
    /// # Errors
    /// The replicas differ: the same error on every rank, with the last good file.
    pub(super) fn check_replicas<D: Device>(&mut self, trainer: &Trainer<'_, D>, done: u64) -> Result<()> {
        trainer.check_replicas(done).map_err(|error| self.with_last_good(error))
    }

    /// Adds the name of the newest sound file to `error`, which reports damaged state or divergence, on rank
    /// 0; other ranks return it unchanged. Not collective.
    pub(super) fn with_last_good(&mut self, error: Error) -> Error {
        let (Some(directory), true) = (&self.settings.options.checkpoint_dir, self.grid.all.is_root()) else {
            return error;
        };
        // an error of this rank alone is not about the state
        if !error.is_agreed() {
            return error;
        }
        // the file that is being written is sound
        if let Some(writer) = &mut self.writer {
            writer.drain();
        }
        let found = checkpoint::newest_sound(directory).ok().and_then(|found| found.checkpoint);
        let advice = match found {
            Some(good) => format!("the last checkpoint before it is {}", good.path.display()),
            None => "there is no checkpoint before it".to_owned(),
        };
        Error::Agreed { message: format!("{error}; {advice}"), exit_code: error.exit_code() }
    }

    /// Returns the contents of a file after `done` steps, with the optimizer's `slots`.
    fn contents(&self, done: u64, slots: &[&str]) -> Contents {
        let CheckpointSettings { description, steps_per_epoch, model, .. } = &self.settings;
        let (epoch, step_in_epoch) = (done / steps_per_epoch, done % steps_per_epoch);
        let description = Description { step: done, epoch, step_in_epoch, ..description.clone() };
        Contents::new(&model.tensors, slots, description)
    }

    /// Waits for the file that is being written, if there is one. Collective.
    fn wait(&mut self) -> Result<Option<Result<Written>>> {
        self.writer.as_mut().map_or(Ok(None), StateWriter::wait)
    }

    /// Waits for the last checkpoint, which is tried once more if it failed, and frees the memory
    /// of the copy. Signals that come later do not change the exit code. Collective.
    ///
    /// # Errors
    /// The last checkpoint could not be written: the same error on every rank.
    pub(super) fn finish(&mut self) -> Result<()> {
        let _span = trace::work(Name::Checkpoint);
        if let Some(written) = self.wait()? {
            self.outcome = Some(written);
        }
        let mut has_failed = [u8::from(matches!(self.outcome, Some(Err(_))))];
        self.grid.all.broadcast(&mut has_failed, 0)?;
        if let (1, Some(writer)) = (has_failed[0], &mut self.writer) {
            if let Some(Err(error)) = &self.outcome {
                log::warn!("{error}; trying once more, because this is the last checkpoint");
            }
            writer.try_again()?;
            if let Some(written) = self.wait()? {
                self.outcome = Some(written);
            }
        }
        self.writer = None;
        if let Some(Ok(written)) = self.outcome.take_if(|outcome| outcome.is_ok()) {
            self.report(Ok(written));
        }
        let failed = self.outcome.take_if(|outcome| outcome.is_err());
        let outcome = self.grid.all.agree_with_root(|| failed.transpose());
        if let (Ok(_), Some(stop)) = (&outcome, &self.stop) {
            stop.end();
        }
        outcome.map(|_| ())
    }

    /// Writes the weights after `done` steps to the file of --export, if there is one. Collective.
    ///
    /// # Errors
    /// The file cannot be written, or there is no memory for the copies: the same error on every
    /// rank.
    pub(super) fn export<D: Device>(&self, trainer: &Trainer<'_, D>, done: u64) -> Result<()> {
        let Some(path) = &self.settings.options.export else { return Ok(()) };
        let mut writer = StateWriter::new(self.grid, &self.settings.parts, 0, 0)?;
        writer.start(trainer, path.clone(), self.contents(done, &[]))?;
        let written = writer.wait()?;
        self.grid.all.agree_with_root(|| written.transpose()).map(|_| ())
    }

    /// Logs the result of writing a file. A failure does not stop the run, because the next file
    /// may succeed. Of consecutive failures, the 1st, 2nd, 4th, 8th and so on are logged as
    /// warnings.
    fn report(&mut self, written: Result<Written>) {
        let level = |num_failures: u32| {
            if num_failures.is_power_of_two() { log::Level::Warn } else { log::Level::Debug }
        };
        match &written {
            Ok(Written { step, path, num_bytes, elapsed, removed }) => {
                let (mebibytes, milliseconds) = (*num_bytes as f64 / f64::from(1 << 20), elapsed.as_millis());
                log::info!(
                    "checkpoint of step {step}: {}, {mebibytes:.1} MiB in {milliseconds} ms",
                    path.display()
                );
                self.num_failures = if removed.is_empty() { 0 } else { self.num_failures + 1 };
                if !removed.is_empty() {
                    let names: Vec<String> = removed.iter().map(|path| path.display().to_string()).collect();
                    let (names, keep) = (names.join(" and "), self.settings.options.keep);
                    let level = level(self.num_failures);
                    log::log!(
                        level,
                        "removed {names} to make room for it: the disk has no room for --keep {keep}"
                    );
                }
            }
            Err(error) => {
                self.num_failures += 1;
                let count = if self.num_failures > 1 {
                    format!(" (number {} in a row)", self.num_failures)
                } else {
                    String::new()
                };
                log::log!(
                    level(self.num_failures),
                    "{error}{count}; training continues, and the next checkpoint will be tried"
                );
            }
        }
        self.outcome = Some(written);
    }
}

/// Creates the directory for checkpoints and tries to write in it and in that of --export, so that
/// training does not begin if its state could not be saved.
fn prepare(options: &CheckpointOptions) -> Result<()> {
    if let Some(directory) = &options.checkpoint_dir {
        let doing = || format!("preparing --checkpoint-dir {}", directory.display());
        let prepare = || {
            checkpoint::create_durably(directory)?;
            if let Err(error) = checkpoint::remove_temporaries(directory) {
                log::warn!("removing abandoned files from {}: {error}", directory.display());
            }
            check_writable(directory)
        };
        prepare().map_err(|error| Error::input(doing(), error))?;
    }
    if let Some(path) = &options.export {
        let doing = || format!("preparing --export {}", path.display());
        if path.exists() && !path.is_file() {
            return Err(Error::input(doing(), "it is a directory or a device; give the name of a file"));
        }
        let directory = checkpoint::directory_of(path);
        if !directory.is_dir() {
            let why = format!("there is no directory {}; create it", directory.display());
            return Err(Error::input(doing(), why));
        }
        check_writable(directory).map_err(|error| Error::input(doing(), error))?;
    }
    Ok(())
}

/// Creates a file as the writer will, and removes it.
fn check_writable(directory: &Path) -> std::io::Result<()> {
    // without the file's name, which means nothing to the user
    let without_name = |error: std::io::Error| {
        let reason = error.raw_os_error().map(std::io::Error::from_raw_os_error).unwrap_or(error);
        std::io::Error::new(reason.kind(), format!("no file can be written there: {reason}"))
    };
    let file = tempfile::NamedTempFile::new_in(directory).map_err(without_name)?;
    file.close()
}
