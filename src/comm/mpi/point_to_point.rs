//! Messages between two ranks (MPI-4.1 §3), and matched probes for messages of unknown length.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::mem::MaybeUninit;

use ::mpi::ffi;

use super::count::num_elements;
use super::{Channel, Handle, Requests, Values};
use crate::memory::ElementType;

/// A message that has arrived and been matched, but not been received.
pub(in crate::comm) struct MatchedMessage {
    handle: ffi::MPI_Message,
    /// The number of elements; `None` if the message does not hold a whole number of them.
    pub(in crate::comm) len: Option<usize>,
    /// The number of bytes.
    pub(in crate::comm) bytes: usize,
}

impl Handle {
    /// Sends `values` to rank `to` (`MPI_Send`).
    ///
    /// # Safety
    /// The values are valid, and nobody writes them, until the call returns.
    pub(in crate::comm) unsafe fn blocking_send(&self, values: Values, to: usize, tag: i32) {
        let (extent, comm, to) = (self.extent(values), self.communicator(Channel::Public), to as c_int);
        // SAFETY: the caller keeps the values valid; the extent counts exactly these.
        unsafe { ffi::MPI_Send(values.pointer, extent.count, extent.datatype, to, tag, comm) };
    }

    /// Starts sending `values` to rank `to` (`MPI_Isend`).
    ///
    /// # Safety
    /// The values are valid, and nobody writes them, until the request is complete.
    pub(in crate::comm) unsafe fn send(
        &self,
        requests: &mut Requests,
        channel: Channel,
        values: Values,
        to: usize,
        tag: i32,
    ) {
        let (extent, comm, to) = (self.extent(values), self.communicator(channel), to as c_int);
        let (pointer, n, t) = (values.pointer, extent.count, extent.datatype);
        let mut request = MaybeUninit::uninit();
        // SAFETY: the caller keeps the values valid, the extent counts exactly these, and MPI
        // writes the request.
        unsafe {
            ffi::MPI_Isend(pointer, n, t, to, tag, comm, request.as_mut_ptr());
            requests.push(request.assume_init());
        }
    }

    /// Starts receiving at most `values` from rank `from` (`MPI_Irecv`).
    ///
    /// # Safety
    /// The values are valid, and nobody else touches them, until the request is complete.
    pub(in crate::comm) unsafe fn receive(
        &self,
        requests: &mut Requests,
        channel: Channel,
        values: Values,
        from: usize,
        tag: i32,
    ) {
        let (extent, comm, from) = (self.extent(values), self.communicator(channel), from as c_int);
        let (pointer, n, t) = (values.pointer, extent.count, extent.datatype);
        let mut request = MaybeUninit::uninit();
        // SAFETY: the caller keeps the values valid, the extent counts exactly these, and MPI
        // writes the request.
        unsafe {
            ffi::MPI_Irecv(pointer, n, t, from, tag, comm, request.as_mut_ptr());
            requests.push(request.assume_init());
        }
    }

    /// Sends to one rank and receives from another at the same time (`MPI_Sendrecv`).
    ///
    /// # Safety
    /// The values sent and received are valid until the call returns, and do not overlap.
    pub(in crate::comm) unsafe fn send_receive(
        &self,
        send: Values,
        to: usize,
        receive: Values,
        from: usize,
        tag: i32,
    ) {
        let (out, back) = (self.extent(send), self.extent(receive));
        let comm = self.communicator(Channel::Public);
        let (n, t, m, u) = (out.count, out.datatype, back.count, back.datatype);
        let (to, from) = (to as c_int, from as c_int);
        // SAFETY: the caller keeps both valid; the extents count exactly these.
        unsafe {
            ffi::MPI_Sendrecv(
                send.pointer,
                n,
                t,
                to,
                tag,
                receive.pointer,
                m,
                u,
                from,
                tag,
                comm,
                ffi::RSMPI_STATUS_IGNORE,
            );
        }
    }

    /// Blocks until a message from rank `from` has arrived, and matches it (`MPI_Mprobe`).
    pub(in crate::comm) fn wait_for_message(
        &self,
        from: usize,
        tag: i32,
        element: ElementType,
    ) -> MatchedMessage {
        let (mut message, mut status) = (MaybeUninit::uninit(), MaybeUninit::uninit());
        let comm = self.communicator(Channel::Public);
        // SAFETY: MPI_Mprobe fills both before it returns.
        unsafe {
            ffi::MPI_Mprobe(from as c_int, tag, comm, message.as_mut_ptr(), status.as_mut_ptr());
            measured(message.assume_init(), &status.assume_init(), element)
        }
    }

    /// Matches a message from rank `from` if one has arrived (`MPI_Improbe`).
    pub(in crate::comm) fn look_for_message(
        &self,
        from: usize,
        tag: i32,
        element: ElementType,
    ) -> Option<MatchedMessage> {
        let (mut message, mut status) = (MaybeUninit::uninit(), MaybeUninit::uninit());
        let (comm, mut has_come) = (self.communicator(Channel::Public), 0);
        // SAFETY: MPI_Improbe fills both when it reports that the message has arrived.
        unsafe {
            let (message, status) = (message.as_mut_ptr(), status.as_mut_ptr());
            ffi::MPI_Improbe(from as c_int, tag, comm, &mut has_come, message, status);
            (has_come != 0).then(|| measured(*message, &*status, element))
        }
    }

    /// Starts receiving a matched message into `values` (`MPI_Imrecv`).
    ///
    /// # Safety
    /// The values are as many as the message has, valid, and nobody else touches them, until the
    /// request is complete.
    pub(in crate::comm) unsafe fn receive_matched(
        &self,
        requests: &mut Requests,
        message: &mut MatchedMessage,
        values: Values,
    ) {
        let extent = self.extent(values);
        let (pointer, n, t) = (values.pointer, extent.count, extent.datatype);
        // SAFETY: the caller keeps the values valid; the extent counts exactly these.
        unsafe { requests.post(|r| ffi::MPI_Imrecv(pointer, n, t, &mut message.handle, r)) };
    }
}

/// Reads the length of a matched message from its status.
fn measured(handle: ffi::MPI_Message, status: &ffi::MPI_Status, element: ElementType) -> MatchedMessage {
    // every message holds a whole number of bytes
    let bytes = num_elements(status, ElementType::U8).unwrap_or_default();
    MatchedMessage { handle, len: num_elements(status, element), bytes }
}
