//! Messages of device buffers: the one file where `comm` and `device` meet.
//!
//! The way of a buffer: it departs for the host ([`Portable::depart`]) while the device goes on; when it is there, the
//! operation is posted as for any host buffer; when that is done, what was received arrives on the device again. The
//! processor's memory takes the same way in one step.
//!
//! Invariant: the collective operations of a communicator are posted in the order in which they were started, whichever buffer is
//! ready first, for that is the order that all ranks share.

use std::cell::Cell;
use std::ops::Range;
use std::rc::Rc;

use super::{Communicator, Front, Operation, Pending};
use crate::Result;
use crate::device::{Departure, Portable};

/// A communicator for the buffers of a device.
pub struct DeviceCommunicator {
    shared: Rc<Shared>,
}

struct Shared {
    communicator: Communicator,
    /// How many collective operations have been started, and how many of them posted.
    started: Cell<u64>,
    posted: Cell<u64>,
}

/// What is to be done with a message.
#[derive(Clone, Copy)]
enum Action {
    Send { to: usize, tag: i32 },
    Receive { from: usize, tag: i32 },
    Broadcast { root: usize },
    AllReduce(Operation),
    AllReduceInPlace(Operation),
    ReduceScatter(Operation),
    AllGather,
}

/// An operation under way on a buffer of a device.
///
/// Dropped before [`Transfer::wait`], it leaves the other ranks waiting, so only the path of a fatal error does it.
#[must_use = "an operation that is not waited for never ends"]
pub struct Transfer<B: Portable> {
    shared: Rc<Shared>,
    action: Action,
    /// The number of a collective operation.
    number: Option<u64>,
    /// How much of the buffer travels, and what of it has new values afterwards.
    len: usize,
    arrives: Range<usize>,
    scratch: Option<B::Message>,
    /// Always one of them.
    departure: Option<B::Departure>,
    flying: Option<(B::Rest, Flying<B::Message>)>,
}

enum Flying<M> {
    InPlace(Pending<Front<M>>),
    Into(Pending<(Front<M>, Front<M>)>),
}

impl DeviceCommunicator {
    /// The ranks of `communicator`, which should be used for nothing else. Not collective.
    pub fn new(communicator: Communicator) -> DeviceCommunicator {
        DeviceCommunicator { shared: Rc::new(Shared { communicator, started: Cell::new(0), posted: Cell::new(0) }) }
    }

    /// This process's number in the group. Not collective.
    pub fn rank(&self) -> usize {
        self.shared.communicator.rank()
    }

    /// The number of ranks in the group. Not collective.
    pub fn size(&self) -> usize {
        self.shared.communicator.size()
    }

    /// True on rank 0. Not collective.
    pub fn is_root(&self) -> bool {
        self.rank() == 0
    }

    /// Starts sending the first `len` values to rank `to`. Not collective.
    ///
    /// # Errors
    /// `to` or `tag` is out of range, or there is no memory for the message.
    pub fn start_send<B: Portable>(&self, buffer: B, len: usize, to: usize, tag: i32) -> Result<Transfer<B>> {
        self.start(buffer, Action::Send { to, tag }, len, (0..len, 0..0), None)
    }

    /// Starts receiving the first `len` values from rank `from`. Not collective.
    ///
    /// # Errors
    /// `from` or `tag` is out of range, or there is no memory for the message.
    pub fn start_receive<B: Portable>(&self, buffer: B, len: usize, from: usize, tag: i32) -> Result<Transfer<B>> {
        self.start(buffer, Action::Receive { from, tag }, len, (0..0, 0..len), None)
    }

    /// Starts copying the values of the root to every rank. Collective; lengths agree.
    ///
    /// # Errors
    /// `root` is out of range, or there is no memory for the message.
    pub fn start_broadcast<B: Portable>(&self, buffer: B, root: usize) -> Result<Transfer<B>> {
        let len = buffer.len();
        let ranges = if self.rank() == root { (0..len, 0..0) } else { (0..0, 0..len) };
        self.start(buffer, Action::Broadcast { root }, len, ranges, None)
    }

    /// Starts combining the values over all ranks, by MPI's all-reduce; `scratch`, as long as the buffer, receives the
    /// combination, and other memory comes back in its place ([`Transfer::wait_with_scratch`]). Collective; lengths agree.
    ///
    /// # Errors
    /// There is no memory for the message.
    pub fn start_all_reduce<B: Portable>(
        &self,
        buffer: B,
        scratch: B::Message,
        operation: Operation,
    ) -> Result<Transfer<B>> {
        let len = buffer.len();
        self.start(buffer, Action::AllReduce(operation), len, (0..len, 0..len), Some(scratch))
    }

    /// Starts combining the first `len` values over all ranks, in rank order:
    /// [`Communicator::start_all_reduce_in_place`]. Collective; lengths agree.
    ///
    /// # Errors
    /// There is no memory for what arrives.
    pub fn start_all_reduce_in_place<B: Portable>(
        &self,
        buffer: B,
        len: usize,
        operation: Operation,
    ) -> Result<Transfer<B>> {
        self.start(buffer, Action::AllReduceInPlace(operation), len, (0..len, 0..len), None)
    }

