//! Operations under way: started now, finished later, with the caller's work in between.
//!
//! A [`Pending`] owns the buffers that MPI reads and writes until [`Pending::wait`] gives them back, so nothing can
//! touch them too early and nothing can free them too soon. MPI moves data only inside MPI calls: a program that
//! computes for long calls [`Pending::test`] now and then, as the backward pass does between layers.
#![allow(unsafe_code)]

use std::mem;
use std::rc::Rc;

use super::engine::{self, wait_all};
use super::in_place::Shared;
use super::raw::Raw;
use super::waiting::{Requests, test_all};
use super::{Communicator, Element, Operation};
use crate::Result;
use crate::memory::HostBuffer;
use crate::trace::{Flight, Name};

/// The first elements of a buffer, to be sent or received without the rest.
pub struct Front<B> {
    /// The whole buffer.
    pub buffer: B,
    /// How many of its elements.
    pub len: usize,
}

impl<T, B: AsRef<[T]>> AsRef<[T]> for Front<B> {
    fn as_ref(&self) -> &[T] {
        &self.buffer.as_ref()[..self.len]
    }
}

impl<T, B: AsMut<[T]>> AsMut<[T]> for Front<B> {
    fn as_mut(&mut self) -> &mut [T] {
        &mut self.buffer.as_mut()[..self.len]
    }
}

// SAFETY: the elements are where the buffer's are, and stay there.
unsafe impl<T, B: HostBuffer<T>> HostBuffer<T> for Front<B> {}

/// An operation under way on the buffers `B`.
///
/// Dropped before [`Pending::wait`], it leaks its buffers, for MPI may still write there; that is sound and wasteful, so only the path
/// of a fatal error does it.
#[must_use = "an operation that is not waited for never ends"]
pub struct Pending<B> {
    raw: Rc<Raw>,
    buffers: Option<B>,
    under: Option<Under>,
    done: bool,
}

/// What is under way.
pub(super) enum Under {
    /// Operations of MPI's.
    Requests(Flight, Requests),
    /// A plan on host memory, which the engine moves on.
    Plan(Rc<Shared>),
    /// An operation of MPI's, after which something is left to do.
    Other(Flight, Box<dyn Unfinished>),
}

/// Operations of MPI's that are not all.
pub(super) trait Unfinished {
    fn requests(&mut self) -> &mut Requests;

    /// Does the rest, and gives back what was used.
    fn finish(self: Box<Self>, raw: &Raw);
}

impl<B> Pending<B> {
    /// Lets MPI, and whatever else was started, make progress; true when [`Pending::wait`] will return at once. Not collective.
    pub fn test(&mut self) -> bool {
        if self.done {
            return true;
        }
        let (flight, requests) = match &mut self.under {
            Some(Under::Requests(flight, requests)) => (flight, requests),
            Some(Under::Other(flight, other)) => (flight, other.requests()),
            Some(Under::Plan(plan)) => {
                self.done = plan.test();
                return self.done;
            }
            None => return false,
        };
        self.done = test_all(requests);
        if self.done {
            flight.end();
        } else {
            engine::advance();
        }
        self.done
    }

    /// True once it is known to be done: MPI need not be asked again. Not collective.
    pub fn is_done(&self) -> bool {
        self.done || matches!(&self.under, Some(Under::Plan(plan)) if plan.is_done())
    }

    /// Waits for the end of the operation and gives the buffers back, and moves on meanwhile whatever else was started. Not collective in itself,
    /// but it returns only when the other ranks have done their part: of what has several rounds (all-reduces and gathers in place,
    /// reduce-scatters) they test or wait for something that was started too.
    pub fn wait(mut self) -> B {
        let raw = &self.raw;
        match self.under.take() {
            Some(Under::Requests(mut flight, mut requests)) => {
                flight.wait(|| wait_all(&mut requests));
                requests.clear();
                raw.recycle_requests(requests);
            }
            Some(Under::Other(mut flight, mut other)) => {
                flight.wait(|| wait_all(other.requests()));
                other.finish(raw);
            }
            Some(Under::Plan(plan)) => plan.wait(),
            None => {}
        }
        self.buffers.take().expect("`wait` consumes the only value that holds the buffers")
    }
}

impl<B> Drop for Pending<B> {
    fn drop(&mut self) {
        mem::forget(self.buffers.take());
        mem::forget(self.under.take());
    }
}

/// `(pointer, number of elements)` of something to send.
pub(super) fn source<T>(buffer: &impl AsRef<[T]>) -> (*const T, usize) {
    let values = buffer.as_ref();
    (values.as_ptr(), values.len())
}

