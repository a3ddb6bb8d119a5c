//! The calls into MPI, on raw memory: the only place that names `mpi::ffi`, but for `world.rs`.
//!
//! MPI's default error handler ends the job, so return codes carry no news and are ignored (MPI-4.1
//! §9.3); lengths and ranks are checked by the callers before they come here.

mod collective;
mod count;
mod element;
mod gpu_support;
mod handle;
mod point_to_point;
mod requests;

pub use gpu_support::{Awareness, Transfers, awareness};
pub(super) use handle::{Channel, Handle, Values};
pub(super) use point_to_point::MatchedMessage;
pub(super) use requests::{Mode, Requests, pause, yield_while_waiting, yields};
