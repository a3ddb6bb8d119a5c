//! An operation on device memory that the ranks of a node map: the messages around the leaders' work.
//!
//! Every rank that takes part sends the handle of its buffer's memory, with the length and the type of its
//! values, to each leader of a device, once its values may be read. A leader that has all of them starts its
//! work, and tells every rank when that is complete. A rank's buffer is its own again when all leaders have
//! said so. Messages of a collective operation have its own tag on the communicator's private twin, and
//! arrive in the order in which a rank sends them.
//!
//! Across several nodes, leaders work on the memory of their node, exchange messages with those in the same
//! place on the other nodes, and work again: see `algorithm/peers.rs`.
//!
//! A message between two ranks is such an operation of two, in which the receiver leads and sends no handle.
//! The sender's handle travels as the message would, and names the tag by which the sender waits for the end
//! on the private twin.
#![allow(unsafe_code)]

use std::rc::Rc;

use smallvec::{SmallVec, smallvec};

use super::across::AcrossUnderway;
use super::request::{AcrossNodes, Request, Task};
use crate::Result;
use crate::comm::algorithm::{PeerWorks, peer_work};
use crate::comm::group::{Group, NodePeers};
use crate::comm::mpi::{Channel, Requests, Values};
use crate::memory::{Buffer, ElementType, MemoryHandle, PeerBuffer, PeerWork, PeerWorkKind};
use crate::trace::{Flight, Span};

/// A rank's message to a leader: the number of its values and of their type, the tag by which it waits for
/// the end, then the handle of its memory.
type Offer = [i64; HANDLE_WORDS + 3];

const HANDLE_WORDS: usize = size_of::<MemoryHandle>() / size_of::<i64>();

/// An operation with everything that is needed to post and complete it.
pub(super) struct PeerOperation {
    group: Rc<Group>,
    pub(super) request: Request,
    buffer: Box<dyn PeerBuffer>,
    len: usize,
    element: ElementType,
    /// The name in traces.
    link: i64,
    members: PeerMembers,
    /// The messages to other nodes, if this rank has a share of the elements.
    across: Option<AcrossUnderway>,
    channel: Channel,
    /// The tag of offers.
    tag: i32,
    /// The tag of the messages by which leaders tell this rank of the end.
    end_tag: i32,
    /// The offers of the members, as far as they have arrived.
    offers: Box<[Offer]>,
    /// The messages with other members' offers.
    arriving: Requests,
    /// This rank's offer on its way to leaders, and the messages at the ends of their work.
    ends: Requests,
    /// `None` until the operation is posted.
    flight: Option<Flight>,
    state: PeerState,
}

/// The ranks that take part in an operation, and their leaders among them.
struct PeerMembers {
    /// The rank of each member.
    ranks: SmallVec<[usize; 2]>,
    /// The member that leads each member's device.
    leaders: Rc<[usize]>,
    /// The member that this rank is.
    own: usize,
}

impl PeerMembers {
    fn leads(&self, member: usize) -> bool {
        self.leaders[member] == member
    }

    /// Returns the other members, each with its rank.
    fn others(&self) -> impl Iterator<Item = (usize, usize)> {
        self.ranks.iter().copied().enumerate().filter(|(member, _)| *member != self.own)
    }
}

