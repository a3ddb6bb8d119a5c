//! All-reduce: the sum of the buffers of all ranks, on every rank.

use crate::comm::{Collective, Operation};
use crate::measure::buffers::{DevicePending, Geometry, HostBuffers, during};
use crate::measure::operation::{MeasuredOperation, OnDevice, others};

pub static ALL_REDUCE: MeasuredOperation = MeasuredOperation {
    name: "all-reduce",
    description: "The sum, on all",
    bus_factor: |size| 2.0 * others(size),
    has_parts: false,
    sent: Geometry::whole,
    received: Geometry::whole,
    expected: Geometry::sum,
    exists: |form| !form.is_blocking || form.is_in_place,
    planned: |form| form.is_in_place.then_some(Collective::AllReduce),
    run: |all, _, buffers| all.all_reduce(&mut buffers.send, Operation::Sum),
    start: |all, _, form, HostBuffers { send, receive }, meanwhile| {
        if form.is_in_place {
            let send = during(all.start_all_reduce_in_place(send, Operation::Sum)?, meanwhile)?;
            return Ok(HostBuffers { send, receive });
        }
        let (send, receive) = during(all.start_all_reduce(send, receive, Operation::Sum)?, meanwhile)?;
        Ok(HostBuffers { send, receive })
    },
    on_device: Some(OnDevice {
        is_in_place: true,
        compares_with_mpi: |_| true,
        is_tried: |_| true,
        start: |all, _, buffers| {
            let values = all.start_all_reduce_in_place(buffers.values, Operation::Sum)?;
            Ok(DevicePending { values, received: None })
        },
    }),
};
