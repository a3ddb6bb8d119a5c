//! The strategies: where networks meet ranks. [`shard()`], [`bucket`], [`balance`] and [`schedule`] are pure logic; [`data`] is
//! data parallelism, [`tensor`] tensor parallelism, [`pipeline`] pipeline parallelism. A [`layout::Layout`] says what of a
//! model a rank holds, as [stages](stage::Stage); a pipeline runs them in the order of a schedule, and one stage with one
//! micro-batch is the trivial one.

pub mod balance;
pub mod bucket;
pub mod data;
pub mod gather;
pub mod layout;
pub mod pipeline;
pub mod replica;
pub mod schedule;
pub mod stage;
pub mod tensor;

pub use crate::comm::shard;

use crate::device::Device;
use crate::trace;

/// Waits for the device if what it does is being recorded: only then the time of an operation is that of its start and its end.
fn settle<D: Device>(device: &D) {
    if trace::is_on() {
        device.wait();
    }
}
