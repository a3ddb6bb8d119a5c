//! One operation in the engine's queue.
#![allow(unsafe_code)]

use std::cell::{Cell, RefCell};
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::rc::Rc;

use super::peers::PeerOperation;
use super::request::{Request, Task};
use super::rounds::{Ground, Rounds};
use crate::Result;
use crate::comm::algorithm::{Collective, common};
use crate::comm::group::Group;
use crate::comm::mpi::{Requests, Values};
use crate::memory::{Buffer, ElementType, Loan, Memory, scratch};
use crate::trace::{Flight, Span};

thread_local! {
    /// Entries that are kept for reuse. Like the queue of the engine, they are never dropped.
    static UNUSED: ManuallyDrop<RefCell<Vec<Rc<Entry>>>> =
        const { ManuallyDrop::new(RefCell::new(Vec::new())) };
}

/// An operation that its [`Pending`](crate::comm::Pending) shares with the engine.
#[derive(Default)]
pub(in crate::comm) struct Entry {
    operation: RefCell<Option<EntryWork>>,
    is_done: Cell<bool>,
}

// entries are kept for reuse, so that operations on host memory allocate nothing
#[allow(clippy::large_enum_variant)]
enum EntryWork {
    /// Messages, and sums of what arrives.
    Messages(Underway),
    /// Work on device memory that the ranks of a node map.
    Peers(PeerOperation),
}

/// An operation with everything that is needed to post and complete it.
struct Underway {
    group: Rc<Group>,
    request: Request,
    loan: Loan,
    len: usize,
    element: ElementType,
    /// The name in traces.
    link: i64,
    first_tag: usize,
    /// The destination of MPI's own reduce-scatter, which in place would write the part to the
    /// start of the buffer.
    sums: Option<Memory<u64>>,
    state: EntryState,
}

enum EntryState {
    /// The values are not where MPI can read them yet.
    Unposted,
    /// A message, or MPI's own operation.
    Requests(Flight, Requests),
    Rounds(Flight, Rounds),
}

impl Entry {
    /// Makes an entry of `request` on `buffer`, which the caller keeps until the operation is done.
    /// Collective if the operation is, because all ranks give it the same name in traces.
    ///
    /// # Errors
    /// There is no memory for values that arrive.
    ///
    /// # Safety
    /// The buffer is neither dropped nor touched until the operation is done, and is leaked if
    /// nobody waits for the operation.
    pub(in crate::comm) unsafe fn new<B: Buffer>(
        group: &Rc<Group>,
        request: Request,
        buffer: &mut B,
        is_cuda_aware: bool,
    ) -> Result<Rc<Entry>> {
        if let Task::Peers { .. } | Task::PeerCopy { .. } = request.task {
            // SAFETY: the caller keeps the buffer until the operation is done.
            let operation = unsafe { PeerOperation::new(group, request, buffer, is_cuda_aware)? };
            return Ok(Entry::of(EntryWork::Peers(operation)));
        }
        let (len, element) = (buffer.len(), buffer.element_type());
        let cut = request.cut(len);
        // SAFETY: the caller keeps the buffer until the operation is done; ranks and lengths were
        // checked, and the cut is of this buffer.
        let mut loan = unsafe { buffer.lend(&request.needs(len, is_cuda_aware))? };
        for chunk in 0..cut.chunks() {
            let ranges = cut.all_pieces(chunk).map(|piece| common(&piece, &request.send_range));
            loan.arena().fetch(chunk, &mut { ranges });
        }
        let first_tag = match request.task {
            Task::Rounds { .. } => group.take_tags(cut.chunks()),
            _ => 0,
        };
        let sums = match request.task {
            Task::Mpi(Collective::ReduceScatter) => {
                Some(scratch::take(request.receive_range.len() * element.bytes())?)
            }
            _ => None,
        };
        let (link, group, state) = (request.link(group), Rc::clone(group), EntryState::Unposted);
        let operation = Underway { group, request, loan, len, element, link, first_tag, sums, state };
        Ok(Entry::of(EntryWork::Messages(operation)))
    }

    fn of(operation: EntryWork) -> Rc<Entry> {
        let entry = UNUSED.with(|unused| unused.borrow_mut().pop()).unwrap_or_default();
        entry.operation.replace(Some(operation));
        entry.is_done.set(false);
        entry
    }

    /// Posts the operation if its values are where MPI can read them; returns true once it is
    /// posted.
    pub(super) fn post(&self) -> bool {
        let mut operation = self.operation.borrow_mut();
        match operation.as_mut() {
            None => true,
            Some(EntryWork::Peers(operation)) => operation.post(),
            Some(EntryWork::Messages(operation)) => {
                if matches!(operation.state, EntryState::Unposted) && operation.loan.arena().is_here(0) {
                    operation.post();
                }
                !matches!(operation.state, EntryState::Unposted)
            }
        }
    }

