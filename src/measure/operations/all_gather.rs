//! All-gather: the parts of all ranks, on every rank.

use crate::comm::{Collective, Transfers};
use crate::measure::buffers::{DevicePending, Geometry, HostBuffers, during};
use crate::measure::operation::{MeasuredOperation, OnDevice, others};
use crate::measure::value;

pub static ALL_GATHER: MeasuredOperation = MeasuredOperation {
    name: "all-gather",
    description: "A part from each to all",
    bus_factor: others,
    has_parts: true,
    sent: Geometry::own,
    received: Geometry::whole,
    expected: |geometry, at| value(at / geometry.part(), at),
    exists: |form| !form.is_blocking || !form.is_in_place,
    planned: |form| form.is_in_place.then_some(Collective::AllGather),
    run: |all, geometry, HostBuffers { send, receive }| all.all_gather(&send[geometry.own()], receive),
    start: |all, geometry, form, buffers, meanwhile| {
        if form.is_in_place {
            let send = during(all.start_all_gather_in_place(buffers.send)?, meanwhile)?;
            return Ok(HostBuffers { send, ..buffers });
        }
        let (send, receive) = buffers.ranges(geometry.own(), geometry.whole());
        during(all.start_all_gather(send, receive)?, meanwhile).map(HostBuffers::of_ranges)
    },
    on_device: Some(OnDevice {
        is_in_place: true,
        compares_with_mpi: |transfers| transfers == Transfers::Staged,
        is_tried: |_| true,
        start: |all, _, buffers| {
            let values = all.start_all_gather_in_place(buffers.values)?;
            Ok(DevicePending { values, received: None })
        },
    }),
};
