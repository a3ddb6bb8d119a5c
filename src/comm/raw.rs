//! The MPI calls themselves, on raw memory: what [`Communicator`](super::Communicator) and
//! [`Pending`](super::Pending) are made of.
//!
//! Counts are `usize`: see [`Extent`]. Reductions, which MPI restricts to predefined types, are cut into several calls.
//!
//! MPI's default error handler ends the job, so return codes carry no news and are not looked at (MPI-4.1 §9.3);
//! lengths and ranks are checked by the callers before they come here.
#![allow(unsafe_code)]

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::mem::{ManuallyDrop, MaybeUninit};
use std::rc::Rc;

use mpi::datatype::Equivalence;
use mpi::ffi;
use mpi::topology::{Communicator as _, Group as _, SimpleCommunicator};
use mpi::traits::AsRaw;

use super::algorithm::{Algorithm, Collective, Plan, Ranks};
use super::blocking::duplicate;
use super::choice::{self, Choice};
use super::extent::Extent;
use super::links::Links;
use super::waiting::Requests;
use super::world::node_of;
use super::{Element, LARGEST_TAG, Operation, Transfers};
use crate::Result;
use crate::memory::Memory;

/// Tags that every MPI has.
const NUM_TAGS: usize = LARGEST_TAG as usize + 1;

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
    /// How buffers of a device travel.
    pub(super) transfers: Cell<Transfers>,
    /// The node of each rank of the group.
    nodes: RefCell<Vec<usize>>,
    pub(super) plans: RefCell<HashMap<(Collective, Algorithm), Rc<Plan>>>,
    next_tag: Cell<usize>,
    overriding: Cell<Option<Choice>>,
    /// What the last collective operation was done by.
    pub(super) last_algorithm: Cell<Algorithm>,
}

/// Which of the two communicators a message takes.
#[derive(Clone, Copy)]
pub(super) enum Channel {
    /// The user's messages.
    Public,
    /// Messages inside a collective operation of ours.
    Private,
}

impl Raw {
    /// Collective over `public`; messages are named under `links`.
    pub(super) fn new(public: SimpleCommunicator, links: Links) -> Raw {
        let ranks: Vec<i32> = (0..public.size()).collect();
        let in_job = public.group().translate_ranks(&ranks, &SimpleCommunicator::world().group());
        let nodes = in_job.iter().map(|rank| rank.map_or(0, |rank| node_of(rank as usize))).collect();
        Raw {
            in_job,
            rank: public.rank() as usize,
            size: public.size() as usize,
            private: ManuallyDrop::new(duplicate(&public)),
            public: ManuallyDrop::new(public),
            limit: Cell::new(LARGEST_COUNT),
            scratch: RefCell::default(),
            requests: RefCell::default(),
            links,
            transfers: Cell::new(Transfers::Staged),
            nodes: RefCell::new(nodes),
            plans: RefCell::default(),
            next_tag: Cell::new(0),
            overriding: Cell::new(None),
            last_algorithm: Cell::new(Algorithm::Mpi),
        }
    }

    /// The number in the job of rank `rank`.
    pub(super) fn in_job(&self, rank: usize) -> Option<usize> {
        self.in_job[rank].map(|rank| rank as usize)
    }

    pub(super) fn set_limit(&self, limit: usize) {
        self.limit.set(limit.clamp(1, LARGEST_COUNT));
    }