#[derive(Clone, Copy)]
enum PeerState {
    /// The values may not be read yet.
    Unposted,
    /// A leader waits for offers.
    Gathering,
    /// A leader's device works.
    Working,
    /// Leaders of several nodes exchange messages.
    Across,
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
        is_cuda_aware: bool,
    ) -> Result<PeerOperation> {
        let rank = group.mpi.rank;
        let (len, element) = (buffer.len(), buffer.element_type());
        let mut across = None;
        let (members, channel, tag, end_tag) = match &request.task {
            Task::Peers { peers: NodePeers { ranks, leaders, .. }, across: over, .. } => {
                let first_tag = group.take_tags(1 + over.as_ref().map_or(0, |over| over.num_tags));
                if let Some(share) = over.as_ref().and_then(|over| over.share.as_ref())
                    && share.cut.len() > 0
                {
                    // SAFETY: the caller keeps the buffer until the operation is done, and the cut is of it.
                    let loan = unsafe { buffer.lend(&request.needs(len, is_cuda_aware))? };
                    across = Some(AcrossUnderway::new(share, first_tag + 1, loan, element));
                }
                let (leaders, own) = (Rc::clone(leaders), rank - ranks.start);
                let members = PeerMembers { ranks: ranks.clone().collect(), leaders, own };
                (members, Channel::Private, Group::tag(first_tag), Group::tag(first_tag))
            }
            Task::PeerCopy { from, to, tag } => {
                let (own, leaders) = (usize::from(*to == rank), Rc::new([1, 1]));
                let end_tag = if own == 0 { group.take_end_tag() } else { 0 };
                let members = PeerMembers { ranks: SmallVec::from([*from, *to]), leaders, own };
                (members, Channel::Public, *tag, end_tag)
            }
            _ => unreachable!("other operations are made of messages"),
        };
        let is_mapped = members.others().any(|(member, _)| members.leads(member));
        // SAFETY: the caller keeps the buffer until the operation is done.
        let buffer = unsafe { buffer.lend_to_peers(request.operation, is_mapped)? };
        let offers = vec![Offer::default(); members.ranks.len()].into();
        let (link, arriving, ends) = (request.link(group), group.mpi.requests(), group.mpi.requests());
        let (group, flight, state) = (Rc::clone(group), None, PeerState::Unposted);
        Ok(PeerOperation {
            group,
            request,
            buffer,
            len,
            element,
            link,
            members,
            across,
            channel,
            tag,
            end_tag,
            offers,
            arriving,
            ends,
            flight,
            state,
        })
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
        let (mpi, members) = (&self.group.mpi, &self.members);
        let (own, channel, tag) = (members.own, self.channel, self.tag);
        self.offers[own][..3].copy_from_slice(&[self.len as i64, self.element as i64, self.end_tag.into()]);
        self.offers[own][3..]
            .copy_from_slice(&bytemuck::cast::<_, [i64; HANDLE_WORDS]>(self.buffer.handle()));
        for (member, rank) in members.others() {
            if members.leads(own) {
                let into = Values::of_mut(&mut self.offers[member]);
                // SAFETY: the operation keeps the offers until the requests are complete, or leaks them, and
                // does not read them before.
                unsafe { mpi.receive(&mut self.arriving, channel, into, rank, tag) };
            }
            if members.leads(member) {
                let (offer, nothing) = (Values::of(&self.offers[own]), Values::of_mut::<u8>(&mut []));
                // SAFETY: as above; the other message is empty.
                unsafe {
                    mpi.send(&mut self.ends, channel, offer, rank, tag);
                    mpi.receive(&mut self.ends, Channel::Private, nothing, rank, self.end_tag);
                }
            }
        }
        self.state = if members.leads(own) { PeerState::Gathering } else { PeerState::Ending };
        drop(span);
        self.flight = Some(flight);
    }

    /// Advances the operation if it is posted; returns true when it is done.
    pub(super) fn advance(&mut self) -> bool {
        while let Some(next) = self.next_state() {
            self.state = next;
        }
        let is_done = matches!(self.state, PeerState::Ending) && self.ends.test();
        if let (true, Some(flight)) = (is_done, &mut self.flight) {
            flight.end();
        }
        is_done
    }

    /// Begins the state that follows, if what this one waits for is there, and returns it.
    fn next_state(&mut self) -> Option<PeerState> {
        let mpi = &self.group.mpi;
        match self.state {
            PeerState::Gathering => self.arriving.test().then(|| self.start_work()),
            PeerState::Across => {
                let is_there = self.across.as_mut().is_some_and(|across| across.advance(mpi));
                is_there.then(|| self.start_work())
            }
            PeerState::Working if self.buffer.is_done() => {
                if let Some(across) = self.across.as_mut().filter(|across| !across.is_done()) {
                    across.start(mpi);
                    return Some(PeerState::Across);
                }
                Some(self.send_ends())
            }
            PeerState::Unposted | PeerState::Working | PeerState::Ending => None,
        }
    }

    fn start_work(&mut self) -> PeerState {
        let (handles, work) = (self.handles(), self.work());
        if !work.is_empty() {
            self.buffer.start(self.members.own, &handles, &work);
        }
        PeerState::Working
    }

    fn send_ends(&mut self) -> PeerState {
        for (member, rank) in self.members.others() {
            let (nothing, end_tag) = (Values::of::<u8>(&[]), self.offers[member][2] as i32);
            // SAFETY: the message is empty.
            unsafe { self.group.mpi.send(&mut self.ends, Channel::Private, nothing, rank, end_tag) };
        }
        PeerState::Ending
    }

    /// Returns the work of this leader.
    fn work(&self) -> PeerWorks {
        let members = &self.members;
        let (own, leaders) = (members.own, &members.leaders);
        let mut work = match &self.request.task {
            Task::Peers { across: Some(AcrossNodes { share, .. }), .. } => {
                let has_arrived = self.across.as_ref().is_some_and(AcrossUnderway::is_done);
                let work = share.as_ref().map(|share| &share.work);
                let work = work.map(|work| if has_arrived { &work.after } else { &work.before });
                work.cloned().unwrap_or_default()
            }
            Task::Peers { collective, .. } => peer_work(*collective, self.len, leaders, own),
            _ => {
                let range = 0..self.offers[0][0] as usize;
                smallvec![PeerWork { range, kind: PeerWorkKind::Copy { from: 0, into: 1..2 } }]
            }
        };
        work.retain(|work| !work.range.is_empty());
        work
    }

    /// Returns the handles of all members' memory, after checking that they have as many values of one type,
    /// or a sender at most as many: work beyond the end of another rank's buffer would not be noticed.
    fn handles(&self) -> SmallVec<[MemoryHandle; 2]> {
        let own = &self.offers[self.members.own];
        let is_message = matches!(self.request.task, Task::PeerCopy { .. });
        let checked = |(offer, rank): (&Offer, &usize)| {
            let (theirs, ours) = (offer[0], own[0]);
            assert_eq!(offer[1], own[1], "the values of rank {rank} in an operation are of another type");
            assert!(
                theirs == ours || is_message && theirs < ours,
                "rank {rank} has {theirs} values for an operation on {ours}"
            );
            bytemuck::cast_slice(&offer[3..]).try_into().expect("the words are those of a handle")
        };
        self.offers.iter().zip(&self.members.ranks).map(checked).collect()
    }

    /// Begins the span in which the operation is waited for, once it is posted.
    pub(super) fn waiting(&self) -> Option<Span> {
        self.flight.as_ref().map(Flight::posting)
    }
}
