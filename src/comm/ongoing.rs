//! Operations that the engine moves on, on the host's memory, a device's, or a device's through the host's: messages and plans that keep
//! their [`Arena`] and give it back at the end.
#![allow(unsafe_code)]

use std::mem;
use std::rc::Rc;

use super::algorithm::{Collective, Cut, Plan};
use super::choice::Choice;
use super::progress::{Arena, Progress, num_lanes};
use super::raw::{Channel, Raw};
use super::waiting::{Requests, test_all};
use super::{Communicator, Operation};
use crate::trace::{Flight, Name, Span};

/// A collective operation that has been laid out: what there must be room for is known before there is memory.
pub(super) struct Layout {
    collective: Collective,
    pub(super) plan: Rc<Plan>,
    pub(super) cut: Cut,
}

impl Layout {
    /// Of `len` values of `bytes` each. Collective.
    pub(super) fn new(
        communicator: &Communicator,
        collective: Collective,
        choice: Choice,
        len: usize,
        bytes: usize,
    ) -> Layout {
        let plan = communicator.raw.plan(collective, choice.algorithm);
        Layout {
            collective,
            cut: Cut::new(len, plan.parts, choice.chunk / bytes, collective.is_owned()),
            plan,
        }
    }

    /// How many values arrive, at most, to be combined: of each lane, and of all.
    pub(super) fn room(&self) -> (usize, usize) {
        let room = self.plan.inbox * self.cut.largest_part();
        (room, room * num_lanes(&self.cut))
    }
}

/// What is to be done.
pub(super) enum Order {
    Send {
        to: usize,
        tag: i32,
    },
    Receive {
        from: usize,
        tag: i32,
    },
    Plan(Layout),
    /// MPI's own, of `f32`, to compare with and to try: started ones crash with some (open-mpi/ompi#12045).
    Mpi {
        collective: Collective,
        is_blocking: bool,
    },
}

impl Order {
    /// How an operation on `len` values is laid out.
    pub(super) fn cut(&self, len: usize) -> Cut {
        match self {
            Order::Plan(layout) => layout.cut,
            _ => Cut::whole(len),
        }
    }

    /// How many values arrive, at most, to be combined: of each lane, and of all.
    pub(super) fn room(&self) -> (usize, usize) {
        match self {
            Order::Plan(layout) => layout.room(),
            _ => (0, 0),
        }
    }
}

/// An operation under way. Dropped before its end it leaks its memory, for MPI may still write there.
pub(super) struct Ongoing<A: Arena> {
    raw: Rc<Raw>,
    under: Option<Under<A>>,
    flight: Flight,
    is_done: bool,
}

enum Under<A> {
    /// Without requests when it is done.
    Message(Requests, A),
    Plan(Progress<A>),
}

impl<A: Arena> Under<A> {
    fn advance(under: &mut Option<Under<A>>, raw: &Raw) -> bool {
        match under {
            Some(Under::Message(requests, _)) if requests.is_empty() => true,
            Some(Under::Message(requests, arena)) => {
                let is_done = test_all(requests);
                if is_done {
                    requests.clear();
                    arena.leave(0);
                }
                is_done
            }
            Some(Under::Plan(progress)) => progress.advance(raw),
            None => true,
        }
    }
}

impl<A: Arena> Ongoing<A> {
    /// Starts `order` on the first `len` values of `arena`, of `bytes` each; ranks were checked.
    pub(super) fn start(
        communicator: &Communicator,
        order: Order,
        mut arena: A,
        len: usize,
        bytes: usize,
    ) -> Ongoing<A> {
        let raw = Rc::clone(&communicator.raw);
        let (rank, size) = (communicator.rank(), len * bytes);
        // a plan looks itself, chunk by chunk
        assert!(matches!(order, Order::Plan(_)) || arena.is_here(0), "a message is posted when it is here");
        let (flight, under) = match order {
            Order::Send { to, tag } => {
                let flight =
                    Flight::start(Name::Send, size, raw.links.message(rank, to, tag), raw.in_job(to));
                let span = flight.posting();
                let mut requests = raw.take_requests();
                let extent = arena.extent(&raw, len);
                // SAFETY: the arena's promise; it is kept until the message is gone.
                unsafe { raw.send_extent(&mut requests, Channel::Public, arena.value(0), extent, to, tag) };
                drop(span);
                (flight, Under::Message(requests, arena))
            }
            Order::Receive { from, tag } => {
                let flight =
                    Flight::start(Name::Receive, size, raw.links.message(from, rank, tag), raw.in_job(from));
                let span = flight.posting();
                let mut requests = raw.take_requests();
                let extent = arena.extent(&raw, len);
                // SAFETY: as above.
                unsafe {
                    raw.receive_extent(&mut requests, Channel::Public, arena.value(0), extent, from, tag)
                };
                drop(span);
                (flight, Under::Message(requests, arena))
            }
            Order::Mpi { collective, is_blocking } => {
                let flight = Flight::start(collective.name(), size, raw.links.collective(), None);
                let mut requests = raw.take_requests();
                let values = (arena.value(0).cast::<f32>(), len);
                // SAFETY: the arena's promise.
                unsafe {
                    if is_blocking {
                        raw.blocking_in_place(collective, values);
                        arena.leave(0);
                    } else {
                        raw.in_place(&mut requests, collective, values, Operation::Sum);
                    }
                }
                (flight, Under::Message(requests, arena))
            }
            Order::Plan(Layout { collective, plan, cut }) => {
                let flight = Flight::start(collective.name(), size, raw.links.collective(), None);
                let span = flight.posting();
                let progress = Progress::start(&raw, plan, cut, arena);
                drop(span);
                (flight, Under::Plan(progress))
            }
        };
        Ongoing { raw, under: Some(under), flight, is_done: false }
    }

    /// Moves it on; true when it is done.
    pub(super) fn advance(&mut self) -> bool {
        self.is_done = self.is_done || Under::advance(&mut self.under, &self.raw);
        if self.is_done {
            self.flight.end();
        }
        self.is_done
    }

    pub(super) fn is_done(&self) -> bool {
        self.is_done
    }

    /// Begins the span in which it is waited for.
    pub(super) fn waiting(&self) -> Span {
        self.flight.posting()
    }

    /// Gives back the memory and whose operation it was; it is done.
    pub(super) fn end(mut self) -> (A, Rc<Raw>) {
        let raw = Rc::clone(&self.raw);
        let arena = match self.under.take().expect("`end` consumes the only value that holds it") {
            Under::Message(requests, arena) => {
                raw.recycle_requests(requests);
                arena
            }
            Under::Plan(progress) => progress.into_arena(&raw),
        };
        (arena, raw)
    }
}

impl<A: Arena> Drop for Ongoing<A> {
    fn drop(&mut self) {
        mem::forget(self.under.take());
    }
}
