//! Broadcast: the buffer of rank 0, on every rank.

use crate::comm::{Collective, Transfers};
use crate::measure::buffers::{DevicePending, Geometry, HostBuffers, during};
use crate::measure::operation::{MeasuredOperation, OnDevice};
use crate::measure::value;

pub static BROADCAST: MeasuredOperation = MeasuredOperation {
    name: "broadcast",
    description: "From rank 0 to all",
    bus_factor: |_| 1.0,
    has_parts: false,
    sent: Geometry::whole_on_root,
    received: Geometry::whole,
    expected: |_, at| value(0, at),
    exists: |form| form.is_in_place,
    planned: |_| Some(Collective::Broadcast { root: 0 }),
    run: |all, _, buffers| all.broadcast(&mut buffers.send, 0),
    start: |all, _, _, HostBuffers { send, receive }, meanwhile| {
        let send = during(all.start_broadcast(send, 0)?, meanwhile)?;
        Ok(HostBuffers { send, receive })
    },
    on_device: Some(OnDevice {
        is_in_place: true,
        compares_with_mpi: |transfers| transfers == Transfers::Staged,
        is_tried: |_| true,
        start: |all, _, buffers| {
            let values = all.start_broadcast(buffers.values, 0)?;
            Ok(DevicePending { values, received: None })
        },
    }),
};
