//! Ranks and messages: the only place that names MPI.
//!
//! | operations of a [`Communicator`] | MPI | called by |
//! |---|---|---|
//! | messages (`send`, `receive`, …) | `MPI_Send`; `MPI_Mprobe` and `MPI_Imrecv`; … | the two ranks |
//! | collective operations (`broadcast`, …) | the call of the same name, or a plan | all ranks |
//! | reductions (`all_reduce`, …) | the call of the same name, or a plan | all ranks |
//! | `agree`, `compare` | `MPI_Allreduce`, and more only after an error | all ranks |
//! | `start_…` | the `MPI_I…` of that name, or a plan in place; returns a [`Pending`] | as above |
//!
//! The modules, from the bottom up: `mpi/` has the calls into MPI on raw memory; `algorithm/` has
//! plans, which are messages between two ranks and sums formed here, and the choice among them;
//! `group.rs` holds what all operations of one communicator share; `engine/` advances plans, and
//! device buffers that are being copied for MPI, in every wait and test; `communicator/` has the
//! operations, on host and device buffers alike ([`Buffer`](crate::memory::Buffer)); `world.rs`
//! starts MPI, `shared_memory.rs` has the memory that a node's ranks share, `grid.rs` arranges the
//! ranks, and `agree.rs` compares their settings and errors.
//!
//! Ranks may wait in any order, with one exception: a blocking MPI collective does not drive the
//! engine. A caller's own messages, of which later ones depend on earlier ones, go on in every wait
//! and test as a task in the [`Background`].
//!
//! This module is independent of networks and layers.

mod agree;
mod algorithm;
mod capabilities;
mod communicator;
mod engine;
mod grid;
mod group;
mod links;
mod mpi;
mod nodes;
mod shared_memory;
mod world;

pub use crate::memory::{Element, Front, Operation};
pub use crate::sums::shard;
pub use algorithm::{Algorithm, Call, Choice, Collective};
pub use capabilities::Capabilities;
pub use communicator::{Communicator, Pending};
pub use engine::{Background, advance, advance_for, attach};
pub use grid::{Channels, Grid, GridShape};
pub use group::LARGEST_TAG;
pub use mpi::{Awareness, Transfers, awareness};
pub use shared_memory::{SharedMemory, shared_room};
pub use world::{World, abort, library_version, rank_for_messages, ranks_on_nodes};
