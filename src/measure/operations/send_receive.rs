//! Ring exchange: every rank sends to the next one and receives from the previous one.

use crate::measure::buffers::{DevicePending, Geometry, HostBuffers};
use crate::measure::operation::{MeasuredOperation, OnDevice};
use crate::measure::value;

pub static SEND_RECEIVE: MeasuredOperation = MeasuredOperation {
    name: "send-receive",
    description: "Every rank sends to the next and receives from the one before",
    bus_factor: |_| 1.0,
    has_parts: false,
    sent: Geometry::whole,
    received: Geometry::whole,
    expected: |geometry, at| value(geometry.previous(), at),
    exists: |form| !form.is_in_place,
    planned: |_| None,
    run: |all, geometry, HostBuffers { send, receive }| {
        all.send_receive(send, geometry.next(), receive, geometry.previous(), 0)
    },
    start: |all, geometry, _, HostBuffers { send, receive }, meanwhile| {
        let mut receiving = all.start_receive(receive, geometry.previous(), 0)?;
        let mut sending = all.start_send(send, geometry.next(), 0)?;
        meanwhile(&mut || {
            receiving.test();
            sending.test();
            Ok(())
        })?;
        let receive = receiving.wait();
        Ok(HostBuffers { send: sending.wait(), receive })
    },
    on_device: Some(OnDevice {
        is_in_place: false,
        compares_with_mpi: |_| false,
        is_tried: |is_blocking| !is_blocking,
        start: |all, geometry, buffers| {
            let receive = |into| all.start_receive(into, geometry.previous(), 0);
            let received = buffers.received.map(receive).transpose()?;
            let values = all.start_send(buffers.values, geometry.next(), 0)?;
            Ok(DevicePending { values, received })
        },
    }),
};
