//! Writing a snapshot to a durable file.

use std::fs::{File, Permissions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use xxhash_rust::xxh3::Xxh3;

use super::seal;
use super::skeleton::{Skeleton, skeleton};
use super::snapshot::Snapshot;
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

/// Writes `snapshot` to `path`, whole and durable or not at all: under a temporary name in the same
/// directory, then fsync, rename, fsync of the directory. Calls `report` after each step and
/// returns the number of bytes. Not collective; does not use MPI.
///
/// # Errors
/// A parameter is NaN or infinite, or the system reports an error. The temporary file is then
/// removed, and a file that was at `path` is unchanged, unless only the last fsync failed.
pub fn write(path: &Path, snapshot: &Snapshot, report: &mut dyn FnMut(Boundary)) -> Result<u64> {
    attempt(path, snapshot, report).map_err(|failure| failure.error)
}

/// Does the work of [`write()`], and reports whether it failed because the disk was full.
pub(super) fn attempt(
    path: &Path,
    snapshot: &Snapshot,
    report: &mut dyn FnMut(Boundary),
) -> std::result::Result<u64, Failure> {
    let doing = || format!("writing {}", path.display());
    let otherwise = |error| Failure { error, is_full: false };
    let (checksums, digest) = checksums(snapshot).map_err(|why| otherwise(Error::failed(doing(), why)))?;
    let skeleton = skeleton(snapshot, &checksums, digest).map_err(otherwise)?;
    publish(path, snapshot, skeleton, report).map_err(|error| {
        let is_full = matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded);
        Failure { error: Error::failed(doing(), error), is_full }
    })
}

/// Computes the checksum of every tensor and the digest of the model: the checksum of all
/// parameters in a row.
fn checksums(snapshot: &Snapshot) -> std::result::Result<(Vec<u128>, u128), String> {
    let (mut checksums, mut digest) = (Vec::new(), Xxh3::new());
    for entry in snapshot.entries() {
        let values = snapshot.values(entry);
        // (a slot may overflow without stopping the run)
        if entry.group == "model" && !values.iter().all(|value| value.is_finite()) {
            return Err(format!("{}/{} holds a value that is NaN or infinite", entry.group, entry.name));
        }
        let mut hash = Xxh3::new();
        hash_values(&mut hash, values);
        checksums.push(hash.digest128());
        if entry.group == "model" {
            hash_values(&mut digest, values);
        }
    }
    Ok((checksums, digest.digest128()))
}

fn publish(
    path: &Path,
    snapshot: &Snapshot,
    skeleton: Skeleton,
    report: &mut dyn FnMut(Boundary),
) -> io::Result<u64> {
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let mut file = tempfile::Builder::new()
        .prefix(&format!(".{name}."))
        .suffix(".tmp")
        // reduced by the umask, as for any file
        .permissions(Permissions::from_mode(0o666))
        .tempfile_in(directory)?;
    report(Boundary::Created);
    let len = skeleton.len;
    let open = file.as_file_mut();
    let digest = write_body(open, snapshot, skeleton, report)?;
    open.seek(SeekFrom::Start(0))?;
    open.write_all(&seal::make(len, digest))?;
    report(Boundary::Wrote);
    open.sync_all()?;
    report(Boundary::Synced);
    file.persist(path).map_err(|error| error.error)?;
    report(Boundary::Renamed);
    match File::open(directory)?.sync_all() {
        // some file systems cannot sync directories, and make renames durable by themselves
        Err(error) if matches!(error.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported) => {}
        synced => synced?,
    }
    report(Boundary::DirectorySynced);
    Ok(len)
}

/// Writes everything behind the seal, from front to back, the values from the snapshot and the rest
/// from the skeleton.
fn write_body(
    file: &mut File,
    snapshot: &Snapshot,
    mut skeleton: Skeleton,
    report: &mut dyn FnMut(Boundary),
) -> io::Result<u128> {
    let mut hash = Xxh3::new();
    file.write_all(&[0; seal::LEN])?;
    let mut at = seal::LEN as u64;
    let mut put = |bytes: &[u8]| {
        for block in bytes.chunks(BLOCK) {
            file.write_all(block)?;
            hash.update(block);
            report(Boundary::Wrote);
        }
        io::Result::Ok(())
    };
    let mut values: Vec<(u64, &[f32])> = skeleton
        .offsets
        .iter()
        .zip(snapshot.entries())
        .map(|(at, entry)| (*at, snapshot.values(entry)))
        .collect();
    values.sort_unstable_by_key(|(at, _)| *at);
    values.push((skeleton.len, &[]));
    let mut between = Vec::new();
    for (offset, values) in values {
        between.resize((offset - at) as usize, 0);
        skeleton.file.seek(SeekFrom::Start(at))?;
        skeleton.file.read_exact(&mut between)?;
        put(&between)?;
        put(bytemuck::cast_slice(values))?;
        at = offset + size_of_val(values) as u64;
    }
    Ok(hash.digest128())
}
