//! Scan: the sum of the buffers of ranks 0 to r, on rank r.

use crate::comm::Operation;
use crate::measure::buffers::{Geometry, HostBuffers, during};
use crate::measure::operation::MeasuredOperation;
use crate::measure::sum_of_values;

pub static SCAN: MeasuredOperation = MeasuredOperation {
    name: "scan",
    description: "The sum over ranks 0 to r, on rank r",
    bus_factor: |_| 1.0,
    has_parts: false,
    sent: Geometry::whole,
    received: Geometry::whole,
    expected: |geometry, at| sum_of_values(geometry.rank + 1, at),
    exists: |form| form.is_blocking == form.is_in_place,
    planned: |_| None,
    run: |all, _, buffers| {
        all.scan(&mut buffers.send, Operation::Sum);
        Ok(())
    },
    start: |all, _, _, HostBuffers { send, receive }, meanwhile| {
        let (send, receive) = during(all.start_scan(send, receive, Operation::Sum)?, meanwhile)?;
        Ok(HostBuffers { send, receive })
    },
    on_device: None,
};
