//! Ranks and messages: the only place that names MPI.
//!
//! | operation | MPI | called by |
//! |---|---|---|
//! | [`send`](Communicator::send), [`receive`](Communicator::receive), [`send_receive`](Communicator::send_receive) | `MPI_Send`; `MPI_Mprobe` and `MPI_Mrecv`; `MPI_Sendrecv` | the two ranks |
//! | [`barrier`](Communicator::barrier), [`broadcast`](Communicator::broadcast), [`scatter`](Communicator::scatter), [`gather`](Communicator::gather), [`all_gather`](Communicator::all_gather), [`all_to_all`](Communicator::all_to_all) | `MPI_Barrier`, `MPI_Bcast`, … | all ranks |
//! | [`reduce`](Communicator::reduce), [`all_reduce`](Communicator::all_reduce) | `MPI_Reduce`; `MPI_Allreduce`, or a plan where it is long | all ranks |
//! | [`reduce_scatter`](Communicator::reduce_scatter) | a plan, sums in rank order | all ranks |
//! | [`agree`](Communicator::agree) | `MPI_Allreduce`, and more only after an error | all ranks |
//! | `start_…` | the `MPI_I…` of the same name, or a plan in place, as a [`Pending`] that owns its buffers | as above |
//!
//! The rooms, from the bottom up: `mpi/` has the calls into MPI on raw memory; `algorithm/` has plans, which are
//! messages between two ranks and sums formed here, and the choice among them; `group.rs` holds what all
//! operations of one communicator share; `engine/` advances plans, and device buffers that are on their way to
//! where MPI can read them, in every wait and test; `communicator/` has the operations, on host and device
//! buffers alike ([`Buffer`](crate::memory::Buffer)); `world.rs`, `grid.rs` and `agree.rs` say who is there.
//!
//! Ranks may wait in any order, with one exception: a blocking MPI collective does not drive the engine.
//!
//! Nothing here knows what a layer is.

mod agree;
mod algorithm;
mod communicator;
mod engine;
mod grid;
mod group;
mod links;
mod mpi;
mod nodes;
mod shard;
mod world;

pub use crate::memory::{Element, Front, Operation};
pub use algorithm::{Algorithm, Call, Choice, Collective};
pub use communicator::{Communicator, Pending};
pub use grid::{Grid, GridShape};
pub use group::LARGEST_TAG;
pub use mpi::{Awareness, Transfers, awareness};
pub use shard::shard;
pub use world::{World, abort, library_version, rank_for_messages};
