//! Sums that have the same bits for any number of ranks and threads, and for any division of their
//! terms.

mod exact;

pub use exact::ExactSum;
