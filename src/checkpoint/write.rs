//! Writing a checkpoint to a durable file.

use std::fs::{File, Permissions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use tempfile::NamedTempFile;
use xxhash_rust::xxh3::Xxh3;

use super::contents::{Contents, StateSource, group_name};
use super::file_layout::FileLayout;
use super::seal;
use super::skeleton::{Checksums, skeleton};
use crate::nn::hash_values;
use crate::{Error, Result};

/// A step in the writing of a file that has just been completed. Tests kill the process at each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Boundary {
    /// The temporary file has been created.
    Created,
    /// Another block of the file has been written.
    Wrote,
    /// The whole file is on the disk.
    Synced,
    /// The file has its final name.
    Renamed,
    /// The directory is on the disk too.
    DirectorySynced,
    /// An older file was removed.
    Removed,
}

/// Bytes per write.
const BLOCK: usize = 1 << 20;

/// The reason why a file could not be written.
pub(super) struct Failure {
    pub(super) error: Error,
    /// True if the disk or the quota was full.
    pub(super) is_full: bool,
}

/// Writes the tensors of `contents`, with values from `state`, to `path`, whole and durable or not
/// at all: under a temporary name in the same directory, then fsync, rename, fsync of the directory.
/// Calls `report` after each step and returns the number of bytes. Not collective; does not use MPI.
///
/// # Errors
/// A parameter is NaN or infinite, the values cannot be had, or the system reports an error. The
/// temporary file is then removed, and a file that was at `path` is unchanged, unless only the last
/// fsync failed.
pub fn write(
    path: &Path,
    contents: &Contents,
    state: &mut dyn StateSource,
    report: &mut dyn FnMut(Boundary),
) -> Result<u64> {
    attempt(path, contents, state, report).map_err(|failure| failure.error)
}

/// Does the work of [`write()`], and reports whether it failed because the disk was full.
pub(super) fn attempt(
    path: &Path,
    contents: &Contents,
    state: &mut dyn StateSource,
    report: &mut dyn FnMut(Boundary),
) -> std::result::Result<u64, Failure> {
    let system = |error: io::Error| {
        let is_full = matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded);
        Failure { error: Error::failed(format!("writing {}", path.display()), error), is_full }
    };
    let otherwise = |error| Failure { error, is_full: false };
    let unknown = Checksums { tensors: vec![0; contents.entries().len()], parameters: 0 };
    let layout = skeleton(contents, &unknown).map_err(otherwise)?;
    let mut file = create_beside(path).map_err(system)?;
    report(Boundary::Created);
    let checksums = write_values(file.as_file_mut(), contents, &layout, state, report).map_err(system)?;
    let complete = skeleton(contents, &checksums).map_err(otherwise)?;
    assert_eq!((&complete.values, complete.len), (&layout.values, layout.len), "one layout of a file");
    finish(file.as_file_mut(), complete, report).map_err(system)?;
    publish(file, path, report).map_err(system)?;
    Ok(layout.len)
}

/// Creates a temporary file beside `path`, to take its place when it is whole. Not collective.
///
/// # Errors
/// The system does not allow it.
pub fn create_beside(path: &Path) -> io::Result<NamedTempFile> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    tempfile::Builder::new()
        .prefix(&format!(".{name}."))
        .suffix(".tmp")
        // reduced by the umask, as for any file
        .permissions(Permissions::from_mode(0o666))
        .tempfile_in(directory_of(path))
}

/// Returns the directory in which `path` lies.
pub fn directory_of(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Writes all values to their places in `file`, and returns their checksums.
fn write_values(
    file: &mut File,
    contents: &Contents,
    layout: &FileLayout,
    state: &mut dyn StateSource,
    report: &mut dyn FnMut(Boundary),
) -> io::Result<Checksums> {
    let (mut tensors, mut digest) = (Vec::new(), Xxh3::new());
    let mut pending = contents.entries().iter().zip(&layout.values);
    state.read(&mut |values| {
        let Some((entry, place)) = pending.next() else {
            return Err(io::Error::other("there are more tensors than in the file"));
        };
        let len: usize = entry.shape.iter().product();
        if values.len() != len {
            let (group, name, found) = (&entry.group, &entry.name, values.len());
            return Err(io::Error::other(format!("{group}/{name} has {len} values, not {found}")));
        }
        let is_parameter = entry.group == group_name(None);
        // (a slot may overflow without stopping the run)
        if is_parameter && !values.iter().all(|value| value.is_finite()) {
            let why = format!("{}/{} holds a value that is NaN or infinite", entry.group, entry.name);
            return Err(io::Error::other(why));
        }
        let mut hash = Xxh3::new();
        file.seek(SeekFrom::Start(place.start))?;
        for block in values.chunks(BLOCK / size_of::<f32>()) {
            hash_values(&mut hash, block);
            if is_parameter {
                hash_values(&mut digest, block);
            }
            file.write_all(bytemuck::cast_slice(block))?;
            report(Boundary::Wrote);
        }
        tensors.push(hash.digest128());
        Ok(())
    })?;
    if pending.next().is_some() {
        return Err(io::Error::other("there are fewer tensors than in the file"));
    }
    Ok(Checksums { tensors, parameters: digest.digest128() })
}

/// Writes everything that is not a value, from the layout, then the seal, for which all of the
/// file is read.
fn finish(file: &mut File, mut layout: FileLayout, report: &mut dyn FnMut(Boundary)) -> io::Result<()> {
    layout.copy_to(file, seal::LEN as u64)?;
    report(Boundary::Wrote);
    file.seek(SeekFrom::Start(seal::LEN as u64))?;
    let (mut hash, mut block) = (Xxh3::new(), vec![0; BLOCK]);
    loop {
        let num_read = file.read(&mut block)?;
        if num_read == 0 {
            break;
        }
        hash.update(&block[..num_read]);
        report(Boundary::Wrote);
    }
    file.seek(SeekFrom::Start(0))?;
    file.write_all(&seal::make(layout.len, hash.digest128()))?;
    report(Boundary::Wrote);
    Ok(())
}

/// Makes `file` durable under the name `path`, on the disk before it returns, and calls `report` after each
/// step of that. Not collective.
///
/// # Errors
/// The system reports an error.
pub fn publish(file: NamedTempFile, path: &Path, report: &mut dyn FnMut(Boundary)) -> io::Result<()> {
    file.as_file().sync_all()?;
    report(Boundary::Synced);
    file.persist(path).map_err(|error| error.error)?;
    report(Boundary::Renamed);
    match File::open(directory_of(path))?.sync_all() {
        // some file systems cannot sync directories, and make renames durable by themselves
        Err(error) if matches!(error.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported) => {}
        synced => synced?,
    }
    report(Boundary::DirectorySynced);
    Ok(())
}
