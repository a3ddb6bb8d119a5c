//! The sum over several nodes of a leader's share in an operation of ranks that map each other's device
//! memory: a plan of messages with the leaders in its place on the other nodes.

use std::rc::Rc;

use super::rounds::{Ground, Rounds};
use crate::comm::algorithm::{Cut, Plan};
use crate::comm::mpi::Handle;
use crate::memory::{ElementType, Loan};

/// A sum over the nodes, which starts when that of this node is in the buffer.
pub(super) struct AcrossUnderway {
    plan: Rc<Plan>,
    /// The cut of the share.
    cut: Cut,
    first_tag: usize,
    loan: Loan,
    element: ElementType,
    /// `None` until the sum of this node is there.
    rounds: Option<Rounds>,
    is_done: bool,
}

impl AcrossUnderway {
    pub(super) fn new(
        plan: &Rc<Plan>,
        cut: Cut,
        first_tag: usize,
        loan: Loan,
        element: ElementType,
    ) -> AcrossUnderway {
        AcrossUnderway { plan: Rc::clone(plan), cut, first_tag, loan, element, rounds: None, is_done: false }
    }

    /// Posts the first messages.
    pub(super) fn start(&mut self, mpi: &Handle) {
        let (plan, cut, first_tag) = (Rc::clone(&self.plan), self.cut, self.first_tag);
        let mut ground = self.ground(mpi);
        (0..cut.chunks()).for_each(|chunk| ground.arena.fetch(chunk, &mut cut.all_pieces(chunk)));
        self.rounds = Some(Rounds::start(plan, cut, first_tag, &mut ground));
    }

    /// Advances the messages; returns true when the total is in the buffer, or on its way there.
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
        Ground { mpi, arena: self.loan.arena(), element: self.element, receive_range: 0..usize::MAX }
    }
}
