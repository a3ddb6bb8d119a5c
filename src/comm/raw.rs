//! The MPI calls themselves, on raw memory: what [`Communicator`](super::Communicator) and
//! [`Pending`](super::Pending) are made of.
//!
//! Counts are `usize`. A message longer than `limit` elements (2³¹ − 1, what a C `int` holds) travels as *one*
//! message of a derived datatype, so that matching, ordering and short receives stay MPI's; only reductions, which
//! MPI restricts to predefined types, are cut into several calls.
//!
//! MPI's default error handler ends the job, so return codes carry no news and are not looked at (MPI-4.1 §9.3);
//! lengths and ranks are checked by the callers before they come here.
#![allow(unsafe_code)]

use std::cell::{Cell, RefCell};
use std::ffi::{c_int, c_void};
use std::mem::{ManuallyDrop, MaybeUninit};

use mpi::datatype::{UncommittedUserDatatype, UserDatatype};
use mpi::ffi;
use mpi::topology::{Communicator as _, Group as _, SimpleCommunicator};
use mpi::traits::AsRaw;

use super::links::Links;
use super::{Element, Operation};
use crate::Result;
use crate::memory::Memory;

/// The largest count that one MPI call takes.
const LARGEST_COUNT: usize = c_int::MAX as usize;

/// One MPI communicator with a twin for the library's own point-to-point traffic, so that it never meets the user's
/// tags, and the memory that operations use again and again.
///
/// MPI's communicators are never freed: `MPI_Comm_free` is collective (MPI-4.1 §7.4.3), and a rank that leaves because of an
/// error of its own must not wait for the others. Programs make a handful of them, which last as long as the job.
pub(super) struct Raw {
    pub(super) public: ManuallyDrop<SimpleCommunicator>,
    private: ManuallyDrop<SimpleCommunicator>,
    pub(super) rank: usize,
    pub(super) size: usize,
    /// The number in the job of each rank of the group.
    in_job: Vec<Option<i32>>,
    limit: Cell<usize>,
    scratch: RefCell<Vec<Memory<u64>>>,
    requests: RefCell<Vec<Requests>>,
    pub(super) links: Links,
}

/// Unfinished MPI requests.
pub(super) type Requests = Vec<ffi::MPI_Request>;

/// Which of the two communicators a message takes.
#[derive(Clone, Copy)]
pub(super) enum Channel {
    /// The user's messages.
    Public,
    /// Messages inside a collective operation of ours.
    Private,
}

/// `count` elements as MPI counts them: some number of some datatype.
pub(super) struct Extent {
    pub(super) datatype: ffi::MPI_Datatype,
    pub(super) count: c_int,
    /// Freed on drop, which MPI delays until pending operations on it are complete (MPI-4.1 §5.1.9).
    _derived: Option<UserDatatype>,
}

impl Raw {
    /// Collective over `public`; messages are named under `links`.
    pub(super) fn new(public: SimpleCommunicator, links: Links) -> Raw {
        let ranks: Vec<i32> = (0..public.size()).collect();
        let in_job = public.group().translate_ranks(&ranks, &SimpleCommunicator::world().group());
        Raw {
            in_job,
            rank: public.rank() as usize,
            size: public.size() as usize,
            private: ManuallyDrop::new(public.duplicate()),
            public: ManuallyDrop::new(public),
            limit: Cell::new(LARGEST_COUNT),
            scratch: RefCell::default(),
            requests: RefCell::default(),
            links,
        }
    }

    /// The number in the job of rank `rank`.
    pub(super) fn in_job(&self, rank: usize) -> Option<usize> {
        self.in_job[rank].map(|rank| rank as usize)
    }

    pub(super) fn set_limit(&self, limit: usize) {
        self.limit.set(limit.clamp(1, LARGEST_COUNT));
    }

    fn handle(&self, channel: Channel) -> ffi::MPI_Comm {
        match channel {
            Channel::Public => self.public.as_raw(),
            Channel::Private => self.private.as_raw(),
        }
    }

    pub(super) fn extent<T: Element>(&self, count: usize) -> Extent {
        let element = T::equivalent_datatype();
        let limit = self.limit.get();
        if count <= limit {
            return Extent { datatype: element.as_raw(), count: count as c_int, _derived: None };
        }
        let block = UncommittedUserDatatype::contiguous(limit as c_int, &element);
        let whole = UncommittedUserDatatype::contiguous((count / limit) as c_int, &block);
        let rest = UncommittedUserDatatype::contiguous((count % limit) as c_int, &element);
        let start_of_rest = (count / limit * limit * size_of::<T>()) as mpi::Address;
        let derived = UserDatatype::structured(&[1, 1], &[0, start_of_rest], &[whole.as_ref(), rest.as_ref()]);
        Extent { datatype: derived.as_raw(), count: 1, _derived: Some(derived) }
    }

