//! The thread that writes checkpoints while training continues.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::write::{self, Failure};
use super::{Boundary, Contents, StateSource, directory};
use crate::{Error, Result};

/// A checkpoint that has been written under its final name.
#[derive(Debug, Clone)]
pub struct Written {
    /// The number of steps done in it.
    pub step: u64,
    /// The path of the file.
    pub path: PathBuf,
    /// The length of the file.
    pub num_bytes: u64,
    /// The time it took to write.
    pub elapsed: Duration,
    /// Older checkpoints that were removed because the disk was full.
    pub removed: Vec<PathBuf>,
}

/// The least time between two reports of progress to a rank that waits for the thread.
const REPORT_INTERVAL: Duration = Duration::from_millis(500);

/// Writes one checkpoint after the other, each on a thread that does not use MPI and reads the
/// values from an `S`.
pub struct Writer<S> {
    keep: usize,
    /// The last checkpoint, while no thread has it.
    idle: Option<WriteJob<S>>,
    /// The thread, which returns the checkpoint and the outcome.
    busy: Option<JoinHandle<(WriteJob<S>, Result<Written>)>>,
    /// The number of steps that the thread has completed, which shows its progress.
    progress: Arc<AtomicU64>,
}

/// A checkpoint to be written.
struct WriteJob<S> {
    path: PathBuf,
    contents: Contents,
    state: S,
}

impl<S: StateSource + Send + 'static> Writer<S> {
    /// Creates a writer that leaves the newest `keep` checkpoints of a directory (all if that is 0).
    pub fn new(keep: usize) -> Writer<S> {
        Writer { keep, idle: None, busy: None, progress: Arc::default() }
    }

    /// Takes the source of the last checkpoint back. [`Writer::wait`] must come first.
    pub fn take(&mut self) -> Option<S> {
        self.idle.take().map(|job| job.state)
    }

    /// Starts to write `contents`, with values from `state`, to `path`.
    ///
    /// # Errors
    /// The system cannot start a thread.
    ///
    /// # Panics
    /// A thread is at work: [`Writer::wait`] must come first.
    pub fn start(&mut self, path: PathBuf, contents: Contents, state: S) -> Result<()> {
        self.start_job(WriteJob { path, contents, state })
    }

    fn start_job(&mut self, mut job: WriteJob<S>) -> Result<()> {
        assert!(self.busy.is_none(), "a checkpoint is started only after the last one was waited for");
        let (keep, progress) = (self.keep, Arc::clone(&self.progress));
        let doing = format!("writing {}", job.path.display());
        let work = move || {
            let mut report = |_| {
                progress.fetch_add(1, Ordering::Relaxed);
            };
            let WriteJob { path, contents, state } = &mut job;
            let outcome = write_and_prune(path, keep, contents, state, &mut report);
            state.end();
            (job, outcome)
        };
        let thread = thread::Builder::new().name("checkpoint".into()).spawn(work);
        self.busy = Some(thread.map_err(|error| Error::failed(doing, error))?);
        Ok(())
    }

    /// Returns the number of steps that threads have completed.
    pub fn progress(&self) -> u64 {
        self.progress.load(Ordering::Relaxed)
    }

    /// Returns true while a thread is at work.
    pub fn is_busy(&self) -> bool {
        self.busy.as_ref().is_some_and(|thread| !thread.is_finished())
    }

    /// Returns the outcome of the last checkpoint, once, when the thread has finished.
    pub fn poll(&mut self) -> Option<Result<Written>> {
        if self.busy.as_ref()?.is_finished() { self.wait() } else { None }
    }

    /// Starts to write the last checkpoint again after a failure, unless its source was taken.
    ///
    /// # Errors
    /// The system cannot start a thread.
    pub fn try_again(&mut self) -> Result<()> {
        self.idle.take().map_or(Ok(()), |job| self.start_job(job))
    }

    /// Blocks until the thread has made further progress (true) or is idle (false), in calls of
    /// `pause`.
    pub fn wait_for_progress(&self, pause: &mut dyn FnMut()) -> bool {
        let (before, start) = (self.progress(), Instant::now());
        while self.is_busy() {
            if start.elapsed() > REPORT_INTERVAL && self.progress() != before {
                return true;
            }
            pause();
        }
        false
    }

    /// Blocks until the last checkpoint is written, and returns the outcome unless [`Writer::poll`]
    /// has.
    pub fn wait(&mut self) -> Option<Result<Written>> {
        match self.busy.take()?.join() {
            Ok((job, outcome)) => {
                self.idle = Some(job);
                Some(outcome)
            }
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
}

/// Writes `contents`, with values from `state`, to `path`, creating the directory if it is missing,
/// then removes all but the newest `keep` checkpoints beside it (none if that is 0). If the disk is
/// full, removes older ones first, one by one, as long as a sound one stays (none if all are to be
/// kept). Calls `report` after each step. Not collective; does not use MPI.
///
/// # Errors
/// A parameter is NaN or infinite, or the system reports an error (see [`write`](super::write())).
/// A file that cannot be removed is only a warning.
pub fn write_and_prune(
    path: &Path,
    keep: usize,
    contents: &Contents,
    state: &mut dyn StateSource,
    report: &mut dyn FnMut(Boundary),
) -> Result<Written> {
    let start = Instant::now();
    let directory = write::directory_of(path);
    let step = contents.description.step;
    if !directory.exists() {
        // an error here shows again when the file is written
        let _ = directory::create_durably(directory);
    }
    let mut removed = Vec::new();
    let num_bytes = loop {
        match write::attempt(path, contents, state, report) {
            Ok(num_bytes) => break num_bytes,
            Err(Failure { is_full: true, .. })
                if keep > 0
                    && let Ok(Some(oldest)) = directory::make_room(directory, step) =>
            {
                report(Boundary::Removed);
                removed.push(oldest);
            }
            Err(Failure { error, .. }) => return Err(error),
        }
    };
    let elapsed = start.elapsed();
    let pruned = directory::prune(directory, step, keep, &mut || report(Boundary::Removed));
    // temporary files of a job that died may have become old enough only now
    if let Err(error) = pruned.and(directory::remove_temporaries(directory)) {
        log::warn!("removing old checkpoints from {}: {error}", directory.display());
    }
    Ok(Written { step, path: path.to_owned(), num_bytes, elapsed, removed })
}
