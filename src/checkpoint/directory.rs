//! The checkpoints of a run: `step-NNNNNNNN.h5` in one directory.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::Checkpoint;
use super::write::directory_of;
use crate::{Error, Result};

/// Returns the file name of the checkpoint after step `step`.
pub fn file_name(step: u64) -> String {
    format!("step-{step:08}.h5")
}

/// Returns the step in the file name of a checkpoint, or `None` for any other name.
pub fn step_of(name: &str) -> Option<u64> {
    let digits = name.strip_prefix("step-")?.strip_suffix(".h5")?;
    let step = digits.parse().ok()?;
    (file_name(step) == name).then_some(step)
}

/// Creates `directory` and its missing parents, and synchronises them, so that they survive a loss
/// of power as the files in them do. Not collective.
///
/// # Errors
/// The system refuses to create one.
pub fn create_durably(directory: &Path) -> io::Result<()> {
    let above = directory_of(directory);
    // the working directory is above itself, and need not be readable
    if above != directory && !above.exists() {
        create_durably(above)?;
    }
    fs::create_dir_all(directory)?;
    // some file systems cannot synchronise directories, and need not
    let _ = File::open(above).and_then(|above| above.sync_all());
    Ok(())
}

/// Lists step and path of the checkpoints in `directory`, oldest first; none if the directory does
/// not exist. Not collective.
///
/// # Errors
/// The directory cannot be read.
pub fn list(directory: &Path) -> Result<Vec<(u64, PathBuf)>> {
    let doing = || format!("reading the directory {}", directory.display());
    entries(directory).map_err(|error| Error::at_path(doing(), &error))
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

/// The result of a search for the newest sound checkpoint of a directory.
pub struct Found {
    /// The newest sound checkpoint, if there is one.
    pub checkpoint: Option<Checkpoint>,
    /// For each newer checkpoint, its name and the reason why it is not sound or cannot be read.
    pub damaged: Vec<Error>,
}

/// Finds the newest sound checkpoint in `directory`. Not collective.
///
/// # Errors
/// The directory cannot be read, or none of its checkpoints is sound and one could not be read.
pub fn newest_sound(directory: &Path) -> Result<Found> {
    newest_acceptable(directory, &|_| Ok(()))
}

/// Finds the newest sound checkpoint that `accept` does not refuse; a refused one counts as
/// damaged. Not collective.
///
/// # Errors
/// The directory cannot be read, or none of its checkpoints is sound and accepted and one could not
/// be read.
pub fn newest_acceptable(directory: &Path, accept: &dyn Fn(&Checkpoint) -> Result<()>) -> Result<Found> {
    loop {
        let mut found = Found { checkpoint: None, damaged: Vec::new() };
        let mut has_vanished = false;
        for (step, path) in list(directory)?.into_iter().rev() {
            match Checkpoint::open(&path) {
                Ok(checkpoint) if checkpoint.description.step == step => match accept(&checkpoint) {
                    Ok(()) => {
                        found.checkpoint = Some(checkpoint);
                        break;
                    }
                    Err(error) => found.damaged.push(error),
                },
                Ok(other) => {
                    let why = format!(
                        "it is the checkpoint of step {}, under another's name",
                        other.description.step
                    );
                    found
                        .damaged
                        .push(Error::input(format!("reading the checkpoint {}", path.display()), why));
                }
                // another job has removed it and may have written others
                Err(_) if has_gone(&path) => has_vanished = true,
                // the contents of an unreadable file are unknown, and an older one serves
                Err(error) => found.damaged.push(error),
            }
        }
        if found.checkpoint.is_none()
            && let Some(at) = found.damaged.iter().position(|error| matches!(error, Error::Failed(_)))
        {
            return Err(found.damaged.swap_remove(at));
        }
        if found.checkpoint.is_some() || !has_vanished {
            return Ok(found);
        }
    }
}

fn has_gone(path: &Path) -> bool {
    fs::symlink_metadata(path).is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
}

/// Removes all but the newest `keep` of the checkpoints up to step `step` (none if `keep` is 0),
/// and calls `after_each` after each removal. Newer ones are not counted: they are damaged, or
/// another job's. Not collective.
///
/// # Errors
/// A file cannot be removed.
pub(super) fn prune(
    directory: &Path,
    step: u64,
    keep: usize,
    after_each: &mut dyn FnMut(),
) -> io::Result<()> {
    let mut checkpoints = entries(directory)?;
    checkpoints.retain(|(other, _)| *other <= step);
    let num_old = if keep == 0 { 0 } else { checkpoints.len().saturating_sub(keep) };
    let mut outcome = Ok(());
    for (_, path) in checkpoints.into_iter().take(num_old) {
        let removed = remove(&path);
        after_each();
        outcome = outcome.and(removed);
    }
    outcome
}

/// Removes the oldest checkpoint before the newest sound one of step `step` or earlier, and returns
/// its path; removes nothing if there is no such checkpoint. Not collective.
///
/// # Errors
/// The directory cannot be read, or the file cannot be removed.
pub(super) fn make_room(directory: &Path, step: u64) -> Result<Option<PathBuf>> {
    let Some(newest) = newest_sound(directory)?.checkpoint else { return Ok(None) };
    let end = newest.description.step.min(step);
    let mut candidates = list(directory)?.into_iter().filter(|(other, _)| *other < end);
    let Some((_, oldest)) = candidates.next() else { return Ok(None) };
    remove(&oldest).map_err(|error| Error::failed(format!("removing {}", oldest.display()), error))?;
    Ok(Some(oldest))
}

/// The starts of the names of temporary files: of checkpoints, and of what is known of the samples.
const TEMPORARY_PREFIXES: [&str; 2] = [".step-", ".data-scan.json."];

/// The age after which a temporary file counts as abandoned by a job that died.
const ABANDONED: Duration = Duration::from_secs(15 * 60);

/// Removes the temporary files of jobs that died while they wrote to `directory`. Recent ones stay:
/// another incarnation of this job may still be writing its last checkpoint. Not collective.
///
/// # Errors
/// A file cannot be removed.
pub fn remove_temporaries(directory: &Path) -> io::Result<()> {
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let is_own = TEMPORARY_PREFIXES.iter().any(|prefix| name.starts_with(prefix));
        if is_own && name.ends_with(".tmp") {
            // a file that has just vanished needs no removal
            let modified = entry.metadata().and_then(|file| file.modified());
            if modified.is_ok_and(|time| time.elapsed().is_ok_and(|age| age > ABANDONED)) {
                remove(&entry.path())?;
            }
        }
    }
    Ok(())
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}