    /// Cuts `0..count` into ranges that one reduction call takes.
    pub(super) fn pieces(&self, count: usize) -> impl Iterator<Item = (usize, c_int)> + use<> {
        let limit = self.limit.get();
        (0..count.div_ceil(limit)).map(move |i| (i * limit, limit.min(count - i * limit) as c_int))
    }

    /// Memory for at least `count` elements, used before or not, to be handed back with [`Raw::recycle`]. Operations of a
    /// kind come again with the same sizes, so the smallest piece that fits is taken.
    pub(super) fn take_scratch<T: Element>(&self, count: usize) -> Result<Memory<u64>> {
        let needed = (count * size_of::<T>()).div_ceil(size_of::<u64>());
        let mut pieces = self.scratch.borrow_mut();
        let fitting = (0..pieces.len()).filter(|&at| pieces[at].len() >= needed);
        match fitting.min_by_key(|&at| pieces[at].len()) {
            Some(at) => Ok(pieces.swap_remove(at)),
            None => Memory::zeroed(needed),
        }
    }

    pub(super) fn recycle(&self, scratch: Memory<u64>) {
        self.scratch.borrow_mut().push(scratch);
    }

    pub(super) fn take_requests(&self) -> Requests {
        let fresh = || Vec::with_capacity(2 * self.size);
        self.requests.borrow_mut().pop().unwrap_or_else(fresh)
    }

    pub(super) fn recycle_requests(&self, requests: Requests) {
        self.requests.borrow_mut().push(requests);
    }

    pub(super) fn barrier_request(&self, requests: &mut Requests) {
        // SAFETY: a barrier has no buffers.
        requests.push(unsafe { request(|r| ffi::MPI_Ibarrier(self.public.as_raw(), r)) });
    }
}

/// True when all of `requests` are complete; gives MPI the occasion to move their data along.
pub(super) fn test_all(requests: &mut Requests) -> bool {
    let mut flag = 0;
    // SAFETY: the handles are this process's own, and MPI writes null over those that it completes.
    unsafe {
        ffi::MPI_Testall(requests.len() as c_int, requests.as_mut_ptr(), &mut flag, ffi::RSMPI_STATUSES_IGNORE);
    }
    flag != 0
}

/// Returns when all of `requests` are complete.
pub(super) fn wait_all(requests: &mut Requests) {
    // SAFETY: as in `test_all`.
    unsafe {
        ffi::MPI_Waitall(requests.len() as c_int, requests.as_mut_ptr(), ffi::RSMPI_STATUSES_IGNORE);
    }
}

/// Non-blocking operations, each of which adds its requests to `requests`.
///
/// # Safety
/// For all of them: the pointers are valid for the count given until the requests are complete, what is received
/// into is not touched and what is sent is not written before then, and counts, roots and operations agree between
/// the ranks as MPI demands.
impl Raw {
    pub(super) unsafe fn send<T: Element>(
        &self,
        requests: &mut Requests,
        channel: Channel,
        (from, count): (*const T, usize),
        to: usize,
        tag: i32,
    ) {
        let extent = self.extent::<T>(count);
        // SAFETY: the caller's promise.
        requests.push(unsafe {
            request(|r| {
                let (comm, to) = (self.handle(channel), to as c_int);
                ffi::MPI_Isend(address(from), extent.count, extent.datatype, to, tag, comm, r)
            })
        });
    }

    pub(super) unsafe fn receive<T: Element>(
        &self,
        requests: &mut Requests,
        channel: Channel,
        (into, count): (*mut T, usize),
        from: usize,
        tag: i32,
    ) {
        let extent = self.extent::<T>(count);
        // SAFETY: the caller's promise.
        requests.push(unsafe {
            request(|r| {
                let (comm, from) = (self.handle(channel), from as c_int);
                ffi::MPI_Irecv(address_mut(into), extent.count, extent.datatype, from, tag, comm, r)
            })
        });
    }

    pub(super) unsafe fn broadcast<T: Element>(&self, requests: &mut Requests, data: (*mut T, usize), root: usize) {
        let extent = self.extent::<T>(data.1);
        let comm = self.public.as_raw();
        // SAFETY: the caller's promise.
        requests.push(unsafe {
            request(|r| ffi::MPI_Ibcast(address_mut(data.0), extent.count, extent.datatype, root as c_int, comm, r))
        });
    }

    pub(super) unsafe fn scatter<T: Element>(
        &self,
        requests: &mut Requests,
        from: *const T,
        (into, count): (*mut T, usize),
        root: usize,
    ) {
        let part = self.extent::<T>(count);
        let (comm, root) = (self.public.as_raw(), root as c_int);
        let (n, t) = (part.count, part.datatype);
        // SAFETY: the caller's promise.
        requests.push(unsafe {
            request(|r| ffi::MPI_Iscatter(address(from), n, t, address_mut(into), n, t, root, comm, r))
        });
    }

