//! Sums whose bits are the same in every layout: for any number of ranks, threads and
//! micro-batches.
//!
//! [`Leaves`] is the canonical order of a sum of products, [`Section`] the consecutive terms of one
//! that a rank adds at a time, [`Subtrees`] the sums that ranks have before they are added up over
//! the ranks, [`ExactSum`] a sum that is rounded once and has no order.

mod exact;
mod leaves;
mod shard;
mod subtrees;

pub use exact::ExactSum;
pub use leaves::{Leaves, MOST_LEAVES, MOST_PENDING, NUM_LEAVES, Section, Step};
pub use shard::shard;
pub use subtrees::Subtrees;
