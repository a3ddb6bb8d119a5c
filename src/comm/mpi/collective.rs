//! MPI's collective operations that move values (MPI-4.1 §6), from broadcast to reduce-scatter,
//! each blocking or started. The barrier is in `handle.rs`.
//!
//! `None` for the values that a rank sends means that they are in the memory that it receives into
//! (`MPI_IN_PLACE`). Values that MPI ignores on ranks other than the root may be empty.
//!
//! # Safety
//! All operations have the same requirements. The values are valid until the call returns or its
//! requests are complete; until then nobody accesses the values received into and nobody writes the
//! values sent. Lengths, roots and operations agree between the ranks as MPI demands.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};

use ::mpi::ffi;

use super::element::{datatype, reduction};
use super::{Channel, Handle, Mode, Values};
use crate::memory::Operation;

#[allow(clippy::missing_safety_doc)] // one text for all of them, above
impl Handle {
    /// Copies the root's values to every rank (`MPI_Bcast`).
    pub(in crate::comm) unsafe fn broadcast(&self, mut mode: Mode<'_>, values: Values, root: usize) {
        let (extent, comm, root) = (self.extent(values), self.communicator(Channel::Public), root as c_int);
        let (pointer, n, t) = (values.pointer, extent.count, extent.datatype);
        // SAFETY: the caller keeps `values` valid until the operation is complete, and the extent
        // counts exactly these.
        unsafe {
            mode.call(
                || ffi::MPI_Bcast(pointer, n, t, root, comm),
                |r| ffi::MPI_Ibcast(pointer, n, t, root, comm, r),
            );
        }
    }

    /// Hands part r of the root's `send` to rank r's `receive` (`MPI_Scatter`).
    pub(in crate::comm) unsafe fn scatter(
        &self,
        mut mode: Mode<'_>,
        send: Values,
        receive: Values,
        root: usize,
    ) {
        let (part, comm, root) = (self.extent(receive), self.communicator(Channel::Public), root as c_int);
        let (from, into, n, t) = (send.pointer, receive.pointer, part.count, part.datatype);
        // SAFETY: the caller keeps both buffers valid until the operation is complete, and
        // guarantees that the root's `send` has a part of this extent for each rank.
        unsafe {
            mode.call(
                || ffi::MPI_Scatter(from, n, t, into, n, t, root, comm),
                |r| ffi::MPI_Iscatter(from, n, t, into, n, t, root, comm, r),
            );
        }
    }

    /// Collects every rank's `send` in the root's `receive` (`MPI_Gather`).
    pub(in crate::comm) unsafe fn gather(
        &self,
        mut mode: Mode<'_>,
        send: Values,
        receive: Values,
        root: usize,
    ) {
        let (part, comm, root) = (self.extent(send), self.communicator(Channel::Public), root as c_int);
        let (from, into, n, t) = (send.pointer, receive.pointer, part.count, part.datatype);
        // SAFETY: the caller keeps both buffers valid until the operation is complete, and
        // guarantees that the root's `receive` has a part of this extent for each rank.
        unsafe {
            mode.call(
                || ffi::MPI_Gather(from, n, t, into, n, t, root, comm),
                |r| ffi::MPI_Igather(from, n, t, into, n, t, root, comm, r),
            );
        }
    }

    /// Collects every rank's `send` in every rank's `receive` (`MPI_Allgather`).
    pub(in crate::comm) unsafe fn all_gather(
        &self,
        mut mode: Mode<'_>,
        send: Option<Values>,
        receive: Values,
    ) {
        let part = self.extent(receive.range(0, receive.len / self.size));
        let (from, into, n, t) = (source(send), receive.pointer, part.count, part.datatype);
        let comm = self.communicator(Channel::Public);
        // SAFETY: the caller keeps both buffers valid until the operation is complete, and the
        // extent counts one rank's part of `receive`.
        unsafe {
            mode.call(
                || ffi::MPI_Allgather(from, n, t, into, n, t, comm),
                |r| ffi::MPI_Iallgather(from, n, t, into, n, t, comm, r),
            );
        }
    }

    /// Sends part s of `send` to rank s, where it becomes part r of `receive` (`MPI_Alltoall`).
    pub(in crate::comm) unsafe fn all_to_all(&self, mut mode: Mode<'_>, send: Values, receive: Values) {
        let part = self.extent(send.range(0, send.len / self.size));
        let (from, into, n, t) = (send.pointer, receive.pointer, part.count, part.datatype);
        let comm = self.communicator(Channel::Public);
        // SAFETY: the caller keeps both buffers valid until the operation is complete, and the
        // extent counts one rank's part of each.
        unsafe {
            mode.call(
                || ffi::MPI_Alltoall(from, n, t, into, n, t, comm),
                |r| ffi::MPI_Ialltoall(from, n, t, into, n, t, comm, r),
            );
        }
    }