    /// Advances the operation if it is posted; returns true when it is done.
    pub(super) fn advance(&self) -> bool {
        if !self.is_done() {
            self.is_done.set(match self.operation.borrow_mut().as_mut() {
                None => true,
                Some(EntryWork::Messages(operation)) => operation.advance(),
                Some(EntryWork::Peers(operation)) => operation.advance(),
            });
        }
        self.is_done()
    }

    /// Returns true once the operation is known to be done.
    pub(in crate::comm) fn is_done(&self) -> bool {
        self.is_done.get()
    }

    /// Begins the span in which the operation is waited for, once it is posted.
    pub(in crate::comm) fn waiting(&self) -> Option<Span> {
        match self.operation.borrow().as_ref()? {
            EntryWork::Peers(operation) => operation.waiting(),
            EntryWork::Messages(operation) => match &operation.state {
                EntryState::Unposted => None,
                EntryState::Requests(flight, _) | EntryState::Rounds(flight, _) => Some(flight.posting()),
            },
        }
    }

    /// Ends the loan of an operation that is done, and returns the elements that it has changed.
    pub(in crate::comm) fn end(self: Rc<Self>) -> Range<usize> {
        let changed = match self.operation.take() {
            None => 0..0,
            Some(EntryWork::Messages(operation)) => operation.request.receive_range,
            Some(EntryWork::Peers(operation)) => operation.request.receive_range,
        };
        UNUSED.with(|unused| unused.borrow_mut().push(self));
        changed
    }
}

impl Underway {
    fn post(&mut self) {
        let flight = self.request.flight(&self.group, self.link, self.len * self.element.bytes());
        let span = flight.posting();
        self.state = if let Task::Rounds { plan, cut, .. } = &self.request.task {
            let (plan, cut, first_tag) = (Rc::clone(plan), *cut, self.first_tag);
            EntryState::Rounds(flight, Rounds::start(plan, cut, first_tag, &mut self.ground()))
        } else {
            let values = Values::new(self.loan.arena().values(), self.len, self.element);
            let own = self.request.receive_range.len();
            let sums = self
                .sums
                .as_mut()
                .map_or(values, |sums| Values::new(sums.as_mut_ptr().cast(), own, self.element));
            // SAFETY: the loan and the sums are kept until the operation is done, and nobody else
            // touches them.
            EntryState::Requests(flight, unsafe { self.request.post(&self.group.mpi, values, sums) })
        };
        drop(span);
    }

    fn advance(&mut self) -> bool {
        let is_done = match &mut self.state {
            EntryState::Unposted => false,
            EntryState::Requests(_, requests) => {
                let is_done = if let Task::Receive { .. } = self.request.task {
                    let arrived = requests.test_receive(self.element);
                    if let Some(len) = arrived {
                        // the message may be shorter than the buffer, whose other values stay
                        self.request.receive_range = 0..len;
                    }
                    arrived.is_some()
                } else {
                    requests.test()
                };
                if is_done {
                    self.deliver();
                }
                is_done
            }
            EntryState::Rounds(_, rounds) => {
                let receive_range = self.request.receive_range.clone();
                let (mpi, arena) = (&self.group.mpi, self.loan.arena());
                rounds.advance(&mut Ground { mpi, arena, element: self.element, receive_range })
            }
        };
        if let (true, EntryState::Requests(flight, _) | EntryState::Rounds(flight, _)) =
            (is_done, &mut self.state)
        {
            flight.end();
        }
        is_done
    }

    /// Brings the values that a message, or MPI's own operation, has changed back to the buffer.
    fn deliver(&mut self) {
        let changed = self.request.receive_range.clone();
        if let Some(sums) = self.sums.take() {
            let into = self.loan.arena().values().wrapping_add(changed.start * self.element.bytes());
            // SAFETY: the arena holds the values in `changed`, the sums are as many in memory of
            // their own, and MPI is done with both.
            unsafe {
                into.copy_from_nonoverlapping(sums.as_ptr().cast(), changed.len() * self.element.bytes());
            }
            scratch::give_back(sums);
        }
        self.loan.arena().deliver(&mut std::iter::once(changed));
    }

    fn ground(&mut self) -> Ground<'_> {
        let receive_range = self.request.receive_range.clone();
        Ground { mpi: &self.group.mpi, arena: self.loan.arena(), element: self.element, receive_range }
    }
}
