//! Plans under way: the messages of their rounds, chunk after chunk, a few chunks at a time.
//!
//! The way of a chunk: its values come to where MPI may read them, if they are elsewhere; the messages of a round are posted; when all
//! are done, what came is combined, by whoever has the memory ([`Arena`]), and meanwhile other chunks' messages travel; then the next
//! round; in the end it may leave for where it came from. Its messages bear the chunk's own tag on the communicator's private twin, so
//! whatever the ranks' order in finishing chunks, they meet the right ones. A rank that waits moves all chunks under way on, so
//! the oldest of the job has what it lacks, and nobody waits for ever.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::mem;
use std::ops::Range;
use std::rc::Rc;

use super::algorithm::{Cut, Plan};
use super::extent::Extent;
use super::raw::{Channel, Raw};
use super::waiting::{Requests, test_all};

/// Chunks under way at a time: while one is combined, the messages of another travel.
const LANES: usize = 2;

/// The memory that a plan works on: a buffer, and in each lane room for what arrives.
///
/// # Safety
/// The pointers that it gives are those of memory that MPI may read and write, stays where it is, and holds all elements that the
/// plan and the cut name, until the value is dropped.
pub(super) unsafe trait Arena {
    /// `count` elements as MPI counts them.
    fn extent(&self, raw: &Raw, count: usize) -> Extent;

    /// Where element `at` of the buffer is.
    fn value(&self, at: usize) -> *mut c_void;

    /// Where element `at` of what arrives in `lane` is.
    fn inbox(&self, lane: usize, at: usize) -> *mut c_void;

    /// Starts to combine elements of the buffer with what has arrived in `lane`.
    fn combine(&mut self, lane: usize, terms: &Terms);

    /// True when that is done, and MPI may read the buffer.
    fn is_combined(&mut self, lane: usize) -> bool;

    /// True when MPI may read the values of a chunk, and write there.
    fn is_here(&mut self, _chunk: usize) -> bool {
        true
    }

    /// MPI is done with a chunk.
    fn leave(&mut self, _chunk: usize) {}
}

/// Elements to be combined.
#[derive(Debug, Clone)]
pub(super) struct Terms {
    /// Which of the buffer.
    pub(super) range: Range<usize>,
    /// How many terms there are in the inbox.
    pub(super) count: usize,
    /// From one to the next, in elements.
    pub(super) stride: usize,
    /// The place of the buffer's own among them.
    pub(super) own: usize,
}

/// A plan under way in `A`.
pub(super) struct Progress<A> {
    plan: Rc<Plan>,
    cut: Cut,
    arena: A,
    first_tag: usize,
    lanes: [Lane; LANES],
    next_chunk: usize,
}

/// A chunk under way.
#[derive(Default)]
struct Lane {
    /// None when all are done.
    chunk: Option<usize>,
    /// Where it is not here yet, none has been posted.
    is_here: bool,
    round: usize,
    requests: Requests,
    is_combining: bool,
}

/// The lanes that a cut needs.
pub(super) fn num_lanes(cut: &Cut) -> usize {
    cut.chunks().min(LANES)
}

impl<A: Arena> Progress<A> {
    /// Posts the first messages. Collective: the same plan's, with the same cut, on every rank.
    pub(super) fn start(raw: &Raw, plan: Rc<Plan>, cut: Cut, arena: A) -> Progress<A> {
        let first_tag = raw.take_tags(cut.chunks());
        let mut progress =
            Progress { plan, cut, arena, first_tag, lanes: <[Lane; LANES]>::default(), next_chunk: 0 };
        for lane in 0..num_lanes(&cut) {
            progress.lanes[lane].requests = raw.take_requests();
            progress.begin(raw, lane);
        }
        progress
    }

    /// Begins the next chunk, if there is one.
    fn begin(&mut self, raw: &Raw, lane: usize) {
        let is_left = self.next_chunk < self.cut.chunks() && !self.plan.rounds.is_empty();
        self.lanes[lane].chunk = is_left.then_some(self.next_chunk);
        self.lanes[lane].round = 0;
        self.lanes[lane].is_here = false;
        if is_left {
            self.next_chunk += 1;
            self.post_first(raw, lane);
        }
    }

