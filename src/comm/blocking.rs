//! The MPI calls that block, where MPI has a faster path for them than to start and wait, or none to start.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::mem::MaybeUninit;

use mpi::collective::CommunicatorCollectives as _;
use mpi::ffi;
use mpi::traits::AsRaw;

use super::raw::{Raw, address, address_mut};
use super::{Element, Operation};

impl Raw {
    /// Returns when every rank has called it.
    pub(super) fn barrier(&self) {
        self.public.barrier();
    }

    /// `into = operation over all ranks of from`; lengths are equal.
    pub(super) fn blocking_all_reduce<T: Element>(&self, from: &[T], into: &mut [T], operation: Operation) {
        let (datatype, operation) = (T::equivalent_datatype().as_raw(), operation.to_mpi());
        for (at, n) in self.pieces(from.len()) {
            let (from, into) = (address(from[at..].as_ptr()), address_mut(into[at..].as_mut_ptr()));
            // SAFETY: both slices hold at least `n` elements from `at` on and do not overlap, being borrowed so.
            unsafe {
                ffi::MPI_Allreduce(from, into, n, datatype, operation.as_raw(), self.public.as_raw());
            }
        }
    }

    /// Receives into `values` a message that may be shorter; `Err(length)` if it is longer, and then it is lost.
    pub(super) fn blocking_receive<T: Element>(
        &self,
        values: &mut [T],
        from: usize,
        tag: i32,
    ) -> Result<usize, usize> {
        let mut status = MaybeUninit::uninit();
        let mut message = MaybeUninit::uninit();
        let mut length = 0;
        let element = T::equivalent_datatype().as_raw();
        // SAFETY: MPI_Mprobe fills both before it returns.
        unsafe {
            let comm = self.public.as_raw();
            ffi::MPI_Mprobe(from as c_int, tag, comm, message.as_mut_ptr(), status.as_mut_ptr());
            ffi::MPI_Get_elements_x(status.as_ptr(), element, &mut length);
        }
        let length = length as usize;
        if length > values.len() {
            // matched is matched: take it in and throw it away, or its sender would wait for ever
            let mut discarded = vec![T::default(); length];
            self.take_matched(&mut discarded, &mut message);
            return Err(length);
        }
        self.take_matched(&mut values[..length], &mut message);
        Ok(length)
    }

    /// Receives the `message` that was matched, which is as long as `values`.
    fn take_matched<T: Element>(&self, values: &mut [T], message: &mut MaybeUninit<ffi::MPI_Message>) {
        let length = values.len();
        let extent = self.extent::<T>(length);
        // SAFETY: `message` is the one just matched, and `values` holds its `length` elements.
        unsafe {
            let into = address_mut(values.as_mut_ptr());
            ffi::MPI_Mrecv(into, extent.count, extent.datatype, message.as_mut_ptr(), ffi::RSMPI_STATUS_IGNORE);
        }
    }

    /// Sends `values` and returns when they may be changed again.
    pub(super) fn blocking_send<T: Element>(&self, values: &[T], to: usize, tag: i32) {
        let extent = self.extent::<T>(values.len());
        // SAFETY: `values` stays borrowed until the call returns.
        unsafe {
            let (comm, from) = (self.public.as_raw(), address(values.as_ptr()));
            ffi::MPI_Send(from, extent.count, extent.datatype, to as c_int, tag, comm);
        }
    }
}
