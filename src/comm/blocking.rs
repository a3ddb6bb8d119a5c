//! The MPI calls that block: MPI has faster paths for them than to start and wait. Where ranks are more than cores, they are
//! started and waited for nevertheless, because inside a call that blocks some MPIs only spin; messages between two ranks also where
//! the engine has something to move on meanwhile. (Of collective operations the two kinds do not match each other.)
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;

use mpi::collective::CommunicatorCollectives as _;
use mpi::datatype::Equivalence as _;
use mpi::ffi;
use mpi::raw::FromRaw as _;
use mpi::topology::{Communicator as _, SimpleCommunicator};
use mpi::traits::AsRaw;

use super::algorithm::Collective;
use super::engine::{self, is_busy, wait_all};
use super::raw::{Raw, address, address_mut, request};
use super::waiting::{Requests, yields};
use super::{Element, Operation};

impl Raw {
    /// Waits for the requests that `post` adds.
    fn complete(&self, post: impl FnOnce(&mut Requests)) {
        let mut requests = self.take_requests();
        post(&mut requests);
        wait_all(&mut requests);
        requests.clear();
        self.recycle_requests(requests);
    }

    /// Returns when every rank has called it.
    pub(super) fn barrier(&self) {
        if yields() {
            return self.complete(|requests| self.barrier_request(requests));
        }
        self.public.barrier();
    }

    /// `values = operation over all ranks of values`.
    pub(super) fn blocking_all_reduce<T: Element>(&self, values: &mut [T], operation: Operation) {
        if yields() {
            // SAFETY: the slices are borrowed until all is complete; the rest as below.
            return self.complete(|requests| unsafe {
                self.in_place(requests, Collective::AllReduce, (values.as_mut_ptr(), values.len()), operation)
            });
        }
        // SAFETY: the slice is borrowed.
        unsafe { self.all_reduce_in_place((values.as_mut_ptr(), values.len()), operation) }
    }

    /// The values become their combination over all ranks.
    ///
    /// # Safety
    /// There are as many values, and nobody else's.
    unsafe fn all_reduce_in_place<T: Element>(&self, (values, len): (*mut T, usize), operation: Operation) {
        let (datatype, operation) = (T::equivalent_datatype().as_raw(), operation.to_mpi());
        for (at, n) in self.pieces(len) {
            let into = address_mut(values.wrapping_add(at));
            // SAFETY: the caller's promise: there are at least `n` values from `at` on.
            unsafe {
                ffi::MPI_Allreduce(in_place(), into, n, datatype, operation.as_raw(), self.public.as_raw());
            }
        }
    }

    /// `into` = part `rank` of operation over all ranks of `from`, which has a part for each.
    pub(super) fn blocking_reduce_scatter<T: Element>(
        &self,
        from: &[T],
        into: &mut [T],
        operation: Operation,
    ) {
        let (datatype, operation) = (T::equivalent_datatype().as_raw(), operation.to_mpi());
        let (from, into, n) = (address(from.as_ptr()), address_mut(into.as_mut_ptr()), into.len() as c_int);
        // SAFETY: the callers checked the lengths.
        unsafe {
            ffi::MPI_Reduce_scatter_block(from, into, n, datatype, operation.as_raw(), self.public.as_raw());
        }
    }

    /// MPI's own operation on `len` values, sums where there are any, where they are.
    ///
    /// # Safety
    /// MPI may read and write that many values there.
    pub(super) unsafe fn blocking_in_place(&self, collective: Collective, (values, len): (*mut f32, usize)) {
        let (all, part) = (self.extent::<f32>(len), self.extent::<f32>(len / self.size));
        let (into, comm) = (values.cast(), self.public.as_raw());
        // SAFETY: the caller's promise.
        unsafe {
            match collective {
                Collective::AllReduce => self.all_reduce_in_place((values, len), Operation::Sum),
                Collective::AllGather => {
                    let (n, t) = (part.count, part.datatype);
                    ffi::MPI_Allgather(in_place(), n, t, into, n, t, comm);
                }
                Collective::Broadcast { root } => {
                    ffi::MPI_Bcast(into, all.count, all.datatype, root as c_int, comm);
                }
                Collective::ReduceScatter => unreachable!("MPI would put the part where the buffer begins"),
            }
        }
    }

