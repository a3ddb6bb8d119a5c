//! Scatter: part r of the buffer of rank 0, on rank r.

use crate::measure::buffers::{Geometry, HostBuffers, during};
use crate::measure::operation::{MeasuredOperation, others};
use crate::measure::value;

pub static SCATTER: MeasuredOperation = MeasuredOperation {
    name: "scatter",
    description: "A part from rank 0 to each",
    bus_factor: others,
    has_parts: true,
    sent: Geometry::whole_on_root,
    received: Geometry::own,
    expected: |_, at| value(0, at),
    exists: |form| !form.is_in_place,
    planned: |_| None,
    run: |all, geometry, HostBuffers { send, receive }| all.scatter(send, &mut receive[geometry.own()], 0),
    start: |all, geometry, _, buffers, meanwhile| {
        let (send, receive) = buffers.ranges(geometry.whole(), geometry.own());
        during(all.start_scatter(send, receive, 0)?, meanwhile).map(HostBuffers::of_ranges)
    },
    on_device: None,
};
