//! Messages of device buffers: the one file where `comm` and `device` meet.
//!
//! The way of a buffer: it departs for the host ([`Portable::depart`]) while the device goes on; when it is there, the
//! operation is posted as for any host buffer; when that is done, what was received arrives on the device again. The
//! processor's memory takes the same way in one step.
//!
//! Invariants: operations are posted in the order in which they were started, whichever buffer is ready first, for that is the order
//! that all ranks share; and while a rank waits for others, what of its own is still departing is posted as it gets ready, for they
//! may be waiting for that.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::ops::Range;
use std::rc::Rc;

use super::{Communicator, Front, Operation, Pending};
use crate::Result;
use crate::device::{Departure, Portable};

/// A communicator for the buffers of a device.
pub struct DeviceCommunicator {
    communicator: Rc<Communicator>,
}

thread_local! {
    /// Operations whose buffers are on their way to the host, of all communicators of this rank.
    static DEPARTING: RefCell<VecDeque<Rc<dyn Departing>>> = RefCell::default();
}

/// An operation that is to be posted when its buffer is there.
trait Departing {
    fn is_ready(&self) -> bool;

    /// Posts it; its buffer is there.
    fn post(&self);
}

/// Posts what is ready, up to the first that is not.
fn post_departed() {
    let next = || {
        DEPARTING.with_borrow_mut(|departing| {
            let is_ready = departing.front().is_some_and(|first| first.is_ready());
            if is_ready { departing.pop_front() } else { None }
        })
    };
    while let Some(operation) = next() {
        operation.post();
    }
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
    /// What of the buffer has new values afterwards.
    arrives: Range<usize>,
    state: State<B>,
}

enum State<B: Portable> {
    Flying(B::Rest, Flying<B::Message>),
    /// Shared with the queue of what is to be posted.
    Departing(Rc<Queued<B>>),
}

/// What is left of the buffer, and the operation.
type Posted<B> = (<B as Portable>::Rest, Flying<<B as Portable>::Message>);

enum Flying<M> {
    InPlace(Pending<Front<M>>),
    Into(Pending<(Front<M>, Front<M>)>),
}

/// An operation with all that it takes to post it.
struct Order<B: Portable> {
    communicator: Rc<Communicator>,
    action: Action,
    /// How much of the buffer travels.
    len: usize,
    departure: B::Departure,
    scratch: Option<B::Message>,
}

/// An order, until it is posted; then what came of it, until that is fetched.
struct Queued<B: Portable> {
    order: RefCell<Option<Order<B>>>,
    posted: RefCell<Option<Result<Posted<B>>>>,
}

impl<B: Portable> Departing for Queued<B> {
    fn is_ready(&self) -> bool {
        self.order.borrow_mut().as_mut().is_some_and(|order| order.departure.is_complete())
    }

    fn post(&self) {
        let order = self.order.take().expect("an operation is posted once");
        self.posted.replace(Some(order.post()));
    }
}

impl<B: Portable> Order<B> {
    fn post(self) -> Result<Posted<B>> {
        let Order { communicator, action, len, departure, scratch } = self;
        let (buffer, rest) = departure.wait();
        let front = Front { buffer, len };
        let pending = match action {
            Action::Send { to, tag } => communicator.start_send(front, to, tag),
            Action::Receive { from, tag } => communicator.start_receive(front, from, tag),
            Action::Broadcast { root } => communicator.start_broadcast(front, root),
            Action::AllReduceInPlace(operation) => communicator.start_all_reduce_in_place(front, operation),
            Action::ReduceScatter(operation) => communicator.start_reduce_scatter(front, operation),
            Action::AllGather => communicator.start_all_gather_in_place(front),
            Action::AllReduce(operation) => {
                let buffer = scratch.expect("an all-reduce comes with memory for its result");
                let pending = communicator.start_all_reduce(front, Front { buffer, len }, operation)?;
                return Ok((rest, Flying::Into(pending)));
            }
        };
        Ok((rest, Flying::InPlace(pending?)))
    }
}

impl DeviceCommunicator {
    /// The ranks of `communicator`, which should be used for nothing else. Not collective.
    pub fn new(communicator: Communicator) -> DeviceCommunicator {
        DeviceCommunicator { communicator: Rc::new(communicator) }
    }

    /// This process's number in the group. Not collective.
    pub fn rank(&self) -> usize {
        self.communicator.rank()
    }

    /// The number of ranks in the group. Not collective.
    pub fn size(&self) -> usize {
        self.communicator.size()
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
        let communicator = Rc::clone(&self.communicator);
        let mut order: Order<B> = Order { communicator, action, len, departure: buffer.depart(departs)?, scratch };
        let is_first = DEPARTING.with_borrow(VecDeque::is_empty);
        if is_first && order.departure.is_complete() {
            let (rest, flying) = order.post()?;
            return Ok(Transfer { arrives, state: State::Flying(rest, flying) });
        }
        let queued = Rc::new(Queued { order: RefCell::new(Some(order)), posted: RefCell::default() });
        DEPARTING.with_borrow_mut(|departing| departing.push_back(Rc::clone(&queued) as Rc<dyn Departing>));
        Ok(Transfer { arrives, state: State::Departing(queued) })
    }
}

impl<B: Portable> Transfer<B> {
    /// Moves the operation on; true when [`Transfer::wait`] will return at once. Not collective.
    ///
    /// # Errors
    /// There is no memory for what arrives.
    pub fn test(&mut self) -> Result<bool> {
        post_departed();
        if let State::Departing(queued) = &self.state
            && let Some(posted) = queued.posted.take()
        {
            let (rest, flying) = posted?;
            self.state = State::Flying(rest, flying);
        }
        Ok(match &mut self.state {
            State::Departing(_) => false,
            State::Flying(_, Flying::InPlace(pending)) => pending.test(),
            State::Flying(_, Flying::Into(pending)) => pending.test(),
        })
    }

    /// True once [`Transfer::test`] has been. Not collective.
    pub fn is_done(&self) -> bool {
        match &self.state {
            State::Departing(_) => false,
            State::Flying(_, Flying::InPlace(pending)) => pending.is_done(),
            State::Flying(_, Flying::Into(pending)) => pending.is_done(),
        }
    }

    /// Waits for the end of the operation and gives the buffer back. Not collective in itself, but it returns only when the
    /// other ranks have done their part.
    ///
    /// # Errors
    /// There is no memory for what arrives.
    pub fn wait(self) -> Result<B> {
        self.wait_with_scratch().map(|(buffer, _)| buffer)
    }

    /// The same for [`DeviceCommunicator::start_all_reduce`], with memory for the next one.
    ///
    /// # Errors
    /// As [`Transfer::wait`].
    pub fn wait_with_scratch(mut self) -> Result<(B, Option<B::Message>)> {
        // others may be waiting for what is still departing
        while !self.test()? && DEPARTING.with_borrow(|departing| !departing.is_empty()) {
            std::thread::yield_now();
        }
        let State::Flying(rest, flying) = self.state else {
            unreachable!("what is not departing has been posted");
        };
        let (message, scratch) = match flying {
            Flying::InPlace(pending) => (pending.wait().buffer, None),
            Flying::Into(pending) => {
                let (sent, received) = pending.wait();
                (received.buffer, Some(sent.buffer))
            }
        };
        Ok((B::arrive(rest, message, self.arrives), scratch))
    }
}