    /// At the root, `into = operation over all ranks of from`; lengths are equal there.
    pub(super) fn blocking_reduce<T: Element>(
        &self,
        from: &[T],
        into: &mut [T],
        operation: Operation,
        root: usize,
    ) {
        if yields() {
            // SAFETY: the slices are borrowed until all is complete; the rest as below.
            return self.complete(|requests| unsafe {
                self.reduce(requests, (from.as_ptr(), from.len()), into.as_mut_ptr(), operation, root)
            });
        }
        let (datatype, operation) = (T::equivalent_datatype().as_raw(), operation.to_mpi());
        let (comm, root) = (self.public.as_raw(), root as c_int);
        for (at, n) in self.pieces(from.len()) {
            let (from, into) =
                (address(from[at..].as_ptr()), address_mut(into.as_mut_ptr().wrapping_add(at)));
            // SAFETY: `from` holds `n` elements from `at` on, and so does `into` at the root, where alone it is written.
            unsafe {
                ffi::MPI_Reduce(from, into, n, datatype, operation.as_raw(), root, comm);
            }
        }
    }

    /// The root's `values` on every rank.
    pub(super) fn blocking_broadcast<T: Element>(&self, values: &mut [T], root: usize) {
        if yields() {
            // SAFETY: the slices are borrowed until all is complete; the rest as below.
            return self.complete(|requests| unsafe {
                self.broadcast(requests, (values.as_mut_ptr(), values.len()), root)
            });
        }
        let extent = self.extent::<T>(values.len());
        // SAFETY: the slice holds the elements.
        unsafe {
            let values = address_mut(values.as_mut_ptr());
            ffi::MPI_Bcast(values, extent.count, extent.datatype, root as c_int, self.public.as_raw());
        }
    }

    /// Part r of the root's `from`, where that is long enough, in rank r's `into`.
    pub(super) fn blocking_scatter<T: Element>(&self, from: &[T], into: &mut [T], root: usize) {
        if yields() {
            // SAFETY: the slices are borrowed until all is complete; the rest as below.
            return self.complete(|requests| unsafe {
                self.scatter(requests, from.as_ptr(), (into.as_mut_ptr(), into.len()), root)
            });
        }
        let part = self.extent::<T>(into.len());
        let (comm, n, t) = (self.public.as_raw(), part.count, part.datatype);
        // SAFETY: the callers checked the lengths; `from` is read at the root only.
        unsafe {
            ffi::MPI_Scatter(
                address(from.as_ptr()),
                n,
                t,
                address_mut(into.as_mut_ptr()),
                n,
                t,
                root as c_int,
                comm,
            );
        }
    }

    /// Every rank's `from`, one after the other, in the root's `into`, where that is long enough.
    pub(super) fn blocking_gather<T: Element>(&self, from: &[T], into: &mut [T], root: usize) {
        if yields() {
            // SAFETY: the slices are borrowed until all is complete; the rest as below.
            return self.complete(|requests| unsafe {
                self.gather(requests, (from.as_ptr(), from.len()), into.as_mut_ptr(), root)
            });
        }
        let part = self.extent::<T>(from.len());
        let (comm, n, t) = (self.public.as_raw(), part.count, part.datatype);
        // SAFETY: the callers checked the lengths; `into` is written at the root only.
        unsafe {
            ffi::MPI_Gather(
                address(from.as_ptr()),
                n,
                t,
                address_mut(into.as_mut_ptr()),
                n,
                t,
                root as c_int,
                comm,
            );
        }
    }

    /// Every rank's `from`, one after the other, in every rank's `into`, which is long enough.
    pub(super) fn blocking_all_gather<T: Element>(&self, from: &[T], into: &mut [T]) {
        if yields() {
            // SAFETY: the slices are borrowed until all is complete; the rest as below.
            return self.complete(|requests| unsafe {
                self.all_gather(requests, (from.as_ptr(), from.len()), into.as_mut_ptr())
            });
        }
        let part = self.extent::<T>(from.len());
        let (comm, n, t) = (self.public.as_raw(), part.count, part.datatype);
        // SAFETY: the callers checked the lengths.
        unsafe {
            ffi::MPI_Allgather(address(from.as_ptr()), n, t, address_mut(into.as_mut_ptr()), n, t, comm);
        }
    }

    /// Part s of `from`, `count` elements, in part r of rank s's `into`.
    pub(super) fn blocking_all_to_all<T: Element>(&self, from: &[T], into: &mut [T], count: usize) {
        if yields() {
            // SAFETY: the slices are borrowed until all is complete; the rest as below.
            return self.complete(|requests| unsafe {
                self.all_to_all(requests, (from.as_ptr(), count), into.as_mut_ptr())
            });
        }
        let part = self.extent::<T>(count);
        let (comm, n, t) = (self.public.as_raw(), part.count, part.datatype);
        // SAFETY: the callers checked the lengths.
        unsafe {
            ffi::MPI_Alltoall(address(from.as_ptr()), n, t, address_mut(into.as_mut_ptr()), n, t, comm);
        }
    }