    pub(super) unsafe fn gather<T: Element>(
        &self,
        requests: &mut Requests,
        (from, count): (*const T, usize),
        into: *mut T,
        root: usize,
    ) {
        let part = self.extent::<T>(count);
        let (comm, root) = (self.public.as_raw(), root as c_int);
        let (n, t) = (part.count, part.datatype);
        // SAFETY: the caller's promise.
        requests.push(unsafe {
            request(|r| ffi::MPI_Igather(address(from), n, t, address_mut(into), n, t, root, comm, r))
        });
    }

    pub(super) unsafe fn all_gather<T: Element>(
        &self,
        requests: &mut Requests,
        (from, count): (*const T, usize),
        into: *mut T,
    ) {
        let part = self.extent::<T>(count);
        let (comm, n, t) = (self.public.as_raw(), part.count, part.datatype);
        // SAFETY: the caller's promise.
        requests
            .push(unsafe { request(|r| ffi::MPI_Iallgather(address(from), n, t, address_mut(into), n, t, comm, r)) });
    }

    pub(super) unsafe fn all_to_all<T: Element>(
        &self,
        requests: &mut Requests,
        (from, count): (*const T, usize),
        into: *mut T,
    ) {
        let part = self.extent::<T>(count);
        let (comm, n, t) = (self.public.as_raw(), part.count, part.datatype);
        // SAFETY: the caller's promise.
        requests
            .push(unsafe { request(|r| ffi::MPI_Ialltoall(address(from), n, t, address_mut(into), n, t, comm, r)) });
    }

    pub(super) unsafe fn reduce<T: Element>(
        &self,
        requests: &mut Requests,
        (from, count): (*const T, usize),
        into: *mut T,
        operation: Operation,
        root: usize,
    ) {
        let (datatype, operation) = (T::equivalent_datatype().as_raw(), operation.to_mpi());
        let (comm, op, root) = (self.public.as_raw(), operation.as_raw(), root as c_int);
        for (at, n) in self.pieces(count) {
            // SAFETY: the caller's promise; `into` is only written, and only offset in memory, at the root.
            requests.push(unsafe {
                let (from, into) = (address(from.add(at)), address_mut(into.wrapping_add(at)));
                request(|r| ffi::MPI_Ireduce(from, into, n, datatype, op, root, comm, r))
            });
        }
    }

    pub(super) unsafe fn all_reduce<T: Element>(
        &self,
        requests: &mut Requests,
        (from, count): (*const T, usize),
        into: *mut T,
        operation: Operation,
    ) {
        let (datatype, operation) = (T::equivalent_datatype().as_raw(), operation.to_mpi());
        let (comm, op) = (self.public.as_raw(), operation.as_raw());
        for (at, n) in self.pieces(count) {
            // SAFETY: the caller's promise.
            requests.push(unsafe {
                let (from, into) = (address(from.add(at)), address_mut(into.add(at)));
                request(|r| ffi::MPI_Iallreduce(from, into, n, datatype, op, comm, r))
            });
        }
    }

    /// Every rank sends `count` elements at `outgoing(s)` to each other rank `s` and receives as many from it at `incoming(s)`:
    /// the pairwise exchange of R. Thakur, R. Rabenseifner
    /// and W. Gropp, "Optimization of Collective Communication Operations in MPICH", IJHPCA 19 (2005), §4.3.
    pub(super) unsafe fn exchange<T: Element>(
        &self,
        requests: &mut Requests,
        outgoing: impl Fn(usize) -> *const T,
        incoming: impl Fn(usize) -> *mut T,
        count: usize,
    ) {
        for step in 1..self.size {
            let (to, from) = ((self.rank + step) % self.size, (self.rank + self.size - step) % self.size);
            // SAFETY: the caller's promise.
            unsafe {
                self.receive(requests, Channel::Private, (incoming(from), count), from, 0);
                self.send(requests, Channel::Private, (outgoing(to), count), to, 0);
            }
        }
    }
}

/// What MPI is told of a buffer: the pointer of an empty Rust slice points nowhere, to 1 for bytes, and 1 is what Open MPI
/// takes for `MPI_IN_PLACE`; such pointers, all on the first page of memory, become null.
pub(super) fn address<T>(pointer: *const T) -> *const c_void {
    if pointer.addr() < 4096 { std::ptr::null() } else { pointer.cast() }
}

pub(super) fn address_mut<T>(pointer: *mut T) -> *mut c_void {
    address(pointer.cast_const()).cast_mut()
}

/// Runs a call that writes a request handle, and returns the handle.
///
/// # Safety
/// `start` writes the handle.
unsafe fn request(start: impl FnOnce(*mut ffi::MPI_Request) -> c_int) -> ffi::MPI_Request {
    let mut handle = MaybeUninit::uninit();
    start(handle.as_mut_ptr());
    // SAFETY: the caller's promise.
    unsafe { handle.assume_init() }
}
