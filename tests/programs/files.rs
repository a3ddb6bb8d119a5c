//! The files that programs read and write: data and checkpoints, valid, extreme and damaged.
//! Nothing here depends on which MPI is used.

mod checkpoints;
mod data_files;
mod data_store;
mod faults;
mod limits;
mod memory;
mod restart;
#[path = "../support/mod.rs"]
mod support;