    /// Sends to one rank and receives from another at once.
    pub(super) fn blocking_send_receive<T: Element>(
        &self,
        (send, to): (&[T], usize),
        (receive, from): (&mut [T], usize),
        tag: i32,
    ) {
        if is_busy() {
            // SAFETY: as for the others.
            return self.complete(|requests| unsafe {
                self.receive(requests, (receive.as_mut_ptr(), receive.len()), from, tag);
                self.send(requests, (send.as_ptr(), send.len()), to, tag);
            });
        }
        let (out, back) = (self.extent::<T>(send.len()), self.extent::<T>(receive.len()));
        let (comm, to, from) = (self.public.as_raw(), to as c_int, from as c_int);
        // SAFETY: both slices hold the elements and do not overlap, being borrowed so.
        unsafe {
            let (values, into) = (address(send.as_ptr()), address_mut(receive.as_mut_ptr()));
            let (n, t, m, u) = (out.count, out.datatype, back.count, back.datatype);
            ffi::MPI_Sendrecv(values, n, t, to, tag, into, m, u, from, tag, comm, ffi::RSMPI_STATUS_IGNORE);
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
        let (mut length, mut bytes) = (0, 0);
        let element = T::equivalent_datatype().as_raw();
        // SAFETY: MPI_Mprobe fills both before it returns, MPI_Improbe when it says that the message is there.
        unsafe {
            let (comm, from) = (self.public.as_raw(), from as c_int);
            if is_busy() {
                engine::wait_until(|| {
                    let mut is_there = 0;
                    ffi::MPI_Improbe(
                        from,
                        tag,
                        comm,
                        &mut is_there,
                        message.as_mut_ptr(),
                        status.as_mut_ptr(),
                    );
                    is_there != 0
                });
            } else {
                ffi::MPI_Mprobe(from, tag, comm, message.as_mut_ptr(), status.as_mut_ptr());
            }
            ffi::MPI_Get_elements_x(status.as_ptr(), element, &mut length);
            ffi::MPI_Get_elements_x(status.as_ptr(), u8::equivalent_datatype().as_raw(), &mut bytes);
        }
        // matched is matched: what does not fit is taken in and thrown away, or its sender would wait for ever
        let Ok(length) = usize::try_from(length) else {
            // MPI_UNDEFINED: of another type, for some element is not whole
            self.take_matched(&mut vec![0_u8; bytes as usize], &mut message);
            return Err((bytes as usize).div_ceil(size_of::<T>()));
        };
        if length > values.len() {
            self.take_matched(&mut vec![T::default(); length], &mut message);
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
            let (n, t) = (extent.count, extent.datatype);
            self.complete(|requests| {
                requests.push(request(|r| ffi::MPI_Imrecv(into, n, t, message.as_mut_ptr(), r)))
            });
        }
    }

    /// Sends `values` and returns when they may be changed again.
    pub(super) fn blocking_send<T: Element>(&self, values: &[T], to: usize, tag: i32) {
        if is_busy() {
            // SAFETY: the slices are borrowed until all is complete; the rest as below.
            return self.complete(|requests| unsafe {
                self.send(requests, (values.as_ptr(), values.len()), to, tag)
            });
        }
        let extent = self.extent::<T>(values.len());
        // SAFETY: `values` stays borrowed until the call returns.
        unsafe {
            let (comm, from) = (self.public.as_raw(), address(values.as_ptr()));
            ffi::MPI_Send(from, extent.count, extent.datatype, to as c_int, tag, comm);
        }
    }
}

/// Another communicator of the same ranks.
pub(super) fn duplicate(communicator: &SimpleCommunicator) -> SimpleCommunicator {
    if !yields() {
        return communicator.duplicate();
    }
    let mut twin = MaybeUninit::uninit();
    // SAFETY: the handle stays where it is until MPI has filled it, which it has when the request is complete.
    unsafe {
        let mut requests = vec![request(|r| ffi::MPI_Comm_idup(communicator.as_raw(), twin.as_mut_ptr(), r))];
        wait_all(&mut requests);
        SimpleCommunicator::from_raw(twin.assume_init())
    }
}

/// `MPI_IN_PLACE`, which the binding does not know: a constant of the library's binary interface. That of MPICH and its kin has
/// numbers for handles, that of Open MPI pointers.
pub(super) fn in_place() -> *const c_void {
    const MPICH: usize = usize::MAX;
    const OPEN_MPI: usize = 1;
    let is_mpich = size_of::<ffi::MPI_Comm>() == size_of::<c_int>();
    std::ptr::without_provenance(if is_mpich { MPICH } else { OPEN_MPI })
}
