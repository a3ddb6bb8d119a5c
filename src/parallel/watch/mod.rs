//! The arrays of a step that an [audit](crate::parallel::audit) looks at: their sites, their
//! checksums, and the bits that are flipped in them to try it out.

mod bits;
mod block;
mod fault;
mod record;
mod site;

pub use bits::{BitFold, num_bits};
pub use block::BlockWatch;
pub use fault::{Fault, FaultKind, flip, flip_row};
pub use record::{FoldRecord, Recorder, fold_rows, parts_of_leaf};
pub use site::Site;
