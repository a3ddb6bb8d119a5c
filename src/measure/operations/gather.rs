//! Gather: the parts of all ranks, on rank 0.

use crate::measure::buffers::{Geometry, HostBuffers, during};
use crate::measure::operation::{MeasuredOperation, others};
use crate::measure::value;

pub static GATHER: MeasuredOperation = MeasuredOperation {
    name: "gather",
    description: "A part from each to rank 0",
    bus_factor: others,
    has_parts: true,
    sent: Geometry::own,
    received: Geometry::whole_on_root,
    expected: |geometry, at| value(at / geometry.part(), at),
    exists: |form| !form.is_in_place,
    planned: |_| None,
    run: |all, geometry, HostBuffers { send, receive }| all.gather(&send[geometry.own()], receive, 0),
    start: |all, geometry, _, buffers, meanwhile| {
        let (send, receive) = buffers.ranges(geometry.own(), geometry.whole());
        during(all.start_gather(send, receive, 0)?, meanwhile).map(HostBuffers::of_ranges)
    },
    on_device: None,
};
