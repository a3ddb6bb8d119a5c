//! The user block in front of the HDF5 part: a title line, the length of the file, and a checksum
//! of the rest.
//!
//! HDF5 leaves the user block to the application, and its readers skip it (HDF5 File Format
//! Specification, §II.A).

use std::fs::File;
use std::io::Read;
use std::path::Path;

use xxhash_rust::xxh3::Xxh3;

use crate::{Error, Result};

/// The length of the seal: the smallest user block that HDF5 allows.
pub(super) const LEN: usize = 512;

/// The first bytes of an HDF5 file without a user block.
const HDF5_SIGNATURE: &[u8] = b"\x89HDF\r\n\x1a\n";

/// The first line, with the version of the format.
const TITLE: &str = "Phalanx checkpoint, format 1";

/// The program that wrote a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Origin {
    /// Phalanx; every byte is as it was written.
    Sealed,
    /// Another program that writes HDF5.
    Foreign,
}

/// Returns the seal of a file of `length` bytes in all, whose bytes after the seal hash to
/// `digest`.
pub(super) fn make(length: u64, digest: u128) -> [u8; LEN] {
    let mut seal = [b'\n'; LEN];
    let text = format!("{TITLE}\nbytes {length}\nxxh3_128 {digest:032x}\n");
    seal[..text.len()].copy_from_slice(text.as_bytes());
    seal
}

/// Reads all of the file `path` and checks it against its seal. Not collective.
///
/// # Errors
/// The file cannot be read ([`Error::Failed`]); or it is missing, damaged, or neither a checkpoint
/// nor an HDF5 file ([`Error::Input`]).
pub(super) fn check(path: &Path) -> Result<Origin> {
    let doing = || format!("reading the checkpoint {}", path.display());
    let fail = |why: String| Error::input(doing(), why);
    let system = |error: std::io::Error| Error::at_path(doing(), &error);
    // opening a pipe would block until another process writes to it
    if !path.metadata().map_err(system)?.is_file() {
        return Err(fail("it is a directory, a pipe or a device, not a file".into()));
    }
    let mut file = File::open(path).map_err(system)?;
    let mut seal = Vec::with_capacity(LEN);
    Read::by_ref(&mut file).take(LEN as u64).read_to_end(&mut seal).map_err(system)?;
    if seal.starts_with(HDF5_SIGNATURE) {
        return Ok(Origin::Foreign);
    }
    if seal.is_empty() {
        return Err(fail("it is empty".into()));
    }
    if !seal.starts_with(b"Phalanx checkpoint") {
        return Err(fail("it is not a Phalanx checkpoint, or its beginning is damaged".into()));
    }
    let mut hash = Xxh3::new();
    let mut length = seal.len() as u64;
    let mut block = vec![0; 1 << 20];
    loop {
        let num_read = file.read(&mut block).map_err(system)?;
        if num_read == 0 {
            break;
        }
        hash.update(&block[..num_read]);
        length += num_read as u64;
    }
    if seal == make(length, hash.digest128()) {
        return Ok(Origin::Sealed);
    }
    let text = String::from_utf8_lossy(&seal);
    let mut lines = text.lines();
    let title = lines.next().unwrap_or_default();
    let wanted = lines.next().and_then(|line| line.strip_prefix("bytes ")?.parse::<u64>().ok());
    Err(fail(match wanted {
        Some(wanted) if wanted != length => {
            format!("it is damaged: it has {length} bytes, and was written with {wanted}")
        }
        _ if title != TITLE => format!("its first line is {title:?}, and this program reads {TITLE:?}"),
        _ => "it is damaged: its bytes do not match its checksum".into(),
    }))
}
