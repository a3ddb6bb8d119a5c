//! From a snapshot to a durable file.

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

/// What the writer has just done to the file system, told to whoever wants to know; a test kills the process there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Boundary {
    /// The temporary file is there.
    Created,
    /// Some of it has been written.
    Wrote,
    /// All of it is on the disk.
    Synced,
    /// It has its final name.
    Renamed,
    /// The directory is on the disk too.
    DirectorySynced,
    /// An older file was removed.
    Removed,
}

/// Bytes of one write.
const BLOCK: usize = 1 << 20;

/// Why a file could not be written.
pub(super) struct Failure {
    pub(super) error: Error,
    /// There was no room for it.
    pub(super) is_full: bool,
}

/// Writes `snapshot` to `path`, whole and durable or not at all: under a temporary name in the same directory, then fsync,
/// rename, fsync of the directory. Returns the number of bytes. Not collective, and free of MPI.
///
/// # Errors
/// A parameter is not finite, or the system refuses. The temporary file is gone then, and whatever had the name `path` is as it was,
/// unless all failed but the last fsync.
pub fn write(path: &Path, snapshot: &Snapshot, told: &mut dyn FnMut(Boundary)) -> Result<u64> {
    attempt(path, snapshot, told).map_err(|failure| failure.error)
}

/// As [`write()`], and says whether it failed for want of room.
pub(super) fn attempt(
    path: &Path,
    snapshot: &Snapshot,
    told: &mut dyn FnMut(Boundary),
) -> std::result::Result<u64, Failure> {
    let doing = || format!("writing {}", path.display());
    let otherwise = |error| Failure { error, is_full: false };
    let (checksums, digest) = checksums(snapshot).map_err(|why| otherwise(Error::failed(doing(), why)))?;
    let skeleton = skeleton(snapshot, &checksums, digest).map_err(otherwise)?;
    publish(path, snapshot, skeleton, told).map_err(|error| {
        let is_full = matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded);
        Failure { error: Error::failed(doing(), error), is_full }
    })
}

/// The checksum of every tensor, and that of all parameters in a row (the digest of the model).
fn checksums(snapshot: &Snapshot) -> std::result::Result<(Vec<u128>, u128), String> {
    let (mut checksums, mut digest) = (Vec::new(), Xxh3::new());
    for entry in snapshot.entries() {
        let values = snapshot.values(entry);
        // (a slot may overflow, and the run still go on)
        if entry.group == "model" && !values.iter().all(|value| value.is_finite()) {
            return Err(format!("{}/{} holds a value that is no finite number", entry.group, entry.name));
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
    told: &mut dyn FnMut(Boundary),
) -> io::Result<u64> {
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let mut file = tempfile::Builder::new()
        .prefix(&format!(".{name}."))
        .suffix(".tmp")
        // what the umask leaves of it, as for any file
        .permissions(Permissions::from_mode(0o666))
        .tempfile_in(directory)?;
    told(Boundary::Created);
    let len = skeleton.len;
    let open = file.as_file_mut();
    let digest = write_body(open, snapshot, skeleton, told)?;
    open.seek(SeekFrom::Start(0))?;
    open.write_all(&seal::make(len, digest))?;
    told(Boundary::Wrote);
    open.sync_all()?;
    told(Boundary::Synced);
    file.persist(path).map_err(|error| error.error)?;
    told(Boundary::Renamed);
    match File::open(directory)?.sync_all() {
        // some file systems sync no directories, and make renames durable by themselves
        Err(error) if matches!(error.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported) => {}
        synced => synced?,
    }
    told(Boundary::DirectorySynced);
    Ok(len)
}

/// Writes everything behind the seal, from front to back, the values from the snapshot and all else from the skeleton.
fn write_body(
    file: &mut File,
    snapshot: &Snapshot,
    mut skeleton: Skeleton,
    told: &mut dyn FnMut(Boundary),
) -> io::Result<u128> {
    let mut hash = Xxh3::new();
    file.write_all(&[0; seal::LEN])?;
    let mut at = seal::LEN as u64;
    let mut put = |bytes: &[u8]| {
        for block in bytes.chunks(BLOCK) {
            file.write_all(block)?;
            hash.update(block);
            told(Boundary::Wrote);
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
