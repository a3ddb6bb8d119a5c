//! The spans that the communicating thread is in, for another thread to read: the watchdog's.

use std::cell::Cell;
use std::sync::Mutex;

use super::event::{Event, EventKind, Name};

/// A function of the spans that a thread is in.
type AtEnd = fn(&[Event]);

thread_local! {
    static WATCHED: Cell<bool> = const { Cell::new(false) };
    static AT_END: Cell<Option<AtEnd>> = const { Cell::new(None) };
}

/// The spans that the watched thread is in, outermost first, and the number of spans begun or ended
/// so far.
static SPANS: Mutex<(Vec<Event>, u64)> = Mutex::new((Vec::new(), 0));

/// Makes the spans of the calling thread visible to other threads. At most one thread of a process
/// may be watched.
pub fn watch() {
    WATCHED.set(true);
}

/// Watches the calling thread, and calls `act` at the end of each of its spans, with the spans that the
/// thread is in, outermost first. The time that `act` takes is part of the span.
pub fn at_end(act: fn(&[Event])) {
    watch();
    AT_END.set(Some(act));
}

pub(super) fn is_watched() -> bool {
    WATCHED.get()
}

fn change(change: impl FnOnce(&mut Vec<Event>)) {
    if let (true, Ok(mut spans)) = (is_watched(), SPANS.lock()) {
        change(&mut spans.0);
        spans.1 += 1;
    }
}

pub(super) fn enter(event: &Event) {
    change(|spans| spans.push(*event));
}

/// Records that the innermost span has become `event`.
pub(super) fn update(event: &Event) {
    change(|spans| {
        if let Some(last) = spans.last_mut() {
            *last = *event;
        }
    });
}

pub(super) fn leave() {
    if let Some(act) = AT_END.get() {
        act(&current_spans().spans);
    }
    change(|spans| {
        spans.pop();
    });
}

/// The spans that the watched thread is in.
#[derive(Debug, Clone, PartialEq)]
pub struct SpanStack {
    /// A number that changes with everything the thread does.
    pub progress: u64,
    spans: Vec<Event>,
}

/// Returns the spans that the watched thread is in now.
pub fn current_spans() -> SpanStack {
    let spans = SPANS.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    SpanStack { progress: spans.1, spans: spans.0.clone() }
}

/// Formats as `step 17, backward of micro-batch 2 in stage 1, receive of 65536 bytes from rank 3`.
impl std::fmt::Display for SpanStack {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.spans.is_empty() {
            return write!(f, "between operations");
        }
        for (number, span) in self.spans.iter().enumerate() {
            let separator = if number > 0 { ", " } else { "" };
            write!(f, "{separator}{}", span.name().text())?;
            match (span.kind(), span.name()) {
                (EventKind::Work, Name::Step) => write!(f, " {}", span.step)?,
                (EventKind::Work, Name::Layer) => write!(f, " {}", span.layer)?,
                (EventKind::Work, _) if span.micro_batch >= 0 => {
                    write!(f, " of micro-batch {} in stage {}", span.micro_batch, span.stage)?;
                }
                (EventKind::Work | EventKind::Loader, _) => {}
                (EventKind::Communication | EventKind::Flight, name) => {
                    write!(f, " of {} bytes", span.bytes)?;
                    let direction = if name == Name::Send { "to" } else { "from" };
                    if span.peer >= 0 {
                        write!(f, " {direction} rank {}", span.peer)?;
                    }
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use crate::trace::{self, Event, Flight, Name, at_end, current_spans, watch, work};

    #[test]
    fn another_thread_sees_the_spans_of_this_one() {
        watch();
        assert_eq!(current_spans().to_string(), "between operations");
        let step = work(Name::Step).step(17);
        let pass = work(Name::Backward).micro_batch(1, 2);
        let before = current_spans();
        let mut flight = Flight::start(Name::Receive, 64, 0, Some(3));
        flight.wait(|| {
            let seen = std::thread::spawn(current_spans).join().unwrap();
            assert_eq!(
                seen.to_string(),
                "step 17, backward of micro-batch 2 in stage 1, receive of 64 bytes from rank 3"
            );
            assert_ne!(seen.progress, before.progress);
        });
        assert_eq!(current_spans().to_string(), "step 17, backward of micro-batch 2 in stage 1");
        drop((pass, step));
        assert_eq!(current_spans().to_string(), "between operations");
        thread_local! {
            static ENDED: RefCell<Vec<Vec<Name>>> = const { RefCell::new(Vec::new()) };
        }
        at_end(|spans| ENDED.with_borrow_mut(|ended| ended.push(spans.iter().map(Event::name).collect())));
        let pass = work(Name::Backward);
        drop(work(Name::Layer));
        drop(pass);
        assert_eq!(ENDED.take(), [vec![Name::Backward, Name::Layer], vec![Name::Backward]]);
        // nothing is recorded for a trace
        assert!(trace::finish().events.is_empty());
    }
}
