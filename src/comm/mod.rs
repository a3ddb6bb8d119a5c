//! Ranks and messages: the only place that names MPI.
//!
//! | operation | MPI | who calls it |
//! |---|---|---|
//! | [`send`](Communicator::send), [`receive`](Communicator::receive), [`send_receive`](Communicator::send_receive) | `MPI_Send`; `MPI_Mprobe` and `MPI_Mrecv`; `MPI_Sendrecv` | the two ranks |
//! | [`barrier`](Communicator::barrier), [`broadcast`](Communicator::broadcast), [`scatter`](Communicator::scatter), [`gather`](Communicator::gather), [`all_gather`](Communicator::all_gather), [`all_to_all`](Communicator::all_to_all) | `MPI_Barrier`, `MPI_Bcast`, … | all ranks |
//! | [`reduce`](Communicator::reduce), [`all_reduce`](Communicator::all_reduce) | `MPI_Reduce`; `MPI_Allreduce`, or a plan of ours where it is long | all ranks |
//! | [`reduce_scatter`](Communicator::reduce_scatter) | a plan, sums in rank order | all ranks |
//! | [`agree`](Communicator::agree) | `MPI_Allreduce`, and more only after an error | all ranks |
//! | `start_…` | the `MPI_I…` of the same name, or a plan for what is in place, as a [`Pending`] that owns its buffers | as above |
//!
//! A plan is an [`Algorithm`] of messages between two ranks, and sums formed here; `choice.rs` says which is used when.
//! It has several rounds, and moves on wherever its rank waits for something that was started, or tests it
//! (`engine.rs`). So ranks wait in any order, but for one thing: inside a collective operation that blocks nothing moves on but MPI's own.
//! A [`DeviceCommunicator`] does the same with buffers of a device, as a [`Transfer`].
//!
//! Nothing here knows what a layer is.

mod agree;
mod algorithm;
mod aware;
mod bf16;
mod blocking;
mod capabilities;
mod choice;
mod communicator;
mod device;
mod element;
mod engine;
mod extent;
mod grid;
mod host;
mod in_place;
mod links;
mod ongoing;
mod pending;
mod progress;
mod raw;
mod shard;
mod waiting;
mod world;

pub use algorithm::{Algorithm, Collective};
pub use aware::{Awareness, Transfers, awareness};
pub use capabilities::Capabilities;
pub use choice::Choice;
pub use communicator::{Communicator, LARGEST_TAG};
pub use device::{DeviceCommunicator, Transfer};
pub use element::{Element, Operation};
pub use grid::{Grid, GridShape};
use pending::Front;
pub use pending::Pending;
pub use shard::shard;
pub use world::{World, abort, library_version, rank_for_messages};
