//! The messages of a leader in an operation across nodes of ranks that map each other's device memory: a plan
//! on its share of the elements, with the leaders in its place on the other nodes.

use std::ops::Range;
use std::rc::Rc;

use super::request::AcrossShare;
use super::rounds::{Ground, Rounds};
use crate::comm::algorithm::{Cut, Plan, common};
use crate::comm::mpi::Handle;
use crate::memory::{ElementType, Loan};

/// A leader's messages, which start when its node's values are in the buffer.
pub(super) struct AcrossUnderway {
    plan: Rc<Plan>,
    cut: Cut,
    send_range: Range<usize>,
    receive_range: Range<usize>,
    first_tag: usize,
    loan: Loan,
    element: ElementType,
    /// `None` until the values of this node are there.
    rounds: Option<Rounds>,
    is_done: bool,
}

impl AcrossUnderway {
    pub(super) fn new(
        share: &AcrossShare,
        first_tag: usize,
        loan: Loan,
        element: ElementType,
    ) -> AcrossUnderway {
        let AcrossShare { ref plan, cut, ref send_range, ref receive_range, .. } = *share;
        let (plan, send_range, receive_range) = (Rc::clone(plan), send_range.clone(), receive_range.clone());
        let (rounds, is_done) = (None, false);
        AcrossUnderway { plan, cut, send_range, receive_range, first_tag, loan, element, rounds, is_done }
    }

    /// Posts the first messages.
    pub(super) fn start(&mut self, mpi: &Handle) {
        let (plan, cut, first_tag) = (Rc::clone(&self.plan), self.cut, self.first_tag);
        for chunk in 0..cut.chunks() {
            let mut ranges = cut.all_pieces(chunk).map(|piece| common(&piece, &self.send_range));
            self.loan.arena().fetch(chunk, &mut ranges);
        }
        self.rounds = Some(Rounds::start(plan, cut, first_tag, &mut self.ground(mpi)));
    }

    /// Advances the messages; returns true when the values that arrive are in the buffer, or on their
    /// way there.
    pub(super) fn advance(&mut self, mpi: &Handle) -> bool {
        if let Some(mut rounds) = self.rounds.take() {
            self.is_done = rounds.advance(&mut self.ground(mpi));
            self.rounds = Some(rounds);
        }
        self.is_done
    }

    /// Returns true once [`AcrossUnderway::advance`] has.
    pub(super) fn is_done(&self) -> bool {
        self.is_done
    }

    fn ground<'a>(&'a mut self, mpi: &'a Handle) -> Ground<'a> {
        let receive_range = self.receive_range.clone();
        Ground { mpi, arena: self.loan.arena(), element: self.element, receive_range }
    }
}
