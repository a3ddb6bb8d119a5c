//! Reduce: the sum of the buffers of all ranks, on rank 0.

use crate::comm::Operation;
use crate::measure::buffers::{Geometry, HostBuffers, during};
use crate::measure::operation::MeasuredOperation;

pub static REDUCE: MeasuredOperation = MeasuredOperation {
    name: "reduce",
    description: "The sum, on rank 0",
    bus_factor: |_| 1.0,
    has_parts: false,
    sent: Geometry::whole,
    received: Geometry::whole_on_root,
    expected: Geometry::sum,
    exists: |form| !form.is_in_place,
    planned: |_| None,
    run: |all, _, HostBuffers { send, receive }| all.reduce(send, receive, Operation::Sum, 0),
    start: |all, _, _, HostBuffers { send, receive }, meanwhile| {
        let (send, receive) = during(all.start_reduce(send, receive, Operation::Sum, 0)?, meanwhile)?;
        Ok(HostBuffers { send, receive })
    },
    on_device: None,
};
