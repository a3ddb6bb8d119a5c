//! Reduce-scatter: part r of the sum of the buffers of all ranks, on rank r.

use crate::comm::{Collective, Operation};
use crate::measure::buffers::{DevicePending, Geometry, HostBuffers, during};
use crate::measure::operation::{MeasuredOperation, OnDevice, others};

pub static REDUCE_SCATTER: MeasuredOperation = MeasuredOperation {
    name: "reduce-scatter",
    description: "A part of the sum on each",
    bus_factor: others,
    has_parts: true,
    sent: Geometry::whole,
    received: Geometry::own,
    expected: Geometry::sum,
    exists: |form| form.is_blocking != form.is_in_place,
    planned: |_| Some(Collective::ReduceScatter),
    run: |all, geometry, HostBuffers { send, receive }| {
        all.reduce_scatter(send, &mut receive[geometry.own()], Operation::Sum)
    },
    start: |all, _, _, HostBuffers { send, receive }, meanwhile| {
        let send = during(all.start_reduce_scatter(send, Operation::Sum)?, meanwhile)?;
        Ok(HostBuffers { send, receive })
    },
    on_device: Some(OnDevice {
        is_in_place: true,
        compares_with_mpi: |_| false,
        is_tried: |_| false,
        start: |all, _, buffers| {
            let values = all.start_reduce_scatter(buffers.values, Operation::Sum)?;
            Ok(DevicePending { values, received: None })
        },
    }),
};
