//! When a run writes checkpoints, and what becomes of them.

use std::path::Path;
use std::time::Instant;

use super::checkpoint_options::{CheckpointOptions, Every};
use super::resume::Resumed;
use super::step::Requests;
use super::stop::StopRequest;
use super::trainer::Trainer;
use crate::checkpoint::{self, Description, Snapshot, Writer, Written};
use crate::comm::Communicator;
use crate::dataset::Sampler;
use crate::device::Device;
use crate::nn::Model;
use crate::parallel::layout::Assembly;
use crate::trace::{self, Name};
use crate::{Error, Result};

/// The checkpoints of a run that is under way.
pub(super) struct Checkpoints<'a> {
    all: &'a Communicator,
    options: &'a CheckpointOptions,
    model: &'a Model,
    /// On rank 0, if there is a directory.
    writer: Option<Writer>,
    stop: Option<StopRequest>,
    /// What all files say; the step is filled in.
    description: Description,
    steps_per_epoch: u64,
    /// The step of the last snapshot.
    last: Option<u64>,
    last_time: Instant,
    /// On rank 0, what became of the last file.
    outcome: Option<Result<Written>>,
    /// Replicas are compared before each checkpoint.
    compares: bool,
    /// Checkpoints in a row that could not be written, or not without removing others.
    num_failures: u32,
}

impl<'a> Checkpoints<'a> {
    /// Makes the directory, if `options` name one, and memory for copies with these `slots`. The run began at `start`, ends in time if
    /// `stop` asks for it, and goes on after `resumed`. Collective.
    ///
    /// # Errors
    /// The directory or the place of --export cannot be written, there is no memory, or --stop-before does not fit; the same error on
    /// every rank.
    pub(super) fn begin(
        all: &'a Communicator,
        options: &'a CheckpointOptions,
        (model, slots, compares): (&'a Model, &[&str], bool),
        (description, sampler): (Description, &Sampler),
        resumed: Option<Resumed>,
        (stop, start): (Option<StopRequest>, Instant),
    ) -> Result<Checkpoints<'a>> {
        let directory = options.checkpoint_dir.as_ref();
        let prepare = || {
            prepare(options)?;
            let writer = directory
                .map(|path| Writer::new(path.clone(), options.keep, Snapshot::new(&model.tensors, slots)?));
            Ok(Some((writer.transpose()?, options.deadline(start)?)))
        };
        let (writer, deadline) =
            all.agree_with_root(if all.is_root() { prepare() } else { Ok(None) })?.unwrap_or_default();
        let stop = stop.map(|stop| stop.at(deadline));
        let steps_per_epoch = sampler.steps_per_epoch();
        // one that lies elsewhere would not be found by the next start
        let last = resumed.filter(|resumed| resumed.is_at_home).map(|resumed| resumed.step);
        Ok(Checkpoints {
            all,
            options,
            model,
            writer,
            stop,
            description,
            steps_per_epoch,
            last,
            last_time: Instant::now(),
            outcome: None,
            compares,
            num_failures: 0,
        })
    }

    /// What this rank asks for at the end of a step. Not collective.
    pub(super) fn requests(&self) -> Requests {
        let stop = self.stop.as_ref().is_some_and(StopRequest::is_made);
        let checkpoint = match self.options.checkpoint_every {
            Every::Time(interval) => self.writer.is_some() && self.last_time.elapsed() >= interval,
            Every::Steps(_) => false,
        };
        Requests { stop: usize::from(stop), checkpoint: usize::from(checkpoint) }
    }

    /// True if a checkpoint is due after `done` steps, as far as their number says.
    pub(super) fn is_due_after(&self, done: u64) -> bool {
        let is_due =
            matches!(self.options.checkpoint_every, Every::Steps(steps) if done.is_multiple_of(steps));
        is_due && self.options.checkpoint_dir.is_some()
    }

    /// After `done` steps, the last with this `loss`: a checkpoint, if one is due or the ranks ask for it. Collective.
    ///
    /// # Errors
    /// As [`Checkpoints::save`].
    pub(super) fn after_step<D: Device>(
        &mut self,
        trainer: &Trainer<'_, D>,
        (done, loss): (u64, Option<f64>),
        requests: Requests,
    ) -> Result<()> {
        if let Some(written) = self.writer.as_mut().and_then(Writer::poll) {
            self.report(written);
        }
        if self.is_due_after(done) || requests.checkpoint > 0 {
            self.save(trainer, done, loss)
        } else {
            Ok(())
        }
    }

