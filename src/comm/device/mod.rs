//! Messages of device buffers: the one place where `comm` and `device` meet.
//!
//! If MPI knows of devices ([`Transfers::Aware`]), it is given the device's memory: a buffer settles, that is, what the device has still to
//! do with it comes to its end, then the operation is posted, then the device goes on with it. Sums are formed by a kernel.
//!
//! Otherwise it goes through the host ([`Mirror`]): its values are copied there, piece by piece, while the device goes on; as the pieces come,
//! messages and plans have them, and what came of those goes back.
//!
//! The processor's memory is a message as it is, and its operations are those of any host buffer.
//!
//! Invariants: operations are posted in the order in which they were started, whichever buffer is ready first, for that is the order
//! that all ranks share; and while a rank waits for others, the engine posts what of its own gets ready and moves on what is posted, for they
//! may be waiting for that.

mod action;
mod mirror;
mod settlement;

use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;

use self::action::Action;
use self::mirror::Mirror;
use self::settlement::Settlement;
use super::engine::{self, Entry};
use super::ongoing::{self, Ongoing};
use super::{Algorithm, Choice, Communicator, Front, Operation, Pending, Transfers};
use crate::Result;
use crate::device::{Portable, Settling};
use crate::trace::Span;

/// A communicator for the buffers of a device. They travel in the format that they are kept in, which is the same on all ranks.
pub struct DeviceCommunicator {
    communicator: Rc<Communicator>,
}

/// An operation under way on a buffer of a device.
///
/// Dropped before [`Transfer::wait`], it leaks its buffer, so only the path of a fatal error does it.
#[must_use = "an operation that is not waited for never ends"]
pub struct Transfer<B: Portable> {
    /// What of the buffer has new values afterwards.
    arrives: Range<usize>,
    state: State<B>,
}

enum State<B: Portable> {
    /// On the processor's memory.
    OnHost(Pending<Front<B::Message>>),
    /// On a device's, shared with the engine.
    OnDevice(Rc<Shared<B>>),
}

/// An operation on a device's buffer, with the buffer.
struct Shared<B: Portable>(RefCell<Stage<B>>);

enum Stage<B: Portable> {
    Departing(Posting<B>),
    Settled(Ongoing<Settlement<B::Settled>>),
    Staged(Ongoing<Mirror<B::Staged>>),
    /// It goes from one of the others to the next, or has been waited for.
    Gone,
}

/// An operation with all that it takes to post it.
struct Posting<B: Portable> {
    communicator: Rc<Communicator>,
    order: ongoing::Order,
    /// How much of the buffer travels, and the bytes of a value.
    size: (usize, usize),
    way: Way<B>,
}

/// How the buffer gets to where MPI may touch it.
enum Way<B: Portable> {
    Settling(B::Settling),
    Staged(Mirror<B::Staged>),
}

impl<B: Portable> Way<B> {
    fn is_complete(&mut self) -> bool {
        match self {
            Way::Settling(settling) => settling.is_complete(),
            Way::Staged(mirror) => mirror.is_ready(),
        }
    }
}

impl<B: Portable> Posting<B> {
    /// Posts it; its buffer is there.
    fn post(self) -> Stage<B> {
        let Posting { communicator, order, size: (len, value_bytes), way } = self;
        match way {
            Way::Settling(settling) => {
                let arena = Settlement::new(settling.wait(), value_bytes, order.room().0);
                Stage::Settled(Ongoing::start(&communicator, order, arena, len, value_bytes))
            }
            Way::Staged(mirror) => {
                Stage::Staged(Ongoing::start(&communicator, order, mirror, len, value_bytes))
            }
        }
    }
}

impl<B: Portable> Entry for Shared<B> {
    fn post(&self, may: bool) -> bool {
        let mut stage = self.0.borrow_mut();
        match std::mem::replace(&mut *stage, Stage::Gone) {
            Stage::Departing(mut posting) => {
                let is_ready = may && posting.way.is_complete();
                *stage = if is_ready { posting.post() } else { Stage::Departing(posting) };
                is_ready
            }
            posted => {
                *stage = posted;
                true
            }
        }
    }

    fn advance(&self) -> bool {
        match &mut *self.0.borrow_mut() {
            Stage::Departing(_) => false,
            Stage::Settled(ongoing) => ongoing.advance(),
            Stage::Staged(ongoing) => ongoing.advance(),
            Stage::Gone => true,
        }
    }
}

impl<B: Portable> Shared<B> {
    fn is_done(&self) -> bool {
        match &*self.0.borrow() {
            Stage::Departing(_) => false,
            Stage::Settled(ongoing) => ongoing.is_done(),
            Stage::Staged(ongoing) => ongoing.is_done(),
            Stage::Gone => true,
        }
    }