    /// Posts the messages of a chunk's first round, if it is here.
    fn post_first(&mut self, raw: &Raw, lane: usize) -> bool {
        let is_here = self.lanes[lane].chunk.is_some_and(|chunk| self.arena.is_here(chunk));
        self.lanes[lane].is_here = is_here;
        if is_here {
            self.post(raw, lane);
        }
        is_here
    }

    /// Posts the messages of a round.
    fn post(&mut self, raw: &Raw, lane: usize) {
        let Lane { chunk: Some(chunk), round, .. } = self.lanes[lane] else { return };
        let round = &self.plan.rounds[round];
        let mut requests = mem::take(&mut self.lanes[lane].requests);
        let tag = raw.tag(self.first_tag + chunk);
        let (arena, cut) = (&self.arena, &self.cut);
        for receive in &round.receives {
            let mut at = receive.inbox.unwrap_or_default() * cut.largest_part();
            for piece in cut.pieces(chunk, &receive.parts) {
                let into =
                    if receive.inbox.is_some() { arena.inbox(lane, at) } else { arena.value(piece.start) };
                at += piece.len();
                let extent = arena.extent(raw, piece.len());
                // SAFETY: the arena's promise, kept until the operation is done; nothing else is done to memory that a round
                // receives into before the round is over.
                unsafe {
                    raw.receive_extent(&mut requests, Channel::Private, into, extent, receive.from, tag)
                };
            }
        }
        for send in &round.sends {
            for piece in cut.pieces(chunk, &send.parts) {
                let extent = arena.extent(raw, piece.len());
                // SAFETY: as above; a round receives nothing into what it sends.
                unsafe {
                    raw.send_extent(
                        &mut requests,
                        Channel::Private,
                        arena.value(piece.start),
                        extent,
                        send.to,
                        tag,
                    )
                };
            }
        }
        self.lanes[lane].requests = requests;
    }

    /// Moves one chunk on as far as it goes.
    fn advance_lane(&mut self, raw: &Raw, lane: usize) {
        while let Some(chunk) = self.lanes[lane].chunk {
            if !self.lanes[lane].is_here && !self.post_first(raw, lane) {
                return;
            }
            let state = &mut self.lanes[lane];
            if !state.is_combining {
                if !state.requests.is_empty() && !test_all(&mut state.requests) {
                    return;
                }
                state.requests.clear();
                if let Some(combine) = &self.plan.rounds[state.round].combine {
                    state.is_combining = true;
                    let stride = combine.parts.len() * self.cut.largest_part();
                    debug_assert_eq!(
                        self.cut.pieces(chunk, &combine.parts).count(),
                        1,
                        "they are in one piece"
                    );
                    for range in self.cut.pieces(chunk, &combine.parts) {
                        self.arena
                            .combine(lane, &Terms { range, count: combine.terms, stride, own: combine.own });
                    }
                }
            }
            if state.is_combining && !self.arena.is_combined(lane) {
                return;
            }
            state.is_combining = false;
            state.round += 1;
            if state.round == self.plan.rounds.len() {
                self.arena.leave(chunk);
                self.begin(raw, lane);
            } else {
                self.post(raw, lane);
            }
        }
    }

    /// Moves it on; true when it is done.
    pub(super) fn advance(&mut self, raw: &Raw) -> bool {
        for lane in 0..self.lanes.len() {
            self.advance_lane(raw, lane);
        }
        self.lanes.iter().all(|lane| lane.chunk.is_none())
    }

    /// The memory that it worked on; it is done.
    pub(super) fn into_arena(self, raw: &Raw) -> A {
        for lane in self.lanes.into_iter().filter(|lane| lane.requests.capacity() > 0) {
            raw.recycle_requests(lane.requests);
        }
        self.arena
    }
}
