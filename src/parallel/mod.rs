//! The strategies: where networks meet ranks. [`shard()`], [`bucket`] and [`schedule`] are pure logic; [`data`] is
//! data parallelism.

pub mod bucket;
pub mod data;
pub mod replica;
pub mod schedule;
mod shard;

pub use shard::shard;
