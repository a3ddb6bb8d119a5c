//! The checkpoints of a run: `step-NNNNNNNN.h5` in one directory.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::Checkpoint;
use crate::{Error, Result};

/// A temporary file that nobody has written to for this long belongs to a job that died.
const STALE: Duration = Duration::from_secs(3600);

/// The name of the checkpoint after step `step`.
pub fn file_name(step: u64) -> String {
    format!("step-{step:08}.h5")
}

/// The step that a file name tells.
fn step_of(name: &str) -> Option<u64> {
    let digits = name.strip_prefix("step-")?.strip_suffix(".h5")?;
    let step = digits.parse().ok()?;
    (file_name(step) == name).then_some(step)
}

/// Step and path of the checkpoints in `directory`, oldest first; none if there is no such directory. Not collective.
///
/// # Errors
/// The directory cannot be read.
pub fn list(directory: &Path) -> Result<Vec<(u64, PathBuf)>> {
    entries(directory).map_err(|error| Error::input(format!("reading the directory {}", directory.display()), error))
}

fn entries(directory: &Path) -> io::Result<Vec<(u64, PathBuf)>> {
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry?;
        if let Some(step) = step_of(&entry.file_name().to_string_lossy()) {
            found.push((step, entry.path()));
        }
    }
    found.sort();
    Ok(found)
}

/// What a directory had to offer.
pub struct Found {
    /// The newest checkpoint that is sound, if there is one.
    pub checkpoint: Option<Checkpoint>,
    /// Why each newer one is not, with its name.
    pub damaged: Vec<Error>,
}

/// Looks for the newest sound checkpoint in `directory`. Not collective.
///
/// # Errors
/// The directory cannot be read.
pub fn newest_sound(directory: &Path) -> Result<Found> {
    let mut damaged = Vec::new();
    for (step, path) in list(directory)?.into_iter().rev() {
        match Checkpoint::open(&path) {
            Ok(checkpoint) if checkpoint.description.step == step => {
                return Ok(Found { checkpoint: Some(checkpoint), damaged });
            }
            Ok(other) => {
                let why = format!("it is the checkpoint of step {}, under another's name", other.description.step);
                damaged.push(Error::input(format!("reading the checkpoint {}", path.display()), why));
            }
            // another job may have removed it meanwhile
            Err(_) if !path.exists() => {}
            Err(error) => damaged.push(error),
        }
    }
    Ok(Found { checkpoint: None, damaged })
}

/// Removes all but the newest `keep` checkpoints (all are kept if that is 0), and temporary files of jobs that died; calls
/// `told` after each. Not collective.
///
/// # Errors
/// A file cannot be removed.
pub(super) fn prune(directory: &Path, keep: usize, told: &mut dyn FnMut()) -> io::Result<()> {
    let checkpoints = entries(directory)?;
    let num_old = if keep == 0 { 0 } else { checkpoints.len().saturating_sub(keep) };
    let mut doomed: Vec<PathBuf> = checkpoints.into_iter().take(num_old).map(|(_, path)| path).collect();
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let is_temporary = name.starts_with(".step-") && name.ends_with(".tmp");
        let age = entry.metadata().and_then(|data| data.modified()).ok().and_then(|time| time.elapsed().ok());
        if is_temporary && age.is_some_and(|age| age > STALE) {
            doomed.push(entry.path());
        }
    }
    for path in doomed {
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => told(),
        }
    }
    Ok(())
}
