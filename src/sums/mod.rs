//! Sums whose bits depend on no order: not on ranks, threads or parts of a state.

mod exact;

pub use exact::ExactSum;
