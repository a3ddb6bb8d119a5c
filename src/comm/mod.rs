//! Ranks and messages: the only place that names MPI.
//!
//! | operation | MPI | who calls it |
//! |---|---|---|
//! | [`send`](Communicator::send), [`receive`](Communicator::receive), [`send_receive`](Communicator::send_receive) | `MPI_Send`; `MPI_Mprobe` and `MPI_Mrecv`; `MPI_Isend` and `MPI_Irecv` | the two ranks |
//! | [`barrier`](Communicator::barrier), [`broadcast`](Communicator::broadcast), [`scatter`](Communicator::scatter), [`gather`](Communicator::gather), [`all_gather`](Communicator::all_gather), [`all_to_all`](Communicator::all_to_all) | `MPI_Barrier`; `MPI_Ibcast`, …, and `MPI_Waitall` | all ranks |
//! | [`reduce`](Communicator::reduce), [`all_reduce`](Communicator::all_reduce) | `MPI_Ireduce` and `MPI_Waitall`; `MPI_Allreduce` in chunks | all ranks |
//! | [`reduce_scatter`](Communicator::reduce_scatter) | pairwise `MPI_Isend`/`MPI_Irecv`, sums in rank order | all ranks |
//! | [`agree`](Communicator::agree) | `MPI_Allreduce`, and more only after an error | all ranks |
//! | `start_…` | the `MPI_I…` of the same name, or pairwise exchange for what is in place or scattered, as a [`Pending`] that owns its buffers | as above |
//!
//! A [`DeviceCommunicator`] does the same with buffers of a device, as a [`Transfer`].
//!
//! Nothing here knows what a layer is.

mod agree;
mod blocking;
mod communicator;
mod device;
mod element;
mod grid;
mod links;
mod pairwise;
mod pending;
mod raw;
mod world;

pub use communicator::Communicator;
pub use device::{DeviceCommunicator, Transfer};
pub use element::{Element, Operation};
pub use grid::{Grid, GridShape};
use pending::Front;
pub use pending::Pending;
pub use world::{World, rank_for_messages};
