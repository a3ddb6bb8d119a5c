//! [`Handle`], one MPI communicator with its duplicates, parts and barrier, and [`Values`], the raw
//! memory that MPI calls take.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::mem::{ManuallyDrop, MaybeUninit};

use ::mpi::ffi;
use ::mpi::raw::FromRaw as _;
use ::mpi::topology::{Color, Communicator as _, Group as _, SimpleCommunicator};
use ::mpi::traits::AsRaw as _;

use super::count::Extent;
use super::{Mode, Requests, yields};
use crate::memory::{Element, ElementType};

/// The largest count that one MPI call takes.
const LARGEST_COUNT: usize = c_int::MAX as usize;

/// One MPI communicator with a twin for the library's own point-to-point traffic, so that this
/// traffic is never matched with the user's messages.
///
/// MPI's communicators are never freed: `MPI_Comm_free` is collective (MPI-4.1 §7.4.3), and a rank
/// that ends because of an error on it alone must not wait for the others. Programs make a handful
/// of them, which last as long as the job.
pub(in crate::comm) struct Handle {
    public: ManuallyDrop<SimpleCommunicator>,
    private: ManuallyDrop<SimpleCommunicator>,
    pub(in crate::comm) rank: usize,
    pub(in crate::comm) size: usize,
    limit: Cell<usize>,
}

/// The communicator of a message, the public one or its twin.
#[derive(Clone, Copy)]
pub(in crate::comm) enum Channel {
    /// The user's messages.
    Public,
    /// Messages inside a collective operation of this crate.
    Private,
}

/// Elements in memory that MPI reads or writes.
#[derive(Clone, Copy)]
pub(in crate::comm) struct Values {
    pub(super) pointer: *mut c_void,
    pub(in crate::comm) len: usize,
    pub(super) element: ElementType,
}

impl Values {
    /// Returns the `len` elements at `pointer`.
    ///
    /// MPI is given null for the pointer of an empty Rust slice, which is dangling: for bytes it is
    /// 1, which Open MPI takes for `MPI_IN_PLACE`. All such pointers are on the first page of
    /// memory.
    pub(in crate::comm) fn new(pointer: *mut u8, len: usize, element: ElementType) -> Values {
        let pointer = if pointer.addr() < 4096 { std::ptr::null_mut() } else { pointer.cast() };
        Values { pointer, len, element }
    }

    /// Returns the elements of `slice`, to be read.
    pub(in crate::comm) fn of<T: Element>(slice: &[T]) -> Values {
        Values::new(slice.as_ptr().cast_mut().cast(), slice.len(), T::TYPE)
    }

    /// Returns the elements of `slice`, to be written.
    pub(in crate::comm) fn of_mut<T: Element>(slice: &mut [T]) -> Values {
        Values::new(slice.as_mut_ptr().cast(), slice.len(), T::TYPE)
    }

    /// Returns the `len` elements from element `start` on; null stays null.
    pub(super) fn range(self, start: usize, len: usize) -> Values {
        let pointer = self.pointer.wrapping_byte_add(start * self.element.bytes());
        Values { pointer: if self.pointer.is_null() { self.pointer } else { pointer }, len, ..self }
    }
}

impl Handle {
    /// Wraps `public`. Collective over it.
    pub(in crate::comm) fn new(public: SimpleCommunicator) -> Handle {
        Handle {
            rank: public.rank() as usize,
            size: public.size() as usize,
            private: ManuallyDrop::new(duplicate(&public)),
            public: ManuallyDrop::new(public),
            limit: Cell::new(LARGEST_COUNT),
        }
    }

    /// Duplicates the public communicator. Collective.
    pub(in crate::comm) fn duplicate(&self) -> Handle {
        Handle::new(duplicate(&self.public))
    }

    /// Splits the public communicator by `color`, in the order of `key`. Collective.
    pub(in crate::comm) fn split(&self, color: i32, key: i32) -> Handle {
        let part = self.public.split_by_color_with_key(Color::with_value(color), key);
        Handle::new(part.expect("MPI_Comm_split gives a communicator for every color that is not undefined"))
    }

    /// Returns the number in the job of each rank of the group.
    pub(in crate::comm) fn ranks_in_job(&self) -> Vec<Option<i32>> {
        let ranks: Vec<i32> = (0..self.public.size()).collect();
        self.public.group().translate_ranks(&ranks, &SimpleCommunicator::world().group())
    }

    /// Pretends that MPI counts only up to `limit`, for tests.
    pub(in crate::comm) fn set_limit(&self, limit: usize) {
        self.limit.set(limit.clamp(1, LARGEST_COUNT));
    }

    /// Returns the largest count that one call takes.
    pub(in crate::comm) fn limit(&self) -> usize {
        self.limit.get()
    }

    /// Makes room for the requests of one round with every rank.
    pub(in crate::comm) fn requests(&self) -> Requests {
        Requests::with_capacity(2 * self.size)
    }

    pub(super) fn communicator(&self, channel: Channel) -> ffi::MPI_Comm {
        match channel {
            Channel::Public => self.public.as_raw(),
            Channel::Private => self.private.as_raw(),
        }
    }

    pub(super) fn extent(&self, values: Values) -> Extent {
        Extent::new(values.element, values.len, self.limit.get())
    }

    /// Cuts `values` into ranges that one reduction call takes: the start and the count of each.
    pub(super) fn pieces(&self, values: Values) -> impl Iterator<Item = (usize, c_int)> + use<> {
        let (limit, len) = (self.limit.get(), values.len);
        (0..len.div_ceil(limit)).map(move |i| (i * limit, limit.min(len - i * limit) as c_int))
    }

    /// Blocks until every rank has called it (`MPI_Barrier`), or starts a barrier (`MPI_Ibarrier`).
    pub(in crate::comm) fn barrier(&self, mut mode: Mode<'_>) {
        let comm = self.public.as_raw();
        // SAFETY: a barrier has no buffers, and the communicator is never freed.
        unsafe { mode.call(|| ffi::MPI_Barrier(comm), |r| ffi::MPI_Ibarrier(comm, r)) }
    }
}

/// Duplicates a communicator. If there are more ranks than cores, the call is started and polled,
/// because MPICH spins inside `MPI_Comm_dup`.
fn duplicate(communicator: &SimpleCommunicator) -> SimpleCommunicator {
    if !yields() {
        return communicator.duplicate();
    }
    let mut twin = MaybeUninit::uninit();
    let mut requests = Requests::with_capacity(1);
    // SAFETY: the handle stays in place until the request is complete, by when MPI has filled it.
    unsafe {
        requests.post(|r| ffi::MPI_Comm_idup(communicator.as_raw(), twin.as_mut_ptr(), r));
        while !requests.test() {
            super::pause();
        }
        SimpleCommunicator::from_raw(twin.assume_init())
    }
}