/// `(pointer, number of elements)` of something to receive into.
pub(super) fn target<T>(buffer: &mut impl AsMut<[T]>) -> (*mut T, usize) {
    let values = buffer.as_mut();
    (values.as_mut_ptr(), values.len())
}

/// Non-blocking operations (MPI-4.1 §3.7 and §6.12). Each `start_*` checks what the blocking form checks, and the
/// collective ones must be started in the same order by every rank.
impl Communicator {
    pub(super) fn start<B>(
        &self,
        flight: Flight,
        mut buffers: B,
        post: impl FnOnce(&Raw, &mut Requests, &mut B),
    ) -> Pending<B> {
        let mut requests = self.raw.take_requests();
        let span = flight.posting();
        post(&self.raw, &mut requests, &mut buffers);
        drop(span);
        self.pending(buffers, Under::Requests(flight, requests))
    }

    /// What has begun on `buffers`.
    pub(super) fn pending<B>(&self, buffers: B, under: Under) -> Pending<B> {
        Pending { raw: Rc::clone(&self.raw), buffers: Some(buffers), under: Some(under), done: false }
    }

    /// The next collective operation, of `len` elements on this rank, in flight.
    pub(super) fn collective_flight<T>(&self, name: Name, len: usize) -> Flight {
        Flight::start(name, len * size_of::<T>(), self.raw.links.collective(), None)
    }

    /// Starts sending `values` to rank `to` (`MPI_Isend`). Not collective.
    ///
    /// # Errors
    /// `to` or `tag` is out of range.
    pub fn start_send<T: Element, B: HostBuffer<T>>(
        &self,
        values: B,
        to: usize,
        tag: i32,
    ) -> Result<Pending<B>> {
        self.check_peer("sending", to, tag)?;
        let link = self.raw.links.message(self.rank(), to, tag);
        let flight = Flight::start(Name::Send, size_of_val(values.as_ref()), link, self.raw.in_job(to));
        Ok(self.start(flight, values, |raw, requests, values| {
            // SAFETY: the pending operation owns the buffer, whose elements stay in place.
            unsafe { raw.send(requests, source(values), to, tag) }
        }))
    }

    /// Starts receiving from rank `from` (`MPI_Irecv`): at most as many elements as `values` holds; a longer message
    /// ends the job with MPI's own error. Not collective.
    ///
    /// # Errors
    /// `from` or `tag` is out of range.
    pub fn start_receive<T: Element, B: HostBuffer<T>>(
        &self,
        values: B,
        from: usize,
        tag: i32,
    ) -> Result<Pending<B>> {
        self.check_peer("receiving", from, tag)?;
        let link = self.raw.links.message(from, self.rank(), tag);
        let flight = Flight::start(Name::Receive, size_of_val(values.as_ref()), link, self.raw.in_job(from));
        Ok(self.start(flight, values, |raw, requests, values| {
            // SAFETY: as in `start_send`.
            unsafe { raw.receive(requests, target(values), from, tag) }
        }))
    }

    /// Starts a barrier: the wait ends when every rank has started it (`MPI_Ibarrier`). Collective.
    pub fn start_barrier(&self) -> Pending<()> {
        self.start(self.collective_flight::<u8>(Name::Barrier, 0), (), |raw, requests, ()| {
            raw.barrier_request(requests)
        })
    }

    /// Starts copying `values` of the root to every rank (`MPI_Ibcast`). Collective; lengths agree.
    ///
    /// # Errors
    /// `root` is out of range.
    pub fn start_broadcast<T: Element, B: HostBuffer<T>>(
        &self,
        values: B,
        root: usize,
    ) -> Result<Pending<B>> {
        self.check_root("broadcasting", root)?;
        let flight = self.collective_flight::<T>(Name::Broadcast, values.as_ref().len());
        Ok(self.start(flight, values, |raw, requests, values| {
            // SAFETY: as in `start_send`.
            unsafe { raw.broadcast(requests, target(values), root) }
        }))
    }

    /// Starts handing part r of the root's `send` to rank r's `receive` (`MPI_Iscatter`). Collective; on other ranks
    /// `send` is not looked at.
    ///
    /// # Errors
    /// `root` is out of range, or at the root `send` does not hold a part for each rank.
    pub fn start_scatter<T: Element, B: HostBuffer<T>>(
        &self,
        send: B,
        receive: B,
        root: usize,
    ) -> Result<Pending<(B, B)>> {
        self.check_root("scattering", root)?;
        if self.rank() == root {
            self.check_parts("scattering", send.as_ref().len(), receive.as_ref().len())?;
        }
        let flight = self.collective_flight::<T>(Name::Scatter, receive.as_ref().len());
        Ok(self.start(flight, (send, receive), |raw, requests, (send, receive)| {
            // SAFETY: as in `start_send`; the lengths were checked.
            unsafe { raw.scatter(requests, source(send).0, target(receive), root) }
        }))
    }

