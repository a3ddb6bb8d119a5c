//! The progress engine: multi-round operations advance in every wait and test.
//!
//! MPI advances all messages inside any of its calls (MPI-4.1 §2.9), but not the operations that
//! are built from messages here: the next round of a plan, or a device buffer that is being copied
//! to memory that MPI can read. Every such operation is entered in the engine's queue when it is
//! started. Every wait for a started operation, and every test that finds one incomplete, advances
//! all of them. So ranks may wait in any order, because a waiting rank advances everything that the
//! others wait for.
//!
//! Invariants: operations are posted in the order in which they were entered, whichever is ready
//! first, because all ranks share that order. MPI's own blocking collective operations advance
//! nothing here, so a caller of one first waits for any operation that another rank needs to reach
//! it. Nor do [tasks in the background](Background) advance in them: a rank never waits for the
//! task of another that may be in one. (A rank cannot start such an operation instead because it has
//! tasks: MPI does not match it with the blocking one of a rank without, MPI-4.1 §6.12.)

mod across;
mod background;
mod entry;
mod peers;
mod request;
mod rounds;

use std::cell::RefCell;
use std::mem::ManuallyDrop;
use std::rc::Rc;
use std::thread;
use std::time::{Duration, Instant};

use super::mpi::{Requests, pause, yields};
pub use background::{Background, attach};
pub(super) use entry::Entry;
pub(super) use request::{AcrossNodes, AcrossShare, Request, Task};
pub(super) use rounds::{Ground, Rounds};

/// The time between two looks at messages of a rank that has nothing else to do.
const PAUSE: Duration = Duration::from_micros(200);

thread_local! {
    /// Operations under way. Never dropped: MPI may still write to the memory of those that did not
    /// complete.
    static QUEUE: ManuallyDrop<RefCell<Vec<Rc<Entry>>>> =
        const { ManuallyDrop::new(RefCell::new(Vec::new())) };
}

/// Enters `entry`, and posts it if its turn has come and its values are where MPI can read them.
pub(super) fn enter(entry: &Rc<Entry>) {
    QUEUE.with(|queue| {
        queue.borrow_mut().push(Rc::clone(entry));
        // entries behind one that is not ready wait, or were posted before
        queue.borrow().iter().all(|entry| entry.post());
    });
}

/// Advances all operations under way and all tasks in the background, without waiting. Not
/// collective.
pub fn advance() {
    let mut all_posted = true;
    QUEUE.with(|queue| {
        queue.borrow_mut().retain(|entry| {
            all_posted = all_posted && entry.post();
            !entry.advance()
        });
    });
    background::advance();
}

/// Advances all operations under way and all tasks in the background for this time, mostly asleep.
/// Not collective.
pub fn advance_for(time: Duration) {
    let start = Instant::now();
    loop {
        advance();
        let left = time.saturating_sub(start.elapsed());
        if left.is_zero() {
            return;
        }
        thread::sleep(left.min(PAUSE));
    }
}

/// Returns true if a wait must not be left to MPI, because there is something to advance or other
/// ranks need the core.
pub(super) fn is_busy() -> bool {
    yields() || background::has_tasks() || QUEUE.with(|queue| !queue.borrow().is_empty())
}

/// Advances all operations under way until `is_done`.
pub(super) fn wait_until(mut is_done: impl FnMut() -> bool) {
    loop {
        advance();
        if is_done() {
            return;
        }
        pause();
    }
}

/// Blocks until all of `requests` are complete.
pub(super) fn wait_all(requests: &mut Requests) {
    if is_busy() {
        wait_until(|| requests.test());
    } else {
        requests.wait();
    }
}
