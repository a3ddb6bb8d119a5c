//! Collective operations in place, on host memory, by plans of our own: sums are formed here, in an order that does not depend on
//! MPI as long as all terms are numbers, and sums of long buffers chunk by chunk, which stay in the caches and need no memory that
//! grows with them.
#![allow(unsafe_code)]

use std::cell::RefCell;
use std::ffi::c_int;
use std::mem::ManuallyDrop;
use std::rc::Rc;

use mpi::ffi;
use mpi::traits::AsRaw;

use super::algorithm::{Algorithm, Collective, Plan, plan};
use super::blocking::in_place;
use super::choice::{self, Choice};
use super::engine::{self, Entry};
use super::host::{Host, Kind};
use super::ongoing::{Layout, Ongoing, Order};
use super::pending::{Under, Unfinished, target};
use super::progress::Progress;
use super::raw::{Raw, address_mut, request};
use super::waiting::Requests;
use super::{Communicator, Element, Operation, Pending};
use crate::Result;
use crate::memory::{HostBuffer, Memory};

impl Communicator {
    /// Lays `collective` out on `len` elements at `values`, whose combination is to be at `sums`.
    ///
    /// # Safety
    /// The elements are valid, and nobody else's, until the operation is done; those at `sums` as far as the plan combines them.
    unsafe fn lay_out<T: Element>(
        &self,
        collective: Collective,
        choice: Choice,
        (values, sums, len): (*mut T, *mut T, usize),
        operation: Operation,
    ) -> Result<(Layout, Host)> {
        let layout = Layout::new(self, collective, choice, len, size_of::<T>());
        let (element, room) = (const { &Kind::of::<T>() }, layout.room());
        // SAFETY: the caller's promise.
        let host = unsafe { Host::new(&self.raw, (values.cast(), sums.cast()), element, operation, room)? };
        Ok((layout, host))
    }

    /// Runs what is laid out to its end.
    fn run(&self, (layout, host): (Layout, Host)) {
        let mut progress = Progress::start(&self.raw, layout.plan, layout.cut, host);
        engine::wait_until(|| progress.advance(&self.raw));
        progress.into_arena(&self.raw).retire(&self.raw);
    }

    /// Runs `collective` on `values` to its end.
    pub(super) fn perform<T: Element>(
        &self,
        collective: Collective,
        choice: Choice,
        values: &mut [T],
        operation: Operation,
    ) -> Result<()> {
        let (place, len) = (values.as_mut_ptr(), values.len());
        // SAFETY: the values are borrowed until the operation is done.
        self.run(unsafe { self.lay_out(collective, choice, (place, place, len), operation)? });
        Ok(())
    }

    /// Runs a reduce-scatter of `send` to its end, with this rank's part in `receive`.
    pub(super) fn perform_apart<T: Element>(
        &self,
        choice: Choice,
        send: &[T],
        receive: &mut [T],
        operation: Operation,
    ) -> Result<()> {
        let start = self.rank() * receive.len();
        if choice.algorithm != Algorithm::Pairwise {
            // parts on their way are combined with others' too
            let mut values = send.to_vec();
            self.perform(Collective::ReduceScatter, choice, &mut values, operation)?;
            receive.copy_from_slice(&values[start..][..receive.len()]);
            return Ok(());
        }
        receive.copy_from_slice(&send[start..][..receive.len()]);
        let places = (send.as_ptr().cast_mut(), receive.as_mut_ptr().wrapping_sub(start), send.len());
        // SAFETY: both are borrowed until the operation is done; the pairwise exchange writes nothing into what it sends, and combines
        // this rank's own part only.
        self.run(unsafe { self.lay_out(Collective::ReduceScatter, choice, places, operation)? });
        Ok(())
    }

    fn start_in_place<T: Element, B: HostBuffer<T>>(
        &self,
        collective: Collective,
        choice: Choice,
        mut values: B,
        operation: Operation,
    ) -> Result<Pending<B>> {
        let (place, len) = target(&mut values);
        if choice.algorithm != Algorithm::Mpi {
            // SAFETY: the pending operation owns the buffer, whose elements stay in place.
            let (layout, host) = unsafe { self.lay_out(collective, choice, (place, place, len), operation)? };
            let ongoing = Ongoing::start(self, Order::Plan(layout), host, len, size_of::<T>());
            return Ok(self.pending(values, Under::Plan(Shared::enter(ongoing))));
        }
        let flight = self.collective_flight::<T>(collective.name(), len);
        if collective == Collective::ReduceScatter {
            // SAFETY: as above.
            let unfinished = unsafe { ReduceScatter::start(&self.raw, (place, len), operation)? };
            return Ok(self.pending(values, Under::Other(flight, Box::new(unfinished))));
        }
        Ok(self.start(flight, values, |raw, requests, _| {
            // SAFETY: as above.
            unsafe { raw.in_place(requests, collective, (place, len), operation) }
        }))
    }
}

