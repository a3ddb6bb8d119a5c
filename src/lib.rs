//! MPI-native training of neural networks: one short SPMD program per parallel strategy, over one shared core.
//!
//! # The map
//!
//! | module | what is in it | may use |
//! |---|---|---|
//! | [`comm`] | ranks and messages: [`World`](comm::World), [`Communicator`](comm::Communicator), [`Grid`](comm::Grid), [`Pending`](comm::Pending); the only place that names MPI | `device` (in one place), `memory`, `trace` |
//! | [`device`] | arithmetic: the trait [`Device`](device::Device), the processor and NVIDIA GPUs; the only place that names `gemm` and CUDA | `memory` |
//! | [`memory`] | large arrays on huge pages | |
//! | [`trace`] | what a rank did when, for traces | |
//! | [`nn`] | networks, layers, losses, initial values, flat parameters | `device` |
//! | [`optim`] | optimizers, learning-rate schedules, clipping | `device` |
//! | [`dataset`] | where samples come from and in which order | `memory`, `nn` |
//! | [`checkpoint`] | files from which a run goes on | `memory`, `nn` |
//! | [`parallel`] | the strategies, where networks meet ranks | `comm`, `device`, `nn`, `trace`, `optim` |
//! | [`app`] | what every program shares: start, log, progress, traces, exit code | `comm`, `device`, `trace` |
//! | [`measure`] | what communication costs: operations, times, bandwidths, overlap | `comm`, `device`, `memory` |
//! | [`probe`] | what this MPI can do, by trying | `comm`, `device`, `measure` |
//! | [`train`] | the loop that every training program runs, its options and results | all of these but `measure` and `probe` |
//!
//! The programs in `apps/` are a page each: arguments, grid, model, run. `tests/layering.rs` holds the last column.
//!
//! # Invariants
//!
//! * Nothing that decides a number, be it a sample's place in the order, an initial weight or a random draw, depends on a rank
//!   or on the number of ranks. Only the order of sums does, so N ranks agree with one to the rounding, and a command
//!   repeated gives the same bits.
//! * Nothing starts before all ranks have compared their program, its version, their options and their data; the few options that may differ
//!   stand in `app/command_line.rs`.
//! * The path of an error that one rank has alone runs no collective: it ends the job at once. An error that all ranks share has
//!   been agreed on.
//! * A training step with one thread a rank allocates nothing of ours once it is under way; on a GPU neither, but for a small record of
//!   each message.
//! * MPI is given a buffer of a device only as a message, when the device is done with it; anything else does not compile.
//!
//! # Deliberately absent
//!
//! `nn` has no rank, `comm` has no layer, no strategy has a loop of its own, there is no mock of MPI (a program started without
//! a launcher is a job of one rank), and there are no cargo features.
#![warn(clippy::unwrap_used)]

mod error;

pub mod app;
pub mod checkpoint;
pub mod comm;
pub mod dataset;
pub mod device;
pub mod measure;
pub mod memory;
pub mod nn;
pub mod optim;
pub mod parallel;
pub mod probe;
pub mod trace;
pub mod train;

pub use error::{Error, Result};
