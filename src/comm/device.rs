//! Messages of device buffers: the one file where `comm` and `device` meet.
//!
//! If MPI knows of devices ([`Transfers::Aware`]), it is given the device's memory: a buffer settles, that is, what the device has still to
//! do with it comes to its end, then the operation is posted, then the device goes on with it. Sums are formed by a kernel.
//!
//! Otherwise it goes through the host. The way of a buffer: it departs for the host ([`Portable::depart`]) while the device goes on; when it is there, the
//! operation is posted as for any host buffer; when that is done, what was received arrives on the device again. The
//! processor's memory takes the same way in one step.
//!
//! Invariants: operations are posted in the order in which they were started, whichever buffer is ready first, for that is the order
//! that all ranks share; and while a rank waits for others, what of its own is still departing is posted as it gets ready, for they
//! may be waiting for that.

use std::cell::RefCell;
use std::ffi::c_void;
use std::ops::Range;
use std::rc::Rc;

use super::action::Action;
use super::departing::{self, Departing};
use super::direct::{self, Direct};
use super::extent::Extent;
use super::progress::{Arena, Terms};
use super::raw::Raw;
use super::{Algorithm, Choice, Communicator, Front, Operation, Pending, Transfers};
use crate::device::{Addition, Departure, Portable, Settled};
use crate::{Error, Result};

/// A communicator for the buffers of a device.
pub struct DeviceCommunicator {
    communicator: Rc<Communicator>,
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

#[expect(clippy::large_enum_variant, reason = "a box would be an allocation in every step")]
enum State<B: Portable> {
    Flying(Flying<B>),
    /// Shared with the queue of what is to be posted.
    Departing(Rc<Queued<B>>),
}

/// What is sent, and what is received into.
type Pair<M> = (Front<M>, Front<M>);

/// The operation, and what is left of the buffer.
enum Flying<B: Portable> {
    InPlace(B::Rest, Pending<Front<B::Message>>),
    Into(B::Rest, Pending<Pair<B::Message>>),
    /// With the scratch memory that it came with.
    Direct(Direct<Settlement<B::Settled>>, Option<B::Message>),
}

/// Memory of a device for plans.
struct Settlement<S> {
    settled: S,
    value_bytes: usize,
    /// The values of one lane's inbox.
    room: usize,
}

// SAFETY: the pointers are those of the settled buffer, which stays where it is and is as long as the operation, which `start` checks; the
// inbox was made to hold what the layout says.
#[allow(unsafe_code)]
unsafe impl<S: Settled> Arena for Settlement<S> {
    fn extent(&self, raw: &Raw, count: usize) -> Extent {
        // MPI has no type for bfloat16, and need not look at it
        if self.value_bytes == size_of::<u16>() { raw.extent::<u16>(count) } else { raw.extent::<f32>(count) }
    }

    fn value(&self, at: usize) -> *mut c_void {
        self.settled.values().wrapping_add(at * self.value_bytes).cast()
    }

    fn inbox(&self, lane: usize, at: usize) -> *mut c_void {
        self.settled.inbox().wrapping_add((lane * self.room + at) * self.value_bytes).cast()
    }

    fn combine(&mut self, lane: usize, terms: &Terms) {
        let Terms { range, count, stride, own } = terms.clone();
        self.settled.add(lane, &Addition { into: range, first: lane * self.room, terms: count, stride, own });
    }

    fn is_combined(&mut self, lane: usize) -> bool {
        self.settled.is_added(lane)
    }
}

/// An operation with all that it takes to post it.
struct Order<B: Portable> {
    communicator: Rc<Communicator>,
    action: Action,
    /// How much of the buffer travels.
    len: usize,
    way: Way<B>,
    scratch: Option<B::Message>,
}

/// How the buffer gets to where MPI may touch it.
enum Way<B: Portable> {
    Departing(B::Departure),
    Settling { settling: B::Settling, order: direct::Order, value_bytes: usize, room: usize },
}

impl<B: Portable> Way<B> {
    fn is_complete(&mut self) -> bool {
        match self {
            Way::Departing(departure) => departure.is_complete(),
            Way::Settling { settling, .. } => settling.is_complete(),
        }
    }
}

/// An order, until it is posted; then what came of it, until that is fetched.
struct Queued<B: Portable> {
    order: RefCell<Option<Order<B>>>,
    posted: RefCell<Option<Result<Flying<B>>>>,
}

impl<B: Portable> Departing for Queued<B> {
    fn is_ready(&self) -> bool {
        self.order.borrow_mut().as_mut().is_some_and(|order| order.way.is_complete())
    }

