//! Operations whose buffers the device is still busy with, in the order in which they were started.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

thread_local! {
    /// Operations whose buffers are on their way to the host, of all communicators of this rank.
    static DEPARTING: RefCell<VecDeque<Rc<dyn Departing>>> = RefCell::default();
}

/// An operation that is to be posted when its buffer is there.
pub(super) trait Departing {
    fn is_ready(&self) -> bool;

    /// Posts it; its buffer is there.
    fn post(&self);
}

/// Posts what is ready, up to the first that is not.
pub(super) fn post_ready() {
    let next = || {
        DEPARTING.with_borrow_mut(|departing| {
            let is_ready = departing.front().is_some_and(|first| first.is_ready());
            if is_ready { departing.pop_front() } else { None }
        })
    };
    while let Some(operation) = next() {
        operation.post();
    }
}

/// Lets `operation` wait for its turn.
pub(super) fn push(operation: Rc<dyn Departing>) {
    DEPARTING.with_borrow_mut(|departing| departing.push_back(operation));
}

/// True if nothing waits.
pub(super) fn is_empty() -> bool {
    DEPARTING.with_borrow(VecDeque::is_empty)
}