    /// This rank among the others, and where they are; [`Raw::set_nodes`] may say otherwise.
    pub(super) fn with_ranks<R>(&self, look: impl FnOnce(Ranks<'_>) -> R) -> R {
        look(Ranks { rank: self.rank, nodes: &self.nodes.borrow() })
    }

    pub(super) fn set_nodes(&self, nodes: Vec<usize>) {
        self.nodes.replace(nodes);
        self.plans.borrow_mut().clear();
    }

    /// Tags for the chunks of a collective operation, which every rank starts in the same order.
    pub(super) fn take_tags(&self, count: usize) -> usize {
        self.next_tag.replace((self.next_tag.get() + count) % NUM_TAGS)
    }

    /// Tag `number`, counted round and round.
    pub(super) fn tag(&self, number: usize) -> i32 {
        (number % NUM_TAGS) as i32
    }

    pub(super) fn set_override(&self, choice: Option<Choice>) {
        self.overriding.set(choice);
    }

    /// The same where MPI's own is out of the question.
    pub(super) fn override_plan(&self, collective: Collective, choice: Choice) -> Choice {
        let can = |other: &Choice| other.algorithm.plans(collective);
        let choice = self.overriding.get().filter(can).unwrap_or(choice);
        self.last_algorithm.set(choice.algorithm);
        choice
    }

    /// What is to be done instead of `choice`, if someone said so and there is a plan for it.
    pub(super) fn override_choice(&self, collective: Collective, choice: Choice) -> Choice {
        if self.wants_mpi().is_some() {
            self.last_algorithm.set(Algorithm::Mpi);
            return Choice::whole(Algorithm::Mpi);
        }
        self.override_plan(collective, choice)
    }

    /// The same for a reduce-scatter with parts of `part` elements: MPI's own cannot be cut into several, and takes a C int.
    pub(super) fn override_reduce_scatter(&self, part: usize, choice: Choice) -> Choice {
        if part <= self.limit.get() {
            return self.override_choice(Collective::ReduceScatter, choice);
        }
        self.override_plan(Collective::ReduceScatter, choice::started())
    }

    /// Which of MPI's own calls is to do what it can, if someone said so.
    pub(super) fn wants_mpi(&self) -> Option<Algorithm> {
        let algorithm = self.overriding.get()?.algorithm;
        matches!(algorithm, Algorithm::Mpi | Algorithm::MpiBlocking).then_some(algorithm)
    }

    fn handle(&self, channel: Channel) -> ffi::MPI_Comm {
        match channel {
            Channel::Public => self.public.as_raw(),
            Channel::Private => self.private.as_raw(),
        }
    }

    pub(super) fn extent<T: Equivalence>(&self, count: usize) -> Extent {
        Extent::new::<T>(count, self.limit.get())
    }

    /// Cuts `0..count` into ranges that one reduction call takes.
    pub(super) fn pieces(&self, count: usize) -> impl Iterator<Item = (usize, c_int)> + use<> {
        let limit = self.limit.get();
        (0..count.div_ceil(limit)).map(move |i| (i * limit, limit.min(count - i * limit) as c_int))
    }

    /// Memory of at least `bytes`, used before or not, to be handed back with [`Raw::recycle`]. Operations of a
    /// kind come again with the same sizes, so the smallest piece that fits is taken.
    pub(super) fn take_scratch(&self, bytes: usize) -> Result<Memory<u64>> {
        let needed = bytes.div_ceil(size_of::<u64>());
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

/// Non-blocking operations, each of which adds its requests to `requests`.
///
/// # Safety
/// For all of them: the pointers are valid for the count given until the requests are complete, what is received
/// into is not touched and what is sent is not written before then, and counts, roots and operations agree between
/// the ranks as MPI demands.
impl Raw {
    pub(super) unsafe fn send_extent(
        &self,
        requests: &mut Requests,
        channel: Channel,
        from: *const c_void,
        extent: Extent,
        to: usize,
        tag: i32,
    ) {
        // SAFETY: the caller's promise.
        requests.push(unsafe {
            let (comm, to) = (self.handle(channel), to as c_int);
            request(|r| ffi::MPI_Isend(address(from), extent.count, extent.datatype, to, tag, comm, r))
        });
    }

    pub(super) unsafe fn receive_extent(
        &self,
        requests: &mut Requests,
        channel: Channel,
        into: *mut c_void,
        extent: Extent,
        from: usize,
        tag: i32,
    ) {
        // SAFETY: the caller's promise.
        requests.push(unsafe {
            let (comm, from) = (self.handle(channel), from as c_int);
            request(|r| ffi::MPI_Irecv(address_mut(into), extent.count, extent.datatype, from, tag, comm, r))
        });
    }

    pub(super) unsafe fn send<T: Element>(
        &self,
        requests: &mut Requests,
        (from, count): (*const T, usize),
        to: usize,
        tag: i32,
    ) {
        let extent = self.extent::<T>(count);
        // SAFETY: the caller's promise.
        unsafe { self.send_extent(requests, Channel::Public, from.cast(), extent, to, tag) }
    }

    pub(super) unsafe fn receive<T: Element>(
        &self,
        requests: &mut Requests,
        (into, count): (*mut T, usize),
        from: usize,
        tag: i32,
    ) {
        let extent = self.extent::<T>(count);
        // SAFETY: the caller's promise.
        unsafe { self.receive_extent(requests, Channel::Public, into.cast(), extent, from, tag) }
    }

    pub(super) unsafe fn broadcast<T: Element>(
        &self,
        requests: &mut Requests,
        data: (*mut T, usize),
        root: usize,
    ) {
        let extent = self.extent::<T>(data.1);
        let comm = self.public.as_raw();
        // SAFETY: the caller's promise.
        requests.push(unsafe {
            request(|r| {
                ffi::MPI_Ibcast(address_mut(data.0), extent.count, extent.datatype, root as c_int, comm, r)
            })
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
        requests.push(unsafe {
            request(|r| ffi::MPI_Iallgather(address(from), n, t, address_mut(into), n, t, comm, r))
        });
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
        requests.push(unsafe {
            request(|r| ffi::MPI_Ialltoall(address(from), n, t, address_mut(into), n, t, comm, r))
        });
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
pub(super) unsafe fn request(start: impl FnOnce(*mut ffi::MPI_Request) -> c_int) -> ffi::MPI_Request {
    let mut handle = MaybeUninit::uninit();
    start(handle.as_mut_ptr());
    // SAFETY: the caller's promise.
    unsafe { handle.assume_init() }
}
