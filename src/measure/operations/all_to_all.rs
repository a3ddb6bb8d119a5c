//! All-to-all: part s of the buffer of rank r, in part r on rank s.

use crate::measure::buffers::{Geometry, HostBuffers, during};
use crate::measure::operation::{MeasuredOperation, others};
use crate::measure::value;

pub static ALL_TO_ALL: MeasuredOperation = MeasuredOperation {
    name: "all-to-all",
    description: "A part from each to each",
    bus_factor: others,
    has_parts: true,
    sent: Geometry::whole,
    received: Geometry::whole,
    expected: |geometry, at| {
        let part = geometry.part();
        value(at / part, geometry.rank * part + at % part)
    },
    exists: |form| !form.is_in_place,
    planned: |_| None,
    run: |all, _, HostBuffers { send, receive }| all.all_to_all(send, receive),
    start: |all, _, _, HostBuffers { send, receive }, meanwhile| {
        let (send, receive) = during(all.start_all_to_all(send, receive)?, meanwhile)?;
        Ok(HostBuffers { send, receive })
    },
    on_device: None,
};
