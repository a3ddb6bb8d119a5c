//! An operation on device memory that the ranks of a node map: the messages around the leaders' work.
//!
//! Every rank sends the handle of its buffer's memory, with its length and the type of its values, to each
//! leader of a device, once its values may be read. A leader that has all of them starts its work, and tells
//! every rank when that is complete. A rank's buffer is its own again when all leaders have said so. Messages
//! of the operation have its own tag on the communicator's private twin, and arrive in the order in which a
//! rank sends them.
#![allow(unsafe_code)]

use std::rc::Rc;

use super::request::{Request, Task};
use crate::Result;
use crate::comm::algorithm::peer_work;
use crate::comm::group::Group;
use crate::comm::mpi::{Channel, Requests, Values};
use crate::memory::{Buffer, ElementType, MemoryHandle, PeerBuffer, PeerWork};
use crate::trace::{Flight, Span};

/// A rank's message to a leader: the number of its values and of their type, then the handle of its memory.
type Offer = [i64; HANDLE_WORDS + 2];

const HANDLE_WORDS: usize = size_of::<MemoryHandle>() / size_of::<i64>();

fn offer(handle: MemoryHandle, len: usize, element: ElementType) -> Offer {
    let mut offer = [len as i64, element as i64, 0, 0, 0, 0, 0, 0, 0, 0];
    offer[2..].copy_from_slice(&bytemuck::cast::<_, [i64; HANDLE_WORDS]>(handle));
    offer
}

/// An operation with everything that is needed to post and complete it.
pub(super) struct PeerOperation {
    group: Rc<Group>,
    pub(super) request: Request,
    buffer: Box<dyn PeerBuffer>,
    len: usize,
    element: ElementType,
    /// The name in traces.
    link: i64,
    tag: i32,
    leaders: Rc<[usize]>,
    work: Vec<PeerWork>,
    /// The offers of all ranks, as far as they have arrived.
    offers: Box<[Offer]>,
    /// The messages with other ranks' offers.
    arriving: Requests,
    /// This rank's offer on its way to leaders, and the messages at the ends of their work.
    ends: Requests,
    /// `None` until the operation is posted.
    flight: Option<Flight>,
    state: PeerState,
}

#[derive(Clone, Copy)]
enum PeerState {
    /// The values may not be read yet.
    Unposted,
    /// A leader waits for offers.
    Gathering,
    /// A leader's device works.
    Working,
    /// Other leaders work, or messages are on their way.
    Ending,
}

impl PeerOperation {
    /// Makes an operation of `request` on `buffer`, which the caller keeps until it is done. Collective.
    ///
    /// # Errors
    /// The device does not have the reduction.
    ///
    /// # Safety
    /// As for [`Entry::new`](super::Entry::new).
    pub(super) unsafe fn new<B: Buffer>(
        group: &Rc<Group>,
        request: Request,
        buffer: &mut B,
    ) -> Result<PeerOperation> {
        let Task::Peers { collective, leaders } = &request.task else {
            unreachable!("other operations are made of messages")
        };
        let (len, element) = (buffer.len(), buffer.element_type());
        let (work, leaders) = (peer_work(*collective, len, leaders, group.mpi.rank), Rc::clone(leaders));
        // SAFETY: the caller keeps the buffer until the operation is done.
        let buffer = unsafe { buffer.lend_to_peers(request.operation)? };
        let tag = Group::tag(group.take_tags(1));
        let offers = vec![Offer::default(); group.mpi.size].into();
        let (link, arriving, ends) = (request.link(group), group.mpi.requests(), group.mpi.requests());
        Ok(PeerOperation {
            group: Rc::clone(group),
            request,
            buffer,
            len,
            element,
            link,
            tag,
            leaders,
            work,
            offers,
            arriving,
            ends,
            flight: None,
            state: PeerState::Unposted,
        })
    }

    fn leads(&self, rank: usize) -> bool {
        self.leaders[rank] == rank
    }

    /// Returns the other ranks.
    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let own = self.group.mpi.rank;
        (0..self.group.mpi.size).filter(move |rank| *rank != own)
    }

    /// Posts the operation if its values may be read; returns true once it is posted.
    pub(super) fn post(&mut self) -> bool {
        if matches!(self.state, PeerState::Unposted) && self.buffer.is_computed() {
            self.send_offer();
        }
        !matches!(self.state, PeerState::Unposted)
    }

    fn send_offer(&mut self) {
        let flight = self.request.flight(&self.group, self.link, self.len * self.element.bytes());
        let span = flight.posting();
        let mpi = &self.group.mpi;
        let (own, tag) = (mpi.rank, self.tag);
        self.offers[own] = offer(self.buffer.handle(), self.len, self.element);
        for rank in self.others() {
            if self.leads(own) {
                let into = Values::of_mut(&mut self.offers[rank]);
                // SAFETY: the operation keeps the offers until the requests are complete, or leaks them, and
                // does not read them before.
                unsafe { mpi.receive(&mut self.arriving, Channel::Private, into, rank, tag) };
            }
            if self.leads(rank) {
                let (offer, nothing) = (Values::of(&self.offers[own]), Values::of_mut::<u8>(&mut []));
                // SAFETY: as above; the other message is empty.
                unsafe {
                    mpi.send(&mut self.ends, Channel::Private, offer, rank, tag);
                    mpi.receive(&mut self.ends, Channel::Private, nothing, rank, tag);
                }
            }
        }
        drop(span);
        self.flight = Some(flight);
        self.state = if self.leads(own) { PeerState::Gathering } else { PeerState::Ending };
    }

    /// Advances the operation if it is posted; returns true when it is done.
    pub(super) fn advance(&mut self) -> bool {
        if matches!(self.state, PeerState::Gathering) && self.arriving.test() {
            let handles = self.handles();
            self.buffer.start(self.group.mpi.rank, &handles, &self.work);
            self.state = PeerState::Working;
        }
        if matches!(self.state, PeerState::Working) && self.buffer.is_done() {
            for rank in self.others() {
                let nothing = Values::of::<u8>(&[]);
                // SAFETY: the message is empty.
                unsafe { self.group.mpi.send(&mut self.ends, Channel::Private, nothing, rank, self.tag) };
            }
            self.state = PeerState::Ending;
        }
        let is_done = matches!(self.state, PeerState::Ending) && self.ends.test();
        if let (true, Some(flight)) = (is_done, &mut self.flight) {
            flight.end();
        }
        is_done
    }

    /// Returns the handles of all ranks' memory, after checking that they have as many values of one type:
    /// work beyond the end of another rank's buffer would not be noticed.
    fn handles(&self) -> Vec<MemoryHandle> {
        let own = &self.offers[self.group.mpi.rank];
        let same = |(rank, other): (usize, &Offer)| {
            assert!(
                other[..2] == own[..2],
                "rank {rank} has other values than the {} of an operation",
                self.len
            );
            bytemuck::cast_slice(&other[2..]).try_into().expect("the words are those of a handle")
        };
        self.offers.iter().enumerate().map(same).collect()
    }

    /// Begins the span in which the operation is waited for, once it is posted.
    pub(super) fn waiting(&self) -> Option<Span> {
        self.flight.as_ref().map(Flight::posting)
    }
}
