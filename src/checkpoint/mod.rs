//! Checkpoints: the state from which a run continues. One file per checkpoint, whole tensors by
//! name, independent of the layout that wrote it.
//!
//! ```text
//! step-00000050.h5        HDF5 behind a user block of 512 bytes (the seal)
//!   /                     attributes: step, epoch, step_in_epoch, loss, seed, model, config,
//!                         options, written_by, parameters_digest
//!   /model/NAME           f32, PyTorch's name and shape; attribute xxh3_128: checksum of the
//!                         values, little-endian
//!   /optimizer/SLOT/NAME  likewise, for each value that the optimizer keeps per parameter
//! ```
//!
//! # The way of the data
//!
//! The ranks send their shards to rank 0, tensor by tensor, into a [`Snapshot`] (the only copy). A
//! thread without MPI writes it: HDF5 lays the file out in memory, without the values
//! (`skeleton.rs`); layout and values are written from front to back under a temporary name, then
//! the seal over all of it; fsync, rename and fsync of the directory follow ([`write()`]). The
//! snapshot's memory is reused for the next one. Reading back: the seal is checked against every
//! byte before HDF5 opens the file, and each tensor against its own checksum when it is read
//! ([`Checkpoint`]).
//!
//! # Invariants
//!
//! * A file under its final name is whole and durable: the rename comes after the fsync.
//! * All damage is detected: every byte of the file is under the seal, and the seal has one form
//!   only.
//! * One state written twice by one program gives the same bytes: the file contains no time.
//! * Two jobs may write one directory at once (a node that was cut off, and its replacement):
//!   temporary names are unique, final names appear by rename, and files that disappear during a
//!   search are skipped.

mod description;
mod directory;
mod read;
mod seal;
mod skeleton;
mod snapshot;
mod write;
mod writer;

#[cfg(test)]
mod tests;

pub use description::{Description, Difference, Settings};
pub use directory::{Found, file_name, list, newest_acceptable, newest_sound, remove_temporaries, step_of};
pub use read::{Checkpoint, Tensor};
pub use snapshot::{Snapshot, group_name};
pub use write::{Boundary, write};
pub use writer::{Writer, Written, write_and_prune};

/// Returns the version of the HDF5 library, which checkpoints record.
pub fn hdf5_version() -> String {
    let (major, minor, release) = hdf5::library_version();
    format!("{major}.{minor}.{release}")
}
