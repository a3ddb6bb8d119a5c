//! The messages of a leader in an operation across nodes of ranks that map each other's device memory: a plan
//! on its share of the elements, with the leaders in its place on the other nodes.

use std::rc::Rc;

use super::request::AcrossShare;
use super::rounds::{Ground, Rounds};
use crate::comm::algorithm::common;
use crate::comm::mpi::Handle;
use crate::memory::{ElementType, Loan};

/// A leader's messages, which start when its node's values are in the buffer.
pub(super) struct AcrossUnderway {
    share: Rc<AcrossShare>,
    first_tag: usize,
    loan: Loan,
    element: ElementType,
    /// `None` until the values of this node are there.
    rounds: Option<Rounds>,
    is_done: bool,
}

impl AcrossUnderway {
    pub(super) fn new(
        share: &Rc<AcrossShare>,
        first_tag: usize,
        loan: Loan,
        element: ElementType,
    ) -> AcrossUnderway {
        let share = Rc::clone(share);
        AcrossUnderway { share, first_tag, loan, element, rounds: None, is_done: false }
    }

    /// Posts the first messages.
    pub(super) fn start(&mut self, mpi: &Handle) {
        let (plan, cut, first_tag) = (Rc::clone(&self.share.plan), self.share.cut, self.first_tag);
        for chunk in 0..cut.chunks() {
            let mut ranges = cut.all_pieces(chunk).map(|piece| common(&piece, &self.share.send_range));
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
        let receive_range = self.share.receive_range.clone();
        Ground { mpi, arena: self.loan.arena(), element: self.element, receive_range }
    }
}