thread_local! {
    /// Room for plans, used again and again. Never dropped, like those that did not come to their end.
    static ROOM: ManuallyDrop<RefCell<Vec<Rc<Shared>>>> = const { ManuallyDrop::new(RefCell::new(Vec::new())) };
}

/// A plan on host memory that the engine moves on.
#[derive(Default)]
pub(super) struct Shared(RefCell<Option<Ongoing<Host>>>);

impl Entry for Shared {
    fn advance(&self) -> bool {
        self.0.borrow_mut().as_mut().is_none_or(Ongoing::advance)
    }
}

impl Shared {
    /// Hands `ongoing` to the engine.
    fn enter(ongoing: Ongoing<Host>) -> Rc<Shared> {
        let shared = ROOM.with(|room| room.borrow_mut().pop()).unwrap_or_default();
        shared.0.replace(Some(ongoing));
        engine::enter(Rc::clone(&shared) as Rc<dyn Entry>);
        shared
    }

    pub(super) fn is_done(&self) -> bool {
        self.0.borrow().as_ref().is_none_or(Ongoing::is_done)
    }

    /// Moves everything on; true when this is done.
    pub(super) fn test(&self) -> bool {
        if !self.is_done() {
            engine::advance();
        }
        self.is_done()
    }

    /// Returns when it is done, and the memory is the caller's again.
    pub(super) fn wait(self: Rc<Self>) {
        let span = self.0.borrow().as_ref().map(Ongoing::waiting);
        if !self.is_done() {
            engine::wait_until(|| self.is_done());
        }
        drop(span);
        if let Some(ongoing) = self.0.take() {
            let (host, raw) = ongoing.end();
            host.retire(&raw);
        }
        ROOM.with(|room| room.borrow_mut().push(self));
    }
}

/// Each of these must be started in the same order by every rank.
impl Communicator {
    /// Starts an all-reduce in place: afterwards `values` holds the combination over all ranks, the same bits on each and in every run. Up to
    /// 64 ranks it is added up in rank order, to what [`Communicator::start_reduce_scatter`] gives: short buffers go to everyone at
    /// once ([`Algorithm::Direct`]), long ones part by part ([`Algorithm::Pairwise`]). More ranks go by [`Algorithm::Doubling`] and
    /// [`Algorithm::Halving`], whose orders are fixed too. Collective.
    ///
    /// # Errors
    /// There is no memory for what arrives.
    pub fn start_all_reduce_in_place<T: Element, B: HostBuffer<T>>(
        &self,
        values: B,
        operation: Operation,
    ) -> Result<Pending<B>> {
        let choice = choice::started_all_reduce(size_of_val(values.as_ref()), self.size());
        let choice = self.raw.override_choice(Collective::AllReduce, choice);
        self.start_in_place(Collective::AllReduce, choice, values, operation)
    }

    /// Starts a reduce-scatter in place: afterwards part `rank` of `values` holds the combination of that part over all
    /// ranks, added up in rank order, hence the same bits whatever MPI does, as long as all terms are numbers; the other parts are as they were. Collective.
    ///
    /// The algorithm is the pairwise exchange: every part travels once, straight to its owner, in one round that needs no
    /// attention from the sender, so it overlaps with computation better than a ring, and it took 1.0 ms for 16 MiB on two
    /// ranks where `MPI_Ireduce_scatter_block` of Open MPI 4.1.4 took 9.7 ms.
    ///
    /// # Errors
    /// The length is no multiple of the number of ranks, or there is no memory for what arrives.
    pub fn start_reduce_scatter<T: Element, B: HostBuffer<T>>(
        &self,
        values: B,
        operation: Operation,
    ) -> Result<Pending<B>> {
        let part = self.part_length("reduce-scattering", values.as_ref().len())?;
        let choice = self.raw.override_reduce_scatter(part, choice::started());
        self.start_in_place(Collective::ReduceScatter, choice, values, operation)
    }