    fn post(&self) {
        let order = self.order.take().expect("an operation is posted once");
        self.posted.replace(Some(order.post()));
    }
}

impl<B: Portable> Order<B> {
    fn post(self) -> Result<Flying<B>> {
        let Order { communicator, action, len, way, scratch } = self;
        let (buffer, rest) = match way {
            Way::Departing(departure) => departure.wait(),
            Way::Settling { settling, order, value_bytes, room } => {
                let arena = Settlement { settled: settling.wait().0, value_bytes, room };
                let direct = Direct::start(&communicator, order, arena, len, value_bytes);
                return Ok(Flying::Direct(direct, scratch));
            }
        };
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
                return Ok(Flying::Into(rest, pending));
            }
        };
        Ok(Flying::InPlace(rest, pending?))
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

    /// As [`Communicator::set_choice`], for plans. Collective.
    pub fn set_choice(&self, choice: Option<Choice>) {
        self.communicator.set_choice(choice);
    }

    /// As [`Communicator::last_algorithm`]. Not collective.
    pub fn last_algorithm(&self) -> Algorithm {
        self.communicator.last_algorithm()
    }

    /// True on rank 0. Not collective.
    pub fn is_root(&self) -> bool {
        self.rank() == 0
    }

    /// True if MPI is given the memory of such buffers itself. Not collective.
    pub fn is_direct<B: Portable>(&self) -> bool {
        B::IS_ON_DEVICE && self.communicator.transfers() == Transfers::Aware
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

    /// Starts combining the values over all ranks, by MPI's all-reduce where they go through the host; `scratch`, as long as the buffer, receives the
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
        assert!(len <= buffer.len(), "{len} values of a buffer of {}", buffer.len());
        action.check(&self.communicator, len)?;
        let way = if self.is_direct::<B>() {
            let value_bytes = buffer.value_bytes();
            let order = action.direct(&self.communicator, len, value_bytes);
            let (room, inbox) = order.layout().map_or((0, 0), |layout| (layout.room(), layout.inbox()));
            Way::Settling { settling: buffer.settle(inbox)?, order, value_bytes, room }
        } else {
            Way::Departing(buffer.depart(departs)?)
        };
        let mut order: Order<B> = Order { communicator: Rc::clone(&self.communicator), action, len, way, scratch };
        let is_first = departing::is_empty();
        if is_first && order.way.is_complete() {
            return Ok(Transfer { arrives, state: State::Flying(order.post()?) });
        }
        let queued = Rc::new(Queued { order: RefCell::new(Some(order)), posted: RefCell::default() });
        departing::push(Rc::clone(&queued) as Rc<dyn Departing>);
        Ok(Transfer { arrives, state: State::Departing(queued) })
    }
}

impl<B: Portable> Transfer<B> {
    /// Moves the operation on; true when [`Transfer::wait`] will return at once. Not collective.
    ///
    /// # Errors
    /// There is no memory for what arrives.
    pub fn test(&mut self) -> Result<bool> {
        departing::post_ready();
        if let State::Departing(queued) = &self.state
            && let Some(posted) = queued.posted.take()
        {
            self.state = State::Flying(posted?);
        }
        Ok(match &mut self.state {
            State::Departing(_) => false,
            State::Flying(Flying::InPlace(_, pending)) => pending.test(),
            State::Flying(Flying::Into(_, pending)) => pending.test(),
            State::Flying(Flying::Direct(direct, _)) => direct.test(),
        })
    }

    /// True once [`Transfer::test`] has been. Not collective.
    pub fn is_done(&self) -> bool {
        match &self.state {
            State::Departing(_) => false,
            State::Flying(Flying::InPlace(_, pending)) => pending.is_done(),
            State::Flying(Flying::Into(_, pending)) => pending.is_done(),
            State::Flying(Flying::Direct(direct, _)) => direct.is_done(),
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
        while !self.test()? && !departing::is_empty() {
            std::thread::yield_now();
        }
        let State::Flying(flying) = self.state else {
            return Err(Error::failed("waiting for a message", "it could not be posted"));
        };
        Ok(match flying {
            Flying::InPlace(rest, pending) => (B::arrive(rest, pending.wait().buffer, self.arrives), None),
            Flying::Into(rest, pending) => {
                let (sent, received) = pending.wait();
                (B::arrive(rest, received.buffer, self.arrives), Some(sent.buffer))
            }
            Flying::Direct(direct, scratch) => (B::resume(direct.wait().settled, self.arrives), scratch),
        })
    }
}