    /// Starts combining part `rank` of the first `len` values over all ranks, in rank order:
    /// [`Communicator::start_reduce_scatter`]. Collective; lengths agree.
    ///
    /// # Errors
    /// `len` is no multiple of the number of ranks, or there is no memory for what arrives.
    pub fn start_reduce_scatter<B: Portable>(
        &self,
        buffer: B,
        len: usize,
        operation: Operation,
    ) -> Result<Transfer<B>> {
        self.start(buffer, Action::ReduceScatter(operation), len, (0..len, self.part(len)), None)
    }

    /// Starts collecting part r of the first `len` values of every rank r on every rank:
    /// [`Communicator::start_all_gather_in_place`]. Collective; lengths agree.
    ///
    /// # Errors
    /// `len` is no multiple of the number of ranks, or there is no memory for the message.
    pub fn start_all_gather_in_place<B: Portable>(&self, buffer: B, len: usize) -> Result<Transfer<B>> {
        self.start(buffer, Action::AllGather, len, (self.part(len), 0..len), None)
    }

    /// This rank's part of `len` values.
    fn part(&self, len: usize) -> Range<usize> {
        let part = len / self.size();
        self.rank() * part..(self.rank() + 1) * part
    }

    fn start<B: Portable>(
        &self,
        buffer: B,
        action: Action,
        len: usize,
        (departs, arrives): (Range<usize>, Range<usize>),
        scratch: Option<B::Message>,
    ) -> Result<Transfer<B>> {
        let is_collective = !matches!(action, Action::Send { .. } | Action::Receive { .. });
        let number = is_collective.then(|| self.shared.started.replace(self.shared.started.get() + 1));
        let departure = Some(buffer.depart(departs)?);
        let shared = Rc::clone(&self.shared);
        let mut transfer = Transfer { shared, action, number, len, arrives, scratch, departure, flying: None };
        transfer.post_if_ready()?;
        Ok(transfer)
    }
}

impl<B: Portable> Transfer<B> {
    /// Moves the operation on; true when [`Transfer::wait`] will return at once. Not collective.
    ///
    /// # Errors
    /// There is no memory for what arrives.
    pub fn test(&mut self) -> Result<bool> {
        self.post_if_ready()?;
        Ok(match &mut self.flying {
            None => false,
            Some((_, Flying::InPlace(pending))) => pending.test(),
            Some((_, Flying::Into(pending))) => pending.test(),
        })
    }

    /// True once [`Transfer::test`] has been. Not collective.
    pub fn is_done(&self) -> bool {
        match &self.flying {
            None => false,
            Some((_, Flying::InPlace(pending))) => pending.is_done(),
            Some((_, Flying::Into(pending))) => pending.is_done(),
        }
    }

    /// Waits for the end of the operation and gives the buffer back. Not collective in itself, but it returns only when the
    /// other ranks have done their part.
    ///
    /// # Errors
    /// There is no memory for what arrives.
    ///
    /// # Panics
    /// A collective operation of the same communicator that was started earlier has not been waited for.
    pub fn wait(self) -> Result<B> {
        self.wait_with_scratch().map(|(buffer, _)| buffer)
    }

    /// The same for [`DeviceCommunicator::start_all_reduce`], with memory for the next one.
    ///
    /// # Errors
    /// As [`Transfer::wait`].
    ///
    /// # Panics
    /// As [`Transfer::wait`].
    pub fn wait_with_scratch(mut self) -> Result<(B, Option<B::Message>)> {
        if self.flying.is_none() {
            assert!(self.is_next(), "collective operations are waited for in the order in which they were started");
            self.post()?;
        }
        let (rest, flying) = self.flying.take().expect("an operation that has been posted is under way");
        let (message, scratch) = match flying {
            Flying::InPlace(pending) => (pending.wait().buffer, None),
            Flying::Into(pending) => {
                let (sent, received) = pending.wait();
                (received.buffer, Some(sent.buffer))
            }
        };
        Ok((B::arrive(rest, message, self.arrives), scratch))
    }

    /// True if no collective operation that was started earlier waits to be posted.
    fn is_next(&self) -> bool {
        self.number.is_none_or(|number| number == self.shared.posted.get())
    }

    fn post_if_ready(&mut self) -> Result<()> {
        let is_next = self.is_next();
        let is_ready = self.departure.as_mut().is_some_and(|departure| is_next && departure.is_complete());
        if is_ready { self.post() } else { Ok(()) }
    }

    fn post(&mut self) -> Result<()> {
        let departure = self.departure.take().expect("an operation is posted once");
        let (buffer, rest) = departure.wait();
        if self.number.is_some() {
            self.shared.posted.set(self.shared.posted.get() + 1);
        }
        let communicator = &self.shared.communicator;
        let front = Front { buffer, len: self.len };
        let in_place = match self.action {
            Action::Send { to, tag } => communicator.start_send(front, to, tag),
            Action::Receive { from, tag } => communicator.start_receive(front, from, tag),
            Action::Broadcast { root } => communicator.start_broadcast(front, root),
            Action::AllReduceInPlace(operation) => communicator.start_all_reduce_in_place(front, operation),
            Action::ReduceScatter(operation) => communicator.start_reduce_scatter(front, operation),
            Action::AllGather => communicator.start_all_gather_in_place(front),
            Action::AllReduce(operation) => {
                let buffer = self.scratch.take().expect("an all-reduce comes with memory for its result");
                let sum = Front { buffer, len: self.len };
                let pending = communicator.start_all_reduce(front, sum, operation)?;
                self.flying = Some((rest, Flying::Into(pending)));
                return Ok(());
            }
        };
        self.flying = Some((rest, Flying::InPlace(in_place?)));
        Ok(())
    }
}
