//! Checkpoints: the state from which a run continues. One file per checkpoint, whole tensors by
//! name, independent of the layout that wrote it.
//!
//! # Format
//!
//! `step-00000500.h5` is an HDF5 file. Its first 512 bytes, HDF5's user block, are a text with the
//! length and the checksum of the file. It holds:
//!
//! * `/model/NAME`: a parameter, `f32`, whole, with PyTorch's name and shape, such as
//!   `fc1.weight [outputs, inputs]` and `conv1.weight [outputs, inputs, height, width]`. The layers
//!   of `deep-mlp` are `w.0`, `w.1`, … `[inputs, outputs]`.
//! * `/optimizer/SLOT/NAME`: a value that the optimizer keeps for the parameter, under PyTorch's name,
//!   such as `momentum_buffer` (SGD) or `exp_avg` and `exp_avg_sq` (Adam).
//! * `/standardise`: three numbers for each channel or feature of the inputs, which were standardised
//!   as `((x − mean) − rest) · factor`; without rows if they were not.
//! * `/network`: the network as text (UTF-8 as bytes), of at most 256 KiB, for `predict` and `generate`.
//! * The attribute `xxh3_128` of each tensor: XXH3 (128 bits) of its values as little-endian bytes.
//! * Attributes of `/`:
//!   * `step`, `epoch`, `step_in_epoch`: steps and whole epochs done, steps done of the next epoch;
//!   * `loss`: the mean loss of the last step;
//!   * `seed`: the run's seed;
//!   * `model`: the network's name;
//!   * `parameters_digest`: the hash of all parameters in the order of the layers, as in the result
//!     line of a run;
//!   * `config`, `options`, `written_by`: JSON with the settings that a resumed run must share,
//!     those that may change, and the program that wrote the file.
//!
//! ```python
//! import h5py
//! with h5py.File("run7/step-00000500.h5") as file:
//!     print(file.attrs["step"], file.attrs["model"])
//!     weights = {name: tensor[:] for name, tensor in file["model"].items()}
//! # in PyTorch:
//! # model.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})
//! ```
//!
//! # In the training programs
//!
//! ```text
//! mpiexec -n 4 sync_sgd --checkpoint-dir run7 --checkpoint-every 500
//! ```
//!
//! If the command is repeated, it resumes where it stopped, within an epoch or at its end, and ends
//! with the bits of a run that was never interrupted. So it does on other ranks, or with another
//! strategy (`pipeline`, `tensor_mlp`), on the CPU; on a GPU, up to rounding.
//! With more `--epochs` it continues
//! training; a cosine or linear schedule then follows the new length from there. Another model,
//! seed, batch size, optimizer or other data are refused, and the difference is named.
//!
//! * `--checkpoint-every 500` or `10m` sets the interval; the newest `--keep 3` files stay. Every
//!   rank copies its part of the state, and a thread of rank 0 writes the file while training
//!   continues (`benches/README.md` has the cost). SIGKILL or a lost node cost the steps since the
//!   last complete checkpoint.
//! * SIGTERM, SIGUSR1 or SIGINT at any rank, `--time-limit 55m`, or `--stop-before 2m` (before
//!   Slurm ends the job) stop all ranks after the same step, with a checkpoint and exit code 75. A
//!   second signal stops at once. To stop a job by hand, send SIGUSR1 to `mpiexec` or to the ranks:
//!   after Ctrl-C, Open MPI's `mpiexec` leaves the ranks one second before it kills them.
//! * A checkpoint gets its name only when it is complete on the disk, and every byte is under a
//!   checksum. A damaged one is named, and the one before it used. A full disk costs the
//!   checkpoint, not the training.
//! * `--export FILE` writes the weights alone. `--init FILE` starts with them, or with those of any
//!   HDF5 file that has them under `/model`. `--resume FILE` resumes from an older checkpoint, into
//!   a new directory.
//!
//! # The path of the data
//!
//! Every rank copies the parts of the state that it provides, and training continues. On rank 0 a
//! thread without MPI writes the file ([`write()`]): HDF5 lays it out in memory, without the values
//! (`skeleton.rs`); the thread reads the values from a [`StateSource`], tensor by tensor, and writes
//! them under a temporary name; the checksums are known then, and the rest of the layout follows;
//! the file is read back for the seal over all of it; then come fsync, rename and fsync of the
//! directory. The ranks send the parts that are asked for while they train, and rank 0 has memory for a
//! few batches of tensors. Reading: the seal is checked against every byte before HDF5 opens the
//! file, and each tensor against its own checksum when it is read ([`Checkpoint`]).
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

mod contents;
mod description;
mod directory;
mod file_layout;
mod read;
mod seal;
mod skeleton;
mod write;
mod writer;

#[cfg(test)]
mod tests;

pub use contents::{Contents, StateSource, group_name};
pub use description::{
    Description, Difference, INPUTS_SETTING, STANDARDISE_SETTING, Settings, TOKENS_SETTING,
};
pub use directory::{
    Found, create_durably, file_name, list, newest_acceptable, newest_sound, remove_temporaries, step_of,
};
pub use file_layout::{FileLayout, LayoutBuilder, add_text};
pub use read::{Checkpoint, Tensor};
pub use write::{Boundary, create_beside, directory_of, publish, write};
pub use writer::{Writer, Written, write_and_prune};

/// Returns the version of the HDF5 library, which checkpoints record.
pub fn hdf5_version() -> String {
    let (major, minor, release) = hdf5::library_version();
    format!("{major}.{minor}.{release}")
}
