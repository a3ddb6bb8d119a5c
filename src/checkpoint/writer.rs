//! The thread that writes checkpoints while training continues.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::write::{self, Failure};
use super::{Boundary, Snapshot, directory, file_name};
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

/// Writes one snapshot after the other into a directory, each on a thread that does not use MPI.
pub struct Writer {
    directory: PathBuf,
    keep: usize,
    /// Memory for the next snapshot, absent while a thread has it. Holds the last snapshot until
    /// then.
    idle: Option<Snapshot>,
    /// The thread, which returns the snapshot and, if it was written, the outcome.
    busy: Option<JoinHandle<(Snapshot, Option<Result<Written>>)>>,
    /// The number of steps that the thread has completed, which shows its progress.
    progress: Arc<AtomicU64>,
}

impl Writer {
    /// Creates a writer into `directory`, where the newest `keep` checkpoints stay (all if that is
    /// 0). A thread touches the memory of `snapshot` at once, so that the first checkpoint does not
    /// wait for the system to assign its pages. Not collective.
    ///
    /// # Errors
    /// The system cannot start a thread.
    pub fn new(directory: PathBuf, keep: usize, mut snapshot: Snapshot) -> Result<Writer> {
        let progress = Arc::<AtomicU64>::default();
        let counter = Arc::clone(&progress);
        let touch = move || {
            snapshot.touch(&mut || {
                counter.fetch_add(1, Ordering::Relaxed);
            });
            (snapshot, None)
        };
        let busy = Some(spawn(touch, "preparing memory for checkpoints")?);
        Ok(Writer { directory, keep, idle: None, busy, progress })
    }

    /// Takes the memory for the next snapshot. [`Writer::wait`] must come first.
    pub fn take(&mut self) -> Option<Snapshot> {
        self.idle.take()
    }

    /// Starts to write `snapshot`.
    ///
    /// # Errors
    /// The system cannot start a thread.
    ///
    /// # Panics
    /// A thread is at work: [`Writer::wait`] must come first.
    pub fn start(&mut self, snapshot: Snapshot) -> Result<()> {
        assert!(self.busy.is_none(), "a snapshot is started only after the last one was waited for");
        let path = self.directory.join(file_name(snapshot.description.step));
        let keep = self.keep;
        let doing = format!("writing {}", path.display());
        let progress = Arc::clone(&self.progress);
        let work = move || {
            let mut report = |_| {
                progress.fetch_add(1, Ordering::Relaxed);
            };
            let outcome = write_and_prune(&path, keep, &snapshot, &mut report);
            (snapshot, Some(outcome))
        };
        self.busy = Some(spawn(work, &doing)?);
        Ok(())
    }

    /// Returns the outcome of the last snapshot, once, when the thread has finished.
    pub fn poll(&mut self) -> Option<Result<Written>> {
        if self.busy.as_ref()?.is_finished() { self.wait() } else { None }
    }

    /// Starts to write the last snapshot again after a failure, if it has not been taken.
    ///
    /// # Errors
    /// The system cannot start a thread.
    pub fn try_again(&mut self) -> Result<()> {
        let Some(snapshot) = self.idle.take() else { return Ok(()) };
        self.start(snapshot)
    }

    /// Blocks until the thread has made further progress (true) or is idle (false).
    pub fn wait_for_progress(&self) -> bool {
        let (before, start) = (self.progress.load(Ordering::Relaxed), Instant::now());
        while self.busy.as_ref().is_some_and(|thread| !thread.is_finished()) {
            if start.elapsed() > REPORT_INTERVAL && self.progress.load(Ordering::Relaxed) != before {
                return true;
            }
            thread::sleep(Duration::from_millis(1));
        }
        false
    }

    /// Blocks until the last snapshot is written, and returns the outcome unless [`Writer::poll`]
    /// has.
    pub fn wait(&mut self) -> Option<Result<Written>> {
        match self.busy.take()?.join() {
            Ok((snapshot, outcome)) => {
                self.idle = Some(snapshot);
                outcome
            }
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
}

impl Drop for Writer {
    /// Blocks until the last snapshot is written, so that it is whole however the run ends.
    fn drop(&mut self) {
        if let Some(thread) = self.busy.take() {
            // a panic has been printed, and an error has nobody to go to
            let _ = thread.join();
        }
    }
}

fn spawn<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static, doing: &str) -> Result<JoinHandle<T>> {
    let thread = thread::Builder::new().name("checkpoint".into()).spawn(work);
    thread.map_err(|error| Error::failed(doing, error))
}

/// Writes `snapshot` to `path`, creating the directory if it is missing, then removes all but the
/// newest `keep` checkpoints beside it (none if that is 0). If the disk is full, removes older ones
/// first, one by one, as long as a sound one stays (none if all are to be kept). Calls `report`
/// after each step. Not collective; does not use MPI.
///
/// # Errors
/// A parameter is NaN or infinite, or the system reports an error (see [`write`](super::write())).
/// A file that cannot be removed is only a warning.
pub fn write_and_prune(
    path: &Path,
    keep: usize,
    snapshot: &Snapshot,
    report: &mut dyn FnMut(Boundary),
) -> Result<Written> {
    let start = Instant::now();
    let directory = path.parent().unwrap_or(Path::new("."));
    let step = snapshot.description.step;
    // an error here shows again when the file is written
    let _ = fs::create_dir_all(directory);
    let mut removed = Vec::new();
    let num_bytes = loop {
        match write::attempt(path, snapshot, report) {
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
