//! The thread that writes while training goes on.

use std::path::{Path, PathBuf};
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

/// Writes one snapshot after the other into a directory, each on a thread that knows no MPI.
pub struct Writer {
    directory: PathBuf,
    keep: usize,
    /// Memory for the next; away while it is written.
    idle: Option<Snapshot>,
    busy: Option<JoinHandle<(Snapshot, Result<Written>)>>,
}

impl Writer {
    /// Writes into `directory`, of which the newest `keep` stay (all if that is 0), from memory like that of `snapshot`. Not
    /// collective.
    pub fn new(directory: PathBuf, keep: usize, snapshot: Snapshot) -> Writer {
        Writer { directory, keep, idle: Some(snapshot), busy: None }
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
        let work = move || {
            let outcome = write_and_prune(&path, keep, &snapshot, &mut |_| ());
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
    if let Err(error) = directory::prune(directory, step, keep, &mut || told(Boundary::Removed)) {
        log::warn!("removing old checkpoints from {}: {error}", directory.display());
    }
    Ok(Written { step, path: path.to_owned(), num_bytes, elapsed })
}
