//! Tasks of a caller that go on in the background of other operations: each is advanced in every
//! wait and test, as the operations themselves are.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};

/// A task that consists of messages, of which later ones depend on earlier ones.
pub trait Background {
    /// Does whatever can be done without waiting. Returns true if nothing is left to do, after which
    /// it is not called again. Not collective.
    fn advance(&mut self) -> bool;
}

thread_local! {
    static TASKS: RefCell<Vec<Weak<RefCell<dyn Background>>>> = const { RefCell::new(Vec::new()) };
    /// The number of entries in `TASKS`.
    static NUM_TASKS: Cell<usize> = const { Cell::new(0) };
    /// True while tasks are advanced, so that the operations that they test do not advance them.
    static IS_ADVANCING: Cell<bool> = const { Cell::new(false) };
}

/// Advances `task` in every wait and test of this thread until it is done or its last owner drops
/// it. Not collective.
pub fn attach<T: Background + 'static>(task: &Rc<RefCell<T>>) {
    let task: Weak<RefCell<T>> = Rc::downgrade(task);
    TASKS.with_borrow_mut(|tasks| {
        tasks.push(task);
        NUM_TASKS.set(tasks.len());
    });
}

/// Returns true if there are tasks to advance.
pub(super) fn has_tasks() -> bool {
    NUM_TASKS.get() > 0
}

/// Advances all tasks.
pub(super) fn advance() {
    if !has_tasks() || IS_ADVANCING.replace(true) {
        return;
    }
    // the tasks start operations, and may attach others
    let mut tasks = TASKS.take();
    tasks.retain(|task| {
        let Some(task) = task.upgrade() else { return false };
        // its owner may be in the middle of a change
        let is_done = task.try_borrow_mut().is_ok_and(|mut task| task.advance());
        !is_done
    });
    TASKS.with_borrow_mut(|attached| {
        attached.extend(tasks);
        NUM_TASKS.set(attached.len());
    });
    IS_ADVANCING.set(false);
}