    /// Begins a checkpoint of the state after `done` steps, the last with this `loss`, unless the last one is that. Replicas are compared
    /// before: what a fault of the hardware has changed gets into no file. Collective.
    ///
    /// # Errors
    /// The replicas differ (the same error on every rank), or there is no memory for the copy (rank 0 alone).
    pub(super) fn save<D: Device>(
        &mut self,
        trainer: &Trainer<'_, D>,
        done: u64,
        loss: Option<f64>,
    ) -> Result<()> {
        if self.options.checkpoint_dir.is_none() || self.last == Some(done) {
            return Ok(());
        }
        let _span = trace::work(Name::Checkpoint);
        if self.compares {
            self.check_replicas(trainer, done)?;
        }
        (self.last, self.last_time) = (Some(done), Instant::now());
        if let Some(written) = self.wait()? {
            self.report(written);
        }
        let memory = self.writer.as_mut().and_then(Writer::take);
        self.description.loss = loss;
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
    /// They differ: the same error on every rank, with the last good file.
    pub(super) fn check_replicas<D: Device>(&mut self, trainer: &Trainer<'_, D>, done: u64) -> Result<()> {
        trainer.check_replicas(done).map_err(|error| self.with_last_good(error))
    }

    /// `error`, which says that something is wrong with the state, and on rank 0 which file is not. Not collective.
    fn with_last_good(&mut self, error: Error) -> Error {
        let (Some(directory), true) = (&self.options.checkpoint_dir, self.all.is_root()) else {
            return error;
        };
        // what this rank has alone is no news for the others
        if !matches!(error, Error::Agreed { .. }) {
            return error;
        }
        // the one that is being written was sound
        let _ = self.writer.as_mut().and_then(Writer::wait);
        let found = checkpoint::newest_sound(directory).ok().and_then(|found| found.checkpoint);
        let advice = match found {
            Some(good) => format!("the last checkpoint before it is {}", good.path.display()),
            None => "there is no checkpoint before it".to_owned(),
        };
        Error::Agreed { message: format!("{error}; {advice}"), exit_code: error.exit_code() }
    }

    /// The state after `done` steps, on rank 0, in `memory` if there is some. Collective.
    fn snapshot<D: Device>(
        &self,
        trainer: &Trainer<'_, D>,
        done: u64,
        slots: &[&str],
        memory: Option<Snapshot>,
    ) -> Result<Option<Snapshot>> {
        let mut snapshot = match memory {
            None if self.all.is_root() => Some(Snapshot::new(&self.model.tensors, slots)?),
            memory => memory,
        };
        trainer.assemble_parameters(&mut Section { snapshot: snapshot.as_mut(), slot: None })?;
        for slot in 0..slots.len() {
            trainer.assemble_slot(slot, &mut Section { snapshot: snapshot.as_mut(), slot: Some(slot) })?;
        }
        if let Some(snapshot) = &mut snapshot {
            let (epoch, step_in_epoch) = (done / self.steps_per_epoch, done % self.steps_per_epoch);
            snapshot.description =
                Description { step: done, epoch, step_in_epoch, ..self.description.clone() };
        }
        Ok(snapshot)
    }

    /// Waits for the file that is being written, if there is one. Collective: whenever the thread has got on, rank 0 tells the
    /// others, so that no watchdog takes the wait for a standstill.
    fn wait(&mut self) -> Result<Option<Result<Written>>> {
        if self.options.checkpoint_dir.is_none() {
            return Ok(None);
        }
        let mut gets_on = [1_u8];
        while gets_on[0] == 1 {
            gets_on[0] = u8::from(self.writer.as_ref().is_some_and(Writer::wait_for_progress));
            self.all.broadcast(&mut gets_on, 0)?;
        }
        Ok(self.writer.as_mut().and_then(Writer::wait))
    }

    /// Waits for the last checkpoint, which is written once more if it failed, and gives the memory of the copy back; from now on signals
    /// to stop say nothing new. Collective, for all learn whether it can be gone on from.
    ///
    /// # Errors
    /// It could not be written: the same error on every rank.
    pub(super) fn finish(&mut self) -> Result<()> {
        let _span = trace::work(Name::Checkpoint);
        if let Some(written) = self.wait()? {
            self.outcome = Some(written);
        }
        if let (Some(Err(error)), Some(writer)) = (&self.outcome, &mut self.writer) {
            log::warn!("{error}; trying once more, for there will be no other");
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
        let outcome = self.all.agree_with_root(self.outcome.take_if(|outcome| outcome.is_err()).transpose());
        if let (Ok(_), Some(stop)) = (&outcome, &self.stop) {
            stop.end();
        }
        outcome.map(|_| ())
    }

    /// Writes the weights after `done` steps, if they are wanted. Collective.
    ///
    /// # Errors
    /// They cannot be written: the same error on every rank. There is no memory for the copy (rank 0 alone).
    pub(super) fn export<D: Device>(&self, trainer: &Trainer<'_, D>, done: u64) -> Result<()> {
        let Some(path) = &self.options.export else { return Ok(()) };
        let snapshot = self.snapshot(trainer, done, &[], None)?;
        let written = snapshot.map(|snapshot| checkpoint::write(path, &snapshot, &mut |_| ())).transpose();
        self.all.agree_with_root(written).map(|_| ())
    }

    /// Says what became of a file. That one failed is no reason to stop: the next may succeed. Of failures in a row the first is a
    /// warning, and then ever fewer are.
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
                    let (names, keep) = (names.join(" and "), self.options.keep);
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
                    "{error}{count}; training goes on, and the next checkpoint will be tried"
                );
            }
        }
        self.outcome = Some(written);
    }
}

/// One section of a snapshot; nothing on ranks that have none.
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

/// What rank 0 does before training: finds early what would fail late.
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

/// Makes `directory`, with those above it, and sees to it that they survive a loss of power as its files will.
fn create_durably(directory: &Path) -> std::io::Result<()> {
    let above = directory.parent().filter(|above| !above.as_os_str().is_empty());
    if let (false, Some(above)) = (directory.exists(), above) {
        create_durably(above)?;
    }
    std::fs::create_dir_all(directory)?;
    // some file systems sync no directories, and need not
    let _ = std::fs::File::open(above.unwrap_or(Path::new("."))).and_then(|above| above.sync_all());
    Ok(())
}

/// Makes a file as the writer will, and removes it.
fn check_writable(directory: &Path) -> std::io::Result<()> {
    tempfile::NamedTempFile::new_in(directory)?.close()
}
