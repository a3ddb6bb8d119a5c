//! What a run needs to go on: a file for each checkpoint, whole tensors by name, whatever layout wrote them.
//!
//! ```text
//! step-00000050.h5        HDF5 behind a user block of 512 bytes (the seal)
//!   /                     attributes: step, epoch, step_in_epoch, loss, seed, model, config, options, written_by, …
//!   /model/NAME           f32, PyTorch's name and shape; attribute xxh3_128: checksum of the values, little-endian
//!   /optimizer/SLOT/NAME  the same for each value that the optimizer keeps for a parameter
//! ```
//!
//! # The way of the data
//!
//! All ranks bring the tensors together on rank 0, one after the other, in a [`Snapshot`] (the only copy). A thread without
//! MPI writes it: HDF5 lays the file out in memory, without the values (`skeleton.rs`); that and the values are
//! written from front to back under a temporary name, then the seal over all of it, then come fsync, rename and fsync of
//! the directory ([`write()`]). The snapshot's memory serves again for the next. Back: the seal is checked against every
//! byte before HDF5 looks at the file, each tensor against its own checksum when it is read ([`Checkpoint`]).
//!
//! # Invariants
//!
//! * A file under its final name is whole and durable, or was never there: the rename comes after the fsync.
//! * No damage passes: every byte of the file is under the seal, and the seal has one form only.
//! * The same state written by the same program gives the same bytes: nothing in the file is a time.
//! * Two jobs may write one directory at once (a node that was cut off, and its replacement): temporary names are unique,
//!   final names appear by rename, and what disappears while it is looked at is passed over.

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

/// The version of the HDF5 library, for files to say.
pub fn hdf5_version() -> String {
    let (major, minor, release) = hdf5::library_version();
    format!("{major}.{minor}.{release}")
}
