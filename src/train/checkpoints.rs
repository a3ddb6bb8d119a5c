//! [`Checkpoints`]: writes a run's checkpoints when they are due, and compares the replicas before.

use std::path::Path;
use std::time::Instant;

use super::options::{CheckpointOptions, Every};
use super::resume::{Resumed, RunPosition};
use super::stop::StopRequest;
use super::trainer::{RunRequests, Trainer};
use crate::checkpoint::{self, Description, Snapshot, Writer, Written};
use crate::comm::Communicator;
use crate::device::Device;
use crate::nn::Model;
use crate::parallel::gather::Assembly;
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
    /// The description of the run in every file, without the step.
    pub(super) description: Description,
    /// The number of steps of an epoch.
    pub(super) steps_per_epoch: u64,
    /// True if replicas are compared before each checkpoint.
    pub(super) compares_replicas: bool,
}

/// The checkpoints of a run.
pub(super) struct Checkpoints<'a> {
    all: &'a Communicator,
    settings: CheckpointSettings<'a>,
    /// The writer, on rank 0, if there is a directory.
    writer: Option<Writer>,
    stop: Option<StopRequest>,
    /// The step of the last snapshot.
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
        all: &'a Communicator,
        settings: CheckpointSettings<'a>,
        resumed: Option<Resumed>,
        stop: Option<StopRequest>,
        start: Instant,
    ) -> Result<Checkpoints<'a>> {
        let CheckpointSettings { options, model, slots, .. } = settings;
        let prepare = || {
            prepare(options)?;
            let writer = options
                .checkpoint_dir
                .clone()
                .map(|path| Writer::new(path, options.keep, Snapshot::new(&model.tensors, slots)?));
            Ok((writer.transpose()?, options.deadline(start)?))
        };
        let (writer, deadline) = all.agree_with_root(prepare)?.unwrap_or_default();
        let stop = stop.map(|stop| stop.at(deadline));
        // the next start would not find a checkpoint that lies elsewhere
        let last = resumed.filter(|resumed| resumed.is_at_home).map(|resumed| resumed.position.step);
        let last_time = Instant::now();
        Ok(Checkpoints { all, settings, writer, stop, last, last_time, outcome: None, num_failures: 0 })
    }

    /// Returns the requests of this rank at the end of a step. Not collective.
    pub(super) fn requests(&self) -> RunRequests {
        let stop = self.stop.as_ref().is_some_and(StopRequest::is_made);
        let checkpoint = match self.settings.options.checkpoint_every {
            Every::Time(interval) => self.writer.is_some() && self.last_time.elapsed() >= interval,
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
        if let Some(written) = self.writer.as_mut().and_then(Writer::poll) {
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
    /// The replicas differ (the same error on every rank), or there is no memory for the copy (rank
    /// 0 alone).
    pub(super) fn save<D: Device>(&mut self, trainer: &Trainer<'_, D>, position: RunPosition) -> Result<()> {
        let RunPosition { step: done, loss } = position;
        if self.settings.options.checkpoint_dir.is_none() || self.last == Some(done) {
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
        let memory = self.writer.as_mut().and_then(Writer::take);
        self.settings.description.loss = loss;
        let snapshot = self.snapshot(trainer, done, trainer.slot_names(), memory)?;
        if let (Some(writer), Some(snapshot)) = (&mut self.writer, snapshot)
            && let Err(error) = writer.start(snapshot)
        {
            self.report(Err(error));
        }
        Ok(())
    }

    /// Compares the replicas after `done` steps. Collective.
    ///
    /// # Errors
    /// The replicas differ: the same error on every rank, with the last good file.
    pub(super) fn check_replicas<D: Device>(&mut self, trainer: &Trainer<'_, D>, done: u64) -> Result<()> {
        trainer.check_replicas(done).map_err(|error| self.with_last_good(error))
    }

    /// Adds the name of the newest sound file to `error`, which reports damaged state. Rank 0 only.
    /// Not collective.
    fn with_last_good(&mut self, error: Error) -> Error {
        let (Some(directory), true) = (&self.settings.options.checkpoint_dir, self.all.is_root()) else {
            return error;
        };
        // an error of this rank alone is not about the state
        if !matches!(error, Error::Agreed { .. }) {
            return error;
        }
        // the file that is being written is sound
        let _ = self.writer.as_mut().and_then(Writer::wait);
        let found = checkpoint::newest_sound(directory).ok().and_then(|found| found.checkpoint);
        let advice = match found {
            Some(good) => format!("the last checkpoint before it is {}", good.path.display()),
            None => "there is no checkpoint before it".to_owned(),
        };
        Error::Agreed { message: format!("{error}; {advice}"), exit_code: error.exit_code() }
    }

    /// Copies the state after `done` steps to rank 0, into `memory` if it is given. Collective.
    fn snapshot<D: Device>(
        &self,
        trainer: &Trainer<'_, D>,
        done: u64,
        slots: &[&str],
        memory: Option<Snapshot>,
    ) -> Result<Option<Snapshot>> {
        let mut snapshot = match memory {
            None if self.all.is_root() => Some(Snapshot::new(&self.settings.model.tensors, slots)?),
            memory => memory,
        };
        trainer.assemble_parameters(&mut Section { snapshot: snapshot.as_mut(), slot: None })?;
        for slot in 0..slots.len() {
            trainer.assemble_slot(slot, &mut Section { snapshot: snapshot.as_mut(), slot: Some(slot) })?;
        }
        if let Some(snapshot) = &mut snapshot {
            let CheckpointSettings { description, steps_per_epoch, .. } = &self.settings;
            let (epoch, step_in_epoch) = (done / steps_per_epoch, done % steps_per_epoch);
            snapshot.description = Description { step: done, epoch, step_in_epoch, ..description.clone() };
        }
        Ok(snapshot)
    }

    /// Waits for the file that is being written, if there is one. Collective: rank 0 tells the
    /// others whenever its writer makes progress, so that no watchdog mistakes the wait for a hang.
    fn wait(&mut self) -> Result<Option<Result<Written>>> {
        if self.settings.options.checkpoint_dir.is_none() {
            return Ok(None);
        }
        let mut gets_on = [1_u8];
        while gets_on[0] == 1 {
            gets_on[0] = u8::from(self.writer.as_ref().is_some_and(Writer::wait_for_progress));
            self.all.broadcast(&mut gets_on, 0)?;
        }
        Ok(self.writer.as_mut().and_then(Writer::wait))
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
        if let (Some(Err(error)), Some(writer)) = (&self.outcome, &mut self.writer) {
            log::warn!("{error}; trying once more, because this is the last checkpoint");
            if let Err(error) = writer.try_again() {
                self.outcome = Some(Err(error));
            }
        }
        if let Some(written) = self.wait()? {
            self.outcome = Some(written);
        }
        self.writer = None;
        if let Some(Ok(written)) = self.outcome.take_if(|outcome| outcome.is_ok()) {
            self.report(Ok(written));
        }
        let failed = self.outcome.take_if(|outcome| outcome.is_err());
        let outcome = self.all.agree_with_root(|| failed.transpose());
        if let (Ok(_), Some(stop)) = (&outcome, &self.stop) {
            stop.end();
        }
        outcome.map(|_| ())
    }

    /// Writes the weights after `done` steps to the file of --export, if there is one. Collective.
    ///
    /// # Errors
    /// The file cannot be written: the same error on every rank. There is no memory for the copy
    /// (rank 0 alone).
    pub(super) fn export<D: Device>(&self, trainer: &Trainer<'_, D>, done: u64) -> Result<()> {
        let Some(path) = &self.settings.options.export else { return Ok(()) };
        let snapshot = self.snapshot(trainer, done, &[], None)?;
        let write = |snapshot| checkpoint::write(path, &snapshot, &mut |_| ());
        self.all.agree_with_root(|| snapshot.map(write).transpose()).map(|_| ())
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

/// The parameters or one slot of a snapshot; empty on ranks that have no snapshot.
struct Section<'s> {
    snapshot: Option<&'s mut Snapshot>,
    slot: Option<usize>,
}

impl Assembly for Section<'_> {
    fn tensor(&mut self, number: usize) -> &mut [f32] {
        match &mut self.snapshot {
            Some(snapshot) => snapshot.tensor_mut(self.slot, number),
            None => &mut [],
        }
    }

    fn complete(&mut self, _number: usize) -> Result<()> {
        Ok(())
    }
}

/// Creates the directory for checkpoints and tries to write in it and in that of --export, so that
/// training does not begin if its state could not be saved.
fn prepare(options: &CheckpointOptions) -> Result<()> {
    if let Some(directory) = &options.checkpoint_dir {
        let doing = || format!("preparing --checkpoint-dir {}", directory.display());
        let prepare = || {
            create_durably(directory)?;
            checkpoint::remove_temporaries(directory)?;
            check_writable(directory)
        };
        prepare().map_err(|error| Error::input(doing(), error))?;
    }
    if let Some(path) = &options.export {
        let doing = || format!("preparing --export {}", path.display());
        if path.exists() && !path.is_file() {
            return Err(Error::input(doing(), "it is a directory or a device; give the name of a file"));
        }
        let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        check_writable(directory.unwrap_or(Path::new("."))).map_err(|error| Error::input(doing(), error))?;
    }
    Ok(())
}

/// Creates `directory` and its missing parents, and synchronises them, so that they survive a loss
/// of power as the files in them do.
fn create_durably(directory: &Path) -> std::io::Result<()> {
    let above = directory.parent().filter(|above| !above.as_os_str().is_empty());
    if let (false, Some(above)) = (directory.exists(), above) {
        create_durably(above)?;
    }
    std::fs::create_dir_all(directory)?;
    // some file systems cannot synchronise directories, and need not
    let _ = std::fs::File::open(above.unwrap_or(Path::new("."))).and_then(|above| above.sync_all());
    Ok(())
}

/// Creates a file as the writer will, and removes it.
fn check_writable(directory: &Path) -> std::io::Result<()> {
    tempfile::NamedTempFile::new_in(directory)?.close()
}