    /// Starts an all-gather in place: part r of `values` on every rank becomes what it is on rank r. Collective.
    ///
    /// # Errors
    /// The length is no multiple of the number of ranks.
    pub fn start_all_gather_in_place<T: Element, B: HostBuffer<T>>(&self, values: B) -> Result<Pending<B>> {
        self.part_length("all-gathering", values.as_ref().len())?;
        let choice = self.raw.override_choice(Collective::AllGather, choice::started());
        self.start_in_place(Collective::AllGather, choice, values, Operation::Sum)
    }
}

impl Raw {
    /// Starts MPI's own operation on `values`.
    ///
    /// # Safety
    /// As for all of [`Raw`]'s non-blocking operations.
    pub(super) unsafe fn in_place<T: Element>(
        &self,
        requests: &mut Requests,
        collective: Collective,
        (values, len): (*mut T, usize),
        operation: Operation,
    ) {
        let (element, comm) = (T::equivalent_datatype().as_raw(), self.public.as_raw());
        let (mpi_operation, into) = (operation.to_mpi(), address_mut(values));
        let op = mpi_operation.as_raw();
        let part = len / self.size;
        // SAFETY: the caller's promise.
        unsafe {
            match collective {
                Collective::AllReduce => {
                    for (at, n) in self.pieces(len) {
                        let into = address_mut(values.wrapping_add(at));
                        requests.push(request(|r| {
                            ffi::MPI_Iallreduce(in_place(), into, n, element, op, comm, r)
                        }));
                    }
                }
                Collective::ReduceScatter => unreachable!("see `ReduceScatter`"),
                Collective::AllGather => {
                    let extent = self.extent::<T>(part);
                    let (n, t) = (extent.count, extent.datatype);
                    requests.push(request(|r| ffi::MPI_Iallgather(in_place(), n, t, into, n, t, comm, r)));
                }
                Collective::Broadcast { root } => self.broadcast(requests, (values, len), root),
            }
        }
    }

    /// The plan of this rank, made once.
    pub(super) fn plan(&self, collective: Collective, algorithm: Algorithm) -> Rc<Plan> {
        let mut plans = self.plans.borrow_mut();
        let make = || Rc::new(self.with_ranks(|ranks| plan(collective, algorithm, ranks)));
        Rc::clone(plans.entry((collective, algorithm)).or_insert_with(make))
    }
}

/// MPI's own reduce-scatter, which would put the part where the buffer begins, with the part copied to its place.
struct ReduceScatter<T> {
    requests: Requests,
    sums: Memory<u64>,
    own: *mut T,
    len: usize,
}

impl<T: Element> ReduceScatter<T> {
    /// # Safety
    /// As for all of [`Raw`]'s non-blocking operations, until the operation is done.
    unsafe fn start(
        raw: &Raw,
        (values, len): (*mut T, usize),
        operation: Operation,
    ) -> Result<ReduceScatter<T>> {
        let part = len / raw.size;
        let mut sums = raw.take_scratch(part * size_of::<T>())?;
        let (element, operation, comm) =
            (T::equivalent_datatype().as_raw(), operation.to_mpi(), raw.public.as_raw());
        let (from, into) = (address_mut(values), address_mut(sums.as_mut_ptr()));
        let mut requests = raw.take_requests();
        // SAFETY: the caller's promise; the sums are memory of their own.
        requests.push(unsafe {
            request(|r| {
                ffi::MPI_Ireduce_scatter_block(
                    from,
                    into,
                    part as c_int,
                    element,
                    operation.as_raw(),
                    comm,
                    r,
                )
            })
        });
        Ok(ReduceScatter { requests, sums, own: values.wrapping_add(raw.rank * part), len: part })
    }
}

impl<T: Element> Unfinished for ReduceScatter<T> {
    fn requests(&mut self) -> &mut Requests {
        &mut self.requests
    }

    fn finish(mut self: Box<Self>, raw: &Raw) {
        // SAFETY: the operation is done, and what waited for it gives the buffer back only afterwards.
        let own = unsafe { std::slice::from_raw_parts_mut(self.own, self.len) };
        own.copy_from_slice(&bytemuck::cast_slice(&self.sums)[..self.len]);
        self.requests.clear();
        raw.recycle_requests(self.requests);
        raw.recycle(self.sums);
    }
}