    /// Starts collecting every rank's `send` in the root's `receive` (`MPI_Igather`). Collective; on other ranks
    /// `receive` is not looked at.
    ///
    /// # Errors
    /// `root` is out of range, or at the root `receive` does not hold a part for each rank.
    pub fn start_gather<T: Element, B: HostBuffer<T>>(
        &self,
        send: B,
        receive: B,
        root: usize,
    ) -> Result<Pending<(B, B)>> {
        self.check_root("gathering", root)?;
        if self.rank() == root {
            self.check_parts("gathering", receive.as_ref().len(), send.as_ref().len())?;
        }
        let flight = self.collective_flight::<T>(Name::Gather, send.as_ref().len());
        Ok(self.start(flight, (send, receive), |raw, requests, (send, receive)| {
            // SAFETY: as in `start_send`; the lengths were checked.
            unsafe { raw.gather(requests, source(send), target(receive).0, root) }
        }))
    }

    /// Starts collecting every rank's `send`, in rank order, in every rank's `receive` (`MPI_Iallgather`). Collective.
    ///
    /// # Errors
    /// `receive` does not hold a part for each rank.
    pub fn start_all_gather<T: Element, B: HostBuffer<T>>(
        &self,
        send: B,
        receive: B,
    ) -> Result<Pending<(B, B)>> {
        self.check_parts("all-gathering", receive.as_ref().len(), send.as_ref().len())?;
        let flight = self.collective_flight::<T>(Name::AllGather, receive.as_ref().len());
        Ok(self.start(flight, (send, receive), |raw, requests, (send, receive)| {
            // SAFETY: as in `start_send`; the lengths were checked.
            unsafe { raw.all_gather(requests, source(send), target(receive).0) }
        }))
    }

    /// Starts sending part s of `send` to rank s, whose part r of `receive` it becomes (`MPI_Ialltoall`). Collective.
    ///
    /// # Errors
    /// The two lengths differ, or are no multiple of the number of ranks.
    pub fn start_all_to_all<T: Element, B: HostBuffer<T>>(
        &self,
        send: B,
        receive: B,
    ) -> Result<Pending<(B, B)>> {
        let count = self.check_all_to_all(send.as_ref().len(), receive.as_ref().len())?;
        let flight = self.collective_flight::<T>(Name::AllToAll, send.as_ref().len());
        Ok(self.start(flight, (send, receive), |raw, requests, (send, receive)| {
            // SAFETY: as in `start_send`; the lengths were checked.
            unsafe { raw.all_to_all(requests, (source(send).0, count), target(receive).0) }
        }))
    }

    /// Starts combining every rank's `send` in the root's `receive` (`MPI_Ireduce`). Collective; on other ranks
    /// `receive` is not looked at.
    ///
    /// # Errors
    /// `root` is out of range, or at the root the lengths differ.
    pub fn start_reduce<T: Element, B: HostBuffer<T>>(
        &self,
        send: B,
        receive: B,
        operation: Operation,
        root: usize,
    ) -> Result<Pending<(B, B)>> {
        self.check_root("reducing", root)?;
        if self.rank() == root {
            self.check_equal("reducing", send.as_ref().len(), receive.as_ref().len())?;
        }
        let flight = self.collective_flight::<T>(Name::Reduce, send.as_ref().len());
        Ok(self.start(flight, (send, receive), |raw, requests, (send, receive)| {
            // SAFETY: as in `start_send`; the lengths were checked.
            unsafe { raw.reduce(requests, source(send), target(receive).0, operation, root) }
        }))
    }

    /// Starts combining every rank's `send` in every rank's `receive` (`MPI_Iallreduce`). Collective.
    ///
    /// # Errors
    /// The lengths differ.
    pub fn start_all_reduce<T: Element, B: HostBuffer<T>>(
        &self,
        send: B,
        receive: B,
        operation: Operation,
    ) -> Result<Pending<(B, B)>> {
        self.check_equal("all-reducing", send.as_ref().len(), receive.as_ref().len())?;
        let flight = self.collective_flight::<T>(Name::AllReduce, send.as_ref().len());
        Ok(self.start(flight, (send, receive), |raw, requests, (send, receive)| {
            // SAFETY: as in `start_send`; the lengths were checked.
            unsafe { raw.all_reduce(requests, source(send), target(receive).0, operation) }
        }))
    }
}
