//! The calls into MPI, on raw memory: the only place that names `mpi::ffi`, except `world.rs`.
//!
//! MPI's default error handler ends the job, so return codes carry no information and are ignored
//! (MPI-4.1 §9.3). Callers check lengths and ranks beforehand.

mod collective;
mod count;
mod element;
mod gpu_support;
mod handle;
mod point_to_point;
mod requests;
mod window;

pub use gpu_support::{Awareness, Transfers, awareness};
pub(super) use handle::{Channel, Handle, Values};
pub(super) use point_to_point::MatchedMessage;
pub(super) use requests::{Mode, Requests, pause, yield_while_waiting, yields};
