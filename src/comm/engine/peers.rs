//! An operation on device memory that the ranks of a node map: the messages around the leaders' work.
//!
//! Every rank sends the handle of its buffer's memory to each leader of a device, once its values may be
//! read. A leader that has all handles starts its work, and tells every rank when that is complete. A rank's
//! buffer is its own again when all leaders have said so. Messages of the operation have its own tag on the
//! communicator's private twin, and arrive in the order in which a rank sends them.
#![allow(unsafe_code)]

use std::rc::Rc;

use super::request::{Request, Task};
use crate::Result;
use crate::comm::algorithm::peer_work;
use crate::comm::group::Group;
use crate::comm::mpi::{Channel, Requests, Values};
use crate::memory::{Buffer, MemoryHandle, PeerBuffer, PeerWork};
use crate::trace::{Flight, Span};

/// An operation with everything that is needed to post and complete it.
pub(super) struct PeerOperation {
    group: Rc<Group>,
    pub(super) request: Request,
    buffer: Box<dyn PeerBuffer>,
    bytes: usize,
    /// The name in traces.
    link: i64,
    tag: i32,
    leaders: Vec<usize>,
    work: Vec<PeerWork>,
    /// The handles of all ranks' memory, as far as they have arrived.
    handles: Box<[MemoryHandle]>,
    /// The messages with other ranks' handles.
    arriving: Requests,
    /// This rank's handle on its way to leaders, and the messages at the ends of their work.
    ends: Requests,
    /// `None` until the operation is posted.
    flight: Option<Flight>,
    state: PeerState,
}

#[derive(Clone, Copy)]
enum PeerState {
    /// The values may not be read yet.
    Unposted,
    /// A leader waits for handles.
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
        let (len, bytes, rank) = (buffer.len(), buffer.len() * buffer.element_type().bytes(), group.mpi.rank);
        let (work, leaders) = (peer_work(*collective, len, leaders, rank), leaders.clone());
        // SAFETY: the caller keeps the buffer until the operation is done.
        let buffer = unsafe { buffer.lend_to_peers(request.operation)? };
        let tag = Group::tag(group.take_tags(1));
        let handles = vec![[0; 64]; group.mpi.size].into();
        let (link, arriving, ends) = (request.link(group), group.mpi.requests(), group.mpi.requests());
        Ok(PeerOperation {
            group: Rc::clone(group),
            request,
            buffer,
            bytes,
            link,
            tag,
            leaders,
            work,
            handles,
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
            self.send_handle();
        }
        !matches!(self.state, PeerState::Unposted)
    }

    fn send_handle(&mut self) {
        let flight = self.request.flight(&self.group, self.link, self.bytes);
        let span = flight.posting();
        let mpi = &self.group.mpi;
        let (own, tag) = (mpi.rank, self.tag);
        self.handles[own] = self.buffer.handle();
        for rank in self.others() {
            if self.leads(own) {
                let into = Values::of_mut(&mut self.handles[rank]);
                // SAFETY: the operation keeps the handles until the requests are complete, or leaks them, and
                // does not read them before.
                unsafe { mpi.receive(&mut self.arriving, Channel::Private, into, rank, tag) };
            }
            if self.leads(rank) {
                let (handle, nothing) = (Values::of(&self.handles[own]), Values::of_mut::<u8>(&mut []));
                // SAFETY: as above; the other message is empty.
                unsafe {
                    mpi.send(&mut self.ends, Channel::Private, handle, rank, tag);
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
            self.buffer.start(self.group.mpi.rank, &self.handles, &self.work);
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

    /// Begins the span in which the operation is waited for, once it is posted.
    pub(super) fn waiting(&self) -> Option<Span> {
        self.flight.as_ref().map(Flight::posting)
    }
}