    /// Combines every rank's `send` in the root's `receive` (`MPI_Reduce`).
    pub(in crate::comm) unsafe fn reduce(
        &self,
        mut mode: Mode<'_>,
        send: Values,
        receive: Values,
        operation: Operation,
        root: usize,
    ) {
        let (t, op) = (datatype(send.element), reduction(operation));
        let (comm, root) = (self.communicator(Channel::Public), root as c_int);
        for (at, n) in self.pieces(send) {
            let (from, into) = (send.range(at, 0).pointer, receive.range(at, 0).pointer);
            // SAFETY: the caller keeps both buffers valid until the operation is complete, and the
            // piece is within each.
            unsafe {
                mode.call(
                    || ffi::MPI_Reduce(from, into, n, t, op, root, comm),
                    |r| ffi::MPI_Ireduce(from, into, n, t, op, root, comm, r),
                );
            }
        }
    }

    /// Combines every rank's `send` in every rank's `receive` (`MPI_Allreduce`).
    pub(in crate::comm) unsafe fn all_reduce(
        &self,
        mut mode: Mode<'_>,
        send: Option<Values>,
        receive: Values,
        operation: Operation,
    ) {
        let (t, op) = (datatype(receive.element), reduction(operation));
        let comm = self.communicator(Channel::Public);
        for (at, n) in self.pieces(receive) {
            let from = source(send.map(|send| send.range(at, 0)));
            let into = receive.range(at, 0).pointer;
            // SAFETY: the caller keeps both buffers valid until the operation is complete, and the
            // piece is within each.
            unsafe {
                mode.call(
                    || ffi::MPI_Allreduce(from, into, n, t, op, comm),
                    |r| ffi::MPI_Iallreduce(from, into, n, t, op, comm, r),
                );
            }
        }
    }

    /// Combines the `send` of ranks 0 to r in rank r's `receive` (`MPI_Scan`).
    pub(in crate::comm) unsafe fn scan(
        &self,
        mut mode: Mode<'_>,
        send: Option<Values>,
        receive: Values,
        operation: Operation,
    ) {
        let (t, op) = (datatype(receive.element), reduction(operation));
        let comm = self.communicator(Channel::Public);
        for (at, n) in self.pieces(receive) {
            let from = source(send.map(|send| send.range(at, 0)));
            let into = receive.range(at, 0).pointer;
            // SAFETY: the caller keeps both buffers valid until the operation is complete, and the
            // piece is within each.
            unsafe {
                mode.call(
                    || ffi::MPI_Scan(from, into, n, t, op, comm),
                    |r| ffi::MPI_Iscan(from, into, n, t, op, comm, r),
                );
            }
        }
    }

    /// Combines every rank's `send` and leaves part r in rank r's `receive`
    /// (`MPI_Reduce_scatter_block`). The length of a part is at most [`Handle::limit`].
    pub(in crate::comm) unsafe fn reduce_scatter(
        &self,
        mut mode: Mode<'_>,
        send: Values,
        receive: Values,
        operation: Operation,
    ) {
        let (t, op, n) = (datatype(send.element), reduction(operation), receive.len as c_int);
        let (from, into, comm) = (send.pointer, receive.pointer, self.communicator(Channel::Public));
        // SAFETY: the caller keeps both buffers valid until the operation is complete, and
        // guarantees that `send` has as many elements as `receive` for each rank.
        unsafe {
            mode.call(
                || ffi::MPI_Reduce_scatter_block(from, into, n, t, op, comm),
                |r| ffi::MPI_Ireduce_scatter_block(from, into, n, t, op, comm, r),
            );
        }
    }
}

/// Returns the pointer that MPI is given for the values that a rank sends.
fn source(send: Option<Values>) -> *const c_void {
    send.map_or_else(in_place, |send| send.pointer.cast_const())
}

/// Returns `MPI_IN_PLACE`, which the binding does not know: a constant of the library's binary
/// interface. MPICH and its derivatives use numbers as handles, Open MPI uses pointers.
fn in_place() -> *const c_void {
    const MPICH: usize = usize::MAX;
    const OPEN_MPI: usize = 1;
    let is_mpich = size_of::<ffi::MPI_Comm>() == size_of::<c_int>();
    std::ptr::without_provenance(if is_mpich { MPICH } else { OPEN_MPI })
}