    /// Begins the span in which it is waited for, once it is posted.
    fn waiting(&self) -> Option<Span> {
        match &*self.0.borrow() {
            Stage::Settled(ongoing) => Some(ongoing.waiting()),
            Stage::Staged(ongoing) => Some(ongoing.waiting()),
            Stage::Departing(_) | Stage::Gone => None,
        }
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

    /// How buffers of a device travel. Not collective.
    pub fn transfers(&self) -> Transfers {
        self.communicator.transfers()
    }

    /// Starts sending the first `len` values to rank `to`. Not collective.
    ///
    /// # Errors
    /// `to` or `tag` is out of range, or there is no memory for the message.
    pub fn start_send<B: Portable>(&self, buffer: B, len: usize, to: usize, tag: i32) -> Result<Transfer<B>> {
        self.start(buffer, Action::Send { to, tag }, len, (0..len, 0..0))
    }

    /// Starts receiving the first `len` values from rank `from`. Not collective.
    ///
    /// # Errors
    /// `from` or `tag` is out of range, or there is no memory for the message.
    pub fn start_receive<B: Portable>(
        &self,
        buffer: B,
        len: usize,
        from: usize,
        tag: i32,
    ) -> Result<Transfer<B>> {
        self.start(buffer, Action::Receive { from, tag }, len, (0..0, 0..len))
    }

    /// Starts copying the values of the root to every rank. Collective; lengths agree.
    ///
    /// # Errors
    /// `root` is out of range, or there is no memory for the message.
    pub fn start_broadcast<B: Portable>(&self, buffer: B, root: usize) -> Result<Transfer<B>> {
        let len = buffer.len();
        let ranges = if self.rank() == root { (0..len, 0..0) } else { (0..0, 0..len) };
        self.start(buffer, Action::Broadcast { root }, len, ranges)
    }

    /// Starts combining the first `len` values over all ranks:
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
        self.start(buffer, Action::AllReduce(operation), len, (0..len, 0..len))
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
        self.start(buffer, Action::ReduceScatter(operation), len, (0..len, self.part(len)))
    }

    /// Starts collecting part r of the first `len` values of every rank r on every rank:
    /// [`Communicator::start_all_gather_in_place`]. Collective; lengths agree.
    ///
    /// # Errors
    /// `len` is no multiple of the number of ranks, or there is no memory for the message.
    pub fn start_all_gather_in_place<B: Portable>(&self, buffer: B, len: usize) -> Result<Transfer<B>> {
        self.start(buffer, Action::AllGather, len, (self.part(len), 0..len))
    }

    /// This rank's part of `len` values.
    fn part(&self, len: usize) -> Range<usize> {
        let part = len / self.size();
        self.rank() * part..(self.rank() + 1) * part
    }

    /// Starts `action` on the first `len` values of `buffer`, of which some depart and some arrive.
    fn start<B: Portable>(
        &self,
        buffer: B,
        action: Action,
        len: usize,
        (departs, arrives): (Range<usize>, Range<usize>),
    ) -> Result<Transfer<B>> {
        assert!(len <= buffer.len(), "{len} values of a buffer of {}", buffer.len());
        action.check(&self.communicator, len)?;
        let buffer = match buffer.into_message() {
            Ok(message) => {
                let pending = action.start(&self.communicator, Front { buffer: message, len })?;
                return Ok(Transfer { arrives, state: State::OnHost(pending) });
            }
            Err(buffer) => buffer,
        };
        let (transfers, value_bytes) = (self.transfers(), buffer.value_bytes());
        let order = action.order(&self.communicator, transfers, len, value_bytes);
        let (size, ranges) = ((len, value_bytes), (departs, arrives.clone()));
        let way = match transfers {
            Transfers::Aware => Way::Settling(buffer.settle(order.room().1)?),
            Transfers::Staged => {
                let staged = buffer.stage(order.cut(len).chunks())?;
                Way::Staged(Mirror::new(&self.communicator, staged, &order, size, ranges)?)
            }
        };
        let posting = Posting { communicator: Rc::clone(&self.communicator), order, size, way };
        let shared = Rc::new(Shared(RefCell::new(Stage::Departing(posting))));
        engine::enter(Rc::clone(&shared) as Rc<dyn Entry>);
        engine::post();
        Ok(Transfer { arrives, state: State::OnDevice(shared) })
    }
}

impl<B: Portable> Transfer<B> {
    /// Moves the operation on, and everything else that was started; true when [`Transfer::wait`] will return at once. Not collective.
    pub fn test(&mut self) -> bool {
        match &mut self.state {
            State::OnHost(pending) => pending.test(),
            State::OnDevice(shared) => {
                if !shared.is_done() {
                    engine::advance();
                }
                shared.is_done()
            }
        }
    }

    /// True once it is known to be done. Not collective.
    pub fn is_done(&self) -> bool {
        match &self.state {
            State::OnHost(pending) => pending.is_done(),
            State::OnDevice(shared) => shared.is_done(),
        }
    }

    /// Waits for the end of the operation and gives the buffer back; as [`Pending::wait`].
    pub fn wait(self) -> B {
        let shared = match self.state {
            State::OnHost(pending) => return B::from_message(pending.wait().buffer),
            State::OnDevice(shared) => shared,
        };
        // from when it is posted on
        let mut span = shared.waiting();
        engine::wait_until(|| {
            span = span.take().or_else(|| shared.waiting());
            shared.is_done()
        });
        drop(span);
        match shared.0.replace(Stage::Gone) {
            Stage::Settled(ongoing) => B::resume(ongoing.end().0.into_settled(), self.arrives),
            Stage::Staged(ongoing) => {
                let (mirror, raw) = ongoing.end();
                B::unstage(mirror.into_staged(&raw), self.arrives)
            }
            Stage::Departing(_) | Stage::Gone => {
                unreachable!("what is done was posted, and is waited for once")
            }
        }
    }
}
