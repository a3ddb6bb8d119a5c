//! The thread that writes while training goes on.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::{Boundary, Snapshot, directory, file_name, write};
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
}

/// Who waits for the thread hears of it so often.
const SIGN_OF_LIFE: Duration = Duration::from_millis(500);

/// Writes one snapshot after the other into a directory, each on a thread that knows no MPI.
pub struct Writer {
    directory: PathBuf,
    keep: usize,
    /// Memory for the next; away while it is written. Holds the last one until then.
    idle: Option<Snapshot>,
    busy: Option<JoinHandle<(Snapshot, Result<Written>)>>,
    /// What the thread has done so far, in steps that are worth telling.
    progress: Arc<AtomicU64>,
}

impl Writer {
    /// Writes into `directory`, of which the newest `keep` stay (all if that is 0), from memory like that of `snapshot`. Not
    /// collective.
    pub fn new(directory: PathBuf, keep: usize, snapshot: Snapshot) -> Writer {
        Writer { directory, keep, idle: Some(snapshot), busy: None, progress: Arc::default() }
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
            (snapshot, outcome)
        };
        let thread = thread::Builder::new().name("checkpoint".into()).spawn(work);
        self.busy = Some(thread.map_err(|error| Error::failed(doing, error))?);
        Ok(())
    }

    /// What became of the last snapshot, once, when it is done.
    pub fn poll(&mut self) -> Option<Result<Written>> {
        if self.busy.as_ref()?.is_finished() { self.wait() } else { None }
    }

    /// Starts to write the last snapshot, which could not be written, once more, if it is still here; the directory is made if it has
    /// gone.
    ///
    /// # Errors
    /// The system has no thread to spare.
    pub fn try_again(&mut self) -> Result<()> {
        let Some(snapshot) = self.idle.take() else { return Ok(()) };
        // what is wrong with it the writing finds out too
        let _ = fs::create_dir_all(&self.directory);
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
                Some(outcome)
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

/// What the thread does: writes `snapshot` to `path`, then removes all but the newest `keep` checkpoints beside it (none if that
/// is 0). Tells `told` what it has done. Not collective, and free of MPI.
///
/// # Errors
/// As [`write()`]; that something cannot be removed is only a warning.
pub fn write_and_prune(
    path: &Path,
    keep: usize,
    snapshot: &Snapshot,
    told: &mut dyn FnMut(Boundary),
) -> Result<Written> {
    let start = Instant::now();
    let num_bytes = write(path, snapshot, told)?;
    let elapsed = start.elapsed();
    let directory = path.parent().unwrap_or(Path::new("."));
    let step = snapshot.description.step;
    let pruned = directory::prune(directory, step, keep, &mut || told(Boundary::Removed));
    // what a job left that died while it wrote is only now old enough, perhaps
    if let Err(error) = pruned.and(directory::remove_temporaries(directory)) {
        log::warn!("removing old checkpoints from {}: {error}", directory.display());
    }
    Ok(Written { step, path: path.to_owned(), num_bytes, elapsed })
}
