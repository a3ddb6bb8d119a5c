//! The strategies, which spread networks over ranks.
//!
//! [`bucket`], [`balance`], [`batch`] and [`schedule`] are pure logic; [`data`] is data
//! parallelism, [`zero`] the division of its state, [`tensor`] tensor parallelism, [`pipeline`]
//! pipeline parallelism. A [`ParallelPlan`](layout::ParallelPlan) spreads a model over a grid, and a
//! [`Layout`](layout::Layout) lists the [stages](stage::Stage) and tensors that a rank holds.
//! A pipeline runs the stages in the order of a schedule; one stage with one micro-batch is the trivial
//! case. [`replica`] checks that replicas are equal, and an [`audit`] that ranks compute the same bits.

pub mod audit;
pub mod balance;
pub mod batch;
pub mod bucket;
pub mod data;
pub mod layout;
pub mod pipeline;
pub mod replica;
pub mod schedule;
pub mod stage;
pub mod tensor;
pub mod watch;
pub mod zero;

use crate::device::Device;
use crate::trace;

/// Waits for the device while a trace is recorded, so that a span ends when its operations do.
fn settle<D: Device>(device: &D) {
    if trace::is_on() {
        device.wait();
    }
}
