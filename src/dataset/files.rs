//! The files of data sets.

use std::fs::File;
use std::path::{Path, PathBuf};

/// The largest unpacked size in bytes of a file that is read whole: twenty times the images of MNIST, the
/// largest file of the published sets.
pub(super) const LARGEST_FILE: usize = 1 << 30;

/// Returns true for the file names of published sets in IDX or CIFAR-10 format.
pub fn is_published_name(name: &str) -> bool {
    name.contains("-ubyte") || name.ends_with("_batch.bin") || name.starts_with("data_batch_")
}

/// Returns true for a name that may be a pattern of files.
pub fn is_pattern(name: &str) -> bool {
    name.contains(['*', '?', '['])
}

/// Returns the file or directory called `name`, or else the files that match it as a pattern, in the order
/// of their names. Not collective.
///
/// # Errors
/// No file has this name or matches the pattern, the pattern is malformed, or a directory cannot be read.
pub fn matching_paths(name: &str) -> Result<Vec<PathBuf>, String> {
    let missing = match std::fs::metadata(name) {
        Ok(_) => return Ok(vec![PathBuf::from(name)]),
        Err(error) => error,
    };
    if !is_pattern(name) {
        return Err(missing.to_string());
    }
    let found = glob::glob(name).map_err(|error| error.to_string())?;
    let mut paths: Vec<PathBuf> = found.collect::<Result<_, _>>().map_err(|error| error.to_string())?;
    paths.sort();
    if paths.is_empty() { Err("no file matches this pattern".into()) } else { Ok(paths) }
}

/// Opens a regular file; opening a pipe would block until another process writes to it.
pub(super) fn open_file(path: &Path) -> Result<File, String> {
    let metadata = std::fs::metadata(path).map_err(|error| error.to_string())?;
    if !metadata.is_file() {
        return Err("it is a directory, a pipe or a device, not a file".into());
    }
    File::open(path).map_err(|error| error.to_string())
}

/// Returns true for the file names of HDF5 files.
pub fn is_hdf5_name(name: &str) -> bool {
    Path::new(name).extension().is_some_and(|extension| extension == "h5" || extension == "hdf5")
}
