//! The progress engine: what goes in rounds moves on wherever its rank waits.
//!
//! MPI moves all messages on inside any of its calls (MPI-4.1 §2.9), but not what is made of messages here: the next round of a plan, or
//! a device's buffer that was on its way to where MPI may have it. So every operation of that kind is entered here when it is
//! started, and every wait for anything that was started, and every test that finds it unfinished, moves all of them on. Ranks may then wait in
//! any order, for each helps the others with whatever they wait for.
//!
//! Invariants: operations are posted in the order in which they were entered, whichever is ready first, for that is the order that all ranks
//! share. Blocking collective operations of MPI's own move nothing here: what was started before is waited for before them if another rank needs it
//! to get there.

use std::cell::RefCell;
use std::mem::ManuallyDrop;
use std::rc::Rc;

use super::waiting::{Requests, pause, test_all, wait_inside, yields};

thread_local! {
    /// What this rank has under way. Never dropped: MPI may still write to the memory of what did not come to its end.
    static UNDER_WAY: ManuallyDrop<RefCell<Vec<Rc<dyn Entry>>>> = const { ManuallyDrop::new(RefCell::new(Vec::new())) };
}

/// An operation that whoever started it shares with the engine.
pub(super) trait Entry {
    /// Posts it, if it may be and its memory is where MPI may have it; true once it is posted.
    fn post(&self, _may: bool) -> bool {
        true
    }

    /// Moves it on, once it is posted; true when it is done.
    fn advance(&self) -> bool;
}

/// Moves `entry` on from now on.
pub(super) fn enter(entry: Rc<dyn Entry>) {
    UNDER_WAY.with(|entries| entries.borrow_mut().push(entry));
}

/// Posts what can be posted.
pub(super) fn post() {
    UNDER_WAY.with(|entries| {
        // what is behind one that is not ready waits, or was posted before
        entries.borrow().iter().all(|entry| entry.post(true));
    });
}

/// Moves everything on.
pub(super) fn advance() {
    let mut may_post = true;
    UNDER_WAY.with(|entries| {
        entries.borrow_mut().retain(|entry| {
            let is_posted = entry.post(may_post);
            may_post &= is_posted;
            !(is_posted && entry.advance())
        });
    });
}

/// True where a wait must not be left to MPI: there is something to move on, or others need the core.
pub(super) fn is_busy() -> bool {
    yields() || UNDER_WAY.with(|entries| !entries.borrow().is_empty())
}

/// Moves everything on until `is_done`.
pub(super) fn wait_until(mut is_done: impl FnMut() -> bool) {
    loop {
        advance();
        if is_done() {
            return;
        }
        pause();
    }
}

/// Returns when all of `requests` are complete.
pub(super) fn wait_all(requests: &mut Requests) {
    if is_busy() {
        wait_until(|| test_all(requests));
    } else {
        wait_inside(requests);
    }
}
