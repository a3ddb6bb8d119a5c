//! The thread that writes while training goes on.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::write::{self, Failure};
use super::{Boundary, Snapshot, directory, file_name};
use crate::{Error, Result};

/// A checkpoint that has its name.
#[derive(Debug, Clone)]
pub struct Written {
    /// The steps done in it.
    pub step: u64,
    /// Where it is.
    pub path: PathBuf,
    /// Its length.
    pub num_bytes: u64,
    /// How long it took to write.
    pub elapsed: Duration,
    /// What was removed because there was no room for it.
    pub removed: Vec<PathBuf>,
}

/// How often whoever waits for the thread is told that it gets on.
const SIGN_OF_LIFE: Duration = Duration::from_millis(500);

/// Writes one snapshot after the other into a directory, each on a thread that knows no MPI.
pub struct Writer {
    directory: PathBuf,
    keep: usize,
    /// Memory for the next; away while it is written. Holds the last one until then.
    idle: Option<Snapshot>,
    /// With what became of the snapshot, if it was written.
    busy: Option<JoinHandle<(Snapshot, Option<Result<Written>>)>>,
    /// What the thread has done so far, in steps that are worth telling.
    progress: Arc<AtomicU64>,
}

impl Writer {
    /// Writes into `directory`, of which the newest `keep` stay (all if that is 0), from memory like that of `snapshot`, which a thread
    /// touches at once, so that the first checkpoint does not wait for the system to find it. Not collective.
    ///
    /// # Errors
    /// The system has no thread to spare.
    pub fn new(directory: PathBuf, keep: usize, mut snapshot: Snapshot) -> Result<Writer> {
        let progress = Arc::<AtomicU64>::default();
        let told = Arc::clone(&progress);
        let touch = move || {
            snapshot.touch(&mut || {
                told.fetch_add(1, Ordering::Relaxed);
            });
            (snapshot, None)
        };
        let busy = Some(spawn(touch, "preparing memory for checkpoints")?);
        Ok(Writer { directory, keep, idle: None, busy, progress })
    }

    /// Memory for the next snapshot. [`Writer::wait`] comes first.
    pub fn take(&mut self) -> Option<Snapshot> {
        self.idle.take()
    }

    /// Starts to write `snapshot`.
    ///
    /// # Errors
    /// The system has no thread to spare.
    ///
    /// # Panics
    /// [`Writer::wait`] did not come first.
    pub fn start(&mut self, snapshot: Snapshot) -> Result<()> {
        assert!(self.busy.is_none(), "whoever fills a snapshot has waited for the last");
        let path = self.directory.join(file_name(snapshot.description.step));
        let keep = self.keep;
        let doing = format!("writing {}", path.display());
        let progress = Arc::clone(&self.progress);
        let work = move || {
            let mut told = |_| {
                progress.fetch_add(1, Ordering::Relaxed);
            };
            let outcome = write_and_prune(&path, keep, &snapshot, &mut told);
            (snapshot, Some(outcome))
        };
        self.busy = Some(spawn(work, &doing)?);
        Ok(())
    }

    /// What became of the last snapshot, once, when it is done.
    pub fn poll(&mut self) -> Option<Result<Written>> {
        if self.busy.as_ref()?.is_finished() { self.wait() } else { None }
    }

    /// Starts to write the last snapshot, which could not be written, once more, if it is still here.
    ///
    /// # Errors
    /// The system has no thread to spare.
    pub fn try_again(&mut self) -> Result<()> {
        let Some(snapshot) = self.idle.take() else { return Ok(()) };
        self.start(snapshot)
    }

    /// Waits until the thread has nothing to do (false) or has got on a little further (true).
    pub fn gets_on(&self) -> bool {
        let (before, start) = (self.progress.load(Ordering::Relaxed), Instant::now());
        while self.busy.as_ref().is_some_and(|thread| !thread.is_finished()) {
            if start.elapsed() > SIGN_OF_LIFE && self.progress.load(Ordering::Relaxed) != before {
                return true;
            }
            thread::sleep(Duration::from_millis(1));
        }
        false
    }

    /// Waits until the last snapshot is written, and says what became of it unless [`Writer::poll`] has.
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
    /// A run that ends, for whatever reason, leaves the last snapshot whole.
    fn drop(&mut self) {
        if let Some(thread) = self.busy.take() {
            // a panic has been printed, and there is nobody to tell about the rest
            let _ = thread.join();
        }
    }
}

fn spawn<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static, doing: &str) -> Result<JoinHandle<T>> {
    let thread = thread::Builder::new().name("checkpoint".into()).spawn(work);
    thread.map_err(|error| Error::failed(doing, error))
}

/// What the thread does: writes `snapshot` to `path`, in a directory that is made if it has gone, then removes all but the newest `keep`
/// checkpoints beside it (none if that is 0). If there is no room, older ones are removed first, one by one, as long as a sound one
/// stays (none if all are to be kept). Tells `told` what it has done. Not collective, and free of MPI.
///
/// # Errors
/// As [`write`](super::write()); that something cannot be removed is only a warning.
pub fn write_and_prune(
    path: &Path,
    keep: usize,
    snapshot: &Snapshot,
    told: &mut dyn FnMut(Boundary),
) -> Result<Written> {
    let start = Instant::now();
    let directory = path.parent().unwrap_or(Path::new("."));
    let step = snapshot.description.step;
    // what is wrong with it the writing finds out too
    let _ = fs::create_dir_all(directory);
    let mut removed = Vec::new();
    let num_bytes = loop {
        match write::attempt(path, snapshot, told) {
            Ok(num_bytes) => break num_bytes,
            Err(Failure { is_full: true, .. })
                if keep > 0
                    && let Ok(Some(oldest)) = directory::make_room(directory, step) =>
            {
                told(Boundary::Removed);
                removed.push(oldest);
            }
            Err(Failure { error, .. }) => return Err(error),
        }
    };
    let elapsed = start.elapsed();
    let pruned = directory::prune(directory, step, keep, &mut || told(Boundary::Removed));
    // what a job left that died while it wrote is only now old enough, perhaps
    if let Err(error) = pruned.and(directory::remove_temporaries(directory)) {
        log::warn!("removing old checkpoints from {}: {error}", directory.display());
    }
    Ok(Written { step, path: path.to_owned(), num_bytes, elapsed, removed })
}
