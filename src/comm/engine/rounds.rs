//! Plans under way: the messages of their rounds, chunk after chunk, a few chunks at a time.
//!
//! A chunk goes through these steps: its values are made readable for MPI; the messages of a round
//! are posted; when all are complete, the [`Arena`] combines the values that arrived, while
//! messages of other chunks travel; the next round follows; after the last one the arena delivers
//! the values. Every chunk has its own tag on the communicator's private twin, so its messages are
//! matched correctly in whatever order ranks finish chunks. A waiting rank advances all chunks
//! under way, so the globally oldest chunk always advances and there is no deadlock.
#![allow(unsafe_code)]

use std::ops::Range;
use std::rc::Rc;

use crate::comm::algorithm::{Combine, Cut, Plan, common};
use crate::comm::group::Group;
use crate::comm::mpi::{Channel, Handle, Requests, Values};
use crate::memory::{Arena, ElementType, Terms};

/// Chunks under way at a time: while one is combined, the messages of another travel.
const LANES: usize = 2;

/// The memory and the communicator that a plan runs on.
pub(in crate::comm) struct Ground<'a> {
    pub(in crate::comm) mpi: &'a Handle,
    pub(in crate::comm) arena: &'a mut dyn Arena,
    pub(in crate::comm) element: ElementType,
    /// The elements of the buffer that change.
    pub(in crate::comm) receive_range: Range<usize>,
}

/// A plan under way.
pub(in crate::comm) struct Rounds {
    plan: Rc<Plan>,
    cut: Cut,
    first_tag: usize,
    lanes: [Lane; LANES],
    next_chunk: usize,
}

/// A chunk under way.
#[derive(Default)]
struct Lane {
    /// `None` when all chunks are done.
    chunk: Option<usize>,
    round: usize,
    state: LaneState,
    requests: Option<Requests>,
}

#[derive(Clone, Copy, PartialEq, Eq, Default)]
enum LaneState {
    /// MPI cannot read the chunk yet, and nothing has been posted.
    #[default]
    Fetching,
    /// The messages of a round travel.
    Posted,
    /// The values that arrived are being combined.
    Combining,
}

/// Returns the number of lanes that a cut needs.
pub(super) fn num_lanes(cut: &Cut) -> usize {
    cut.chunks().min(LANES)
}

impl Rounds {
    /// Posts the first messages. Collective: every rank passes the plan of the same algorithm, the
    /// same cut and the same tag.
    pub(in crate::comm) fn start(
        plan: Rc<Plan>,
        cut: Cut,
        first_tag: usize,
        ground: &mut Ground<'_>,
    ) -> Rounds {
        let lanes = <[Lane; LANES]>::default();
        let mut rounds = Rounds { plan, cut, first_tag, lanes, next_chunk: 0 };
        for lane in 0..num_lanes(&cut) {
            rounds.begin(ground, lane);
        }
        rounds
    }

    /// Begins the next chunk, if there is one.
    fn begin(&mut self, ground: &mut Ground<'_>, lane: usize) {
        let is_left = self.next_chunk < self.cut.chunks() && !self.plan.rounds.is_empty();
        let state = &mut self.lanes[lane];
        state.chunk = is_left.then_some(self.next_chunk);
        (state.round, state.state) = (0, LaneState::Fetching);
        if is_left {
            self.next_chunk += 1;
            self.post(ground, lane);
        }
    }

    /// Posts the messages of a round, if MPI can read the values of its chunk.
    fn post(&mut self, ground: &mut Ground<'_>, lane: usize) {
        let Lane { chunk: Some(chunk), round, ref mut state, ref mut requests } = self.lanes[lane] else {
            return;
        };
        if *state == LaneState::Fetching && !ground.arena.is_here(chunk) {
            return;
        }
        *state = LaneState::Posted;
        let (round, cut) = (&self.plan.rounds[round], &self.cut);
        let requests = requests.get_or_insert_with(|| ground.mpi.requests());
        let tag = Group::tag(self.first_tag + chunk);
        let bytes = ground.element.bytes();
        let place = |base: *mut u8, at: usize, len: usize| {
            Values::new(base.wrapping_add(at * bytes), len, ground.element)
        };
        let (values, inbox) = (ground.arena.values(), ground.arena.inbox());
        let lane_start = lane * self.plan.inbox * cut.largest_part();
        for receive in &round.receives {
            let mut at = lane_start + receive.inbox.unwrap_or_default() * cut.largest_part();
            for piece in cut.pieces(chunk, &receive.parts) {
                let into = match receive.inbox {
                    Some(_) => place(inbox, at, piece.len()),
                    None => place(values, piece.start, piece.len()),
                };
                at += piece.len();
                // SAFETY: the arena holds these elements until the operation is done, and nothing
                // else touches memory that a round receives into before the round is over.
                unsafe { ground.mpi.receive(requests, Channel::Private, into, receive.from, tag) };
            }
        }
        for send in &round.sends {
            for piece in cut.pieces(chunk, &send.parts) {
                let from = place(values, send.subtree * cut.len() + piece.start, piece.len());
                // SAFETY: the arena holds these elements until the operation is done, and a round
                // receives nothing into what it sends.
                unsafe {
                    ground.mpi.send(requests, Channel::Private, from, send.to, tag);
                }
            }
        }
    }

    /// Advances one chunk as far as possible.
    fn advance_lane(&mut self, ground: &mut Ground<'_>, lane: usize) {
        while let Some(chunk) = self.lanes[lane].chunk {
            if self.lanes[lane].state == LaneState::Fetching {
                self.post(ground, lane);
            }
            let state = &mut self.lanes[lane];
            if state.state == LaneState::Fetching {
                return;
            }
            if state.state == LaneState::Posted {
                if !state.requests.as_mut().is_none_or(Requests::test) {
                    return;
                }
                for combine in &self.plan.rounds[state.round].combines {
                    state.state = LaneState::Combining;
                    let stride = combine.parts.len() * self.cut.largest_part();
                    let first = (lane * self.plan.inbox + combine.inbox) * self.cut.largest_part();
                    debug_assert_eq!(self.cut.pieces(chunk, &combine.parts).count(), 1, "one piece");
                    for range in self.cut.pieces(chunk, &combine.parts) {
                        let Combine { num_received, own, merges, .. } = combine;
                        let terms = Terms {
                            range,
                            own_stride: self.cut.len(),
                            first,
                            num_received: *num_received,
                            stride,
                            own: own.clone(),
                            merges,
                        };
                        ground.arena.combine(lane, &terms);
                    }
                }
            }
            if state.state == LaneState::Combining && !ground.arena.is_combined(lane) {
                return;
            }
            state.state = LaneState::Posted;
            state.round += 1;
            if state.round == self.plan.rounds.len() {
                let changed = ground.receive_range.clone();
                ground.arena.deliver(&mut self.cut.all_pieces(chunk).map(|piece| common(&piece, &changed)));
                self.begin(ground, lane);
            } else {
                self.post(ground, lane);
            }
        }
    }

    /// Advances the plan; returns true when it is done.
    pub(in crate::comm) fn advance(&mut self, ground: &mut Ground<'_>) -> bool {
        for lane in 0..self.lanes.len() {
            self.advance_lane(ground, lane);
        }
        self.lanes.iter().all(|lane| lane.chunk.is_none())
    }
}
