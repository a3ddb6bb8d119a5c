//! Where in its spans the thread that communicates is, for another thread to see: a watchdog.

use std::cell::Cell;
use std::sync::Mutex;

use super::{Event, Kind, Name};

thread_local! {
    static WATCHED: Cell<bool> = const { Cell::new(false) };
}

/// The spans that the watched thread is in, outermost first, and how many have begun or ended.
static SPANS: Mutex<(Vec<Event>, u64)> = Mutex::new((Vec::new(), 0));

/// Lets other threads see from now on where this one is; one thread of a process at most.
pub fn watch() {
    WATCHED.set(true);
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

/// The innermost span has become `event`.
pub(super) fn update(event: &Event) {
    change(|spans| {
        if let Some(last) = spans.last_mut() {
            *last = *event;
        }
    });
}

pub(super) fn leave() {
    change(|spans| {
        spans.pop();
    });
}

/// Where the watched thread is.
#[derive(Debug, Clone, PartialEq)]
pub struct Place {
    /// A number that has changed if the thread has done anything since the last look.
    pub progress: u64,
    spans: Vec<Event>,
}

/// Where the watched thread is now.
pub fn place() -> Place {
    let spans = SPANS.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    Place { progress: spans.1, spans: spans.0.clone() }
}

/// `step 17, backward of micro-batch 2 in stage 1, receive of 65536 bytes from rank 3`.
impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.spans.is_empty() {
            return write!(f, "between operations");
        }
        for (number, span) in self.spans.iter().enumerate() {
            let separator = if number > 0 { ", " } else { "" };
            write!(f, "{separator}{}", span.name().text())?;
            match (span.kind(), span.name()) {
                (Kind::Work, Name::Step) => write!(f, " {}", span.step)?,
                (Kind::Work, Name::Layer) => write!(f, " {}", span.layer)?,
                (Kind::Work, _) if span.micro_batch >= 0 => {
                    write!(f, " of micro-batch {} in stage {}", span.micro_batch, span.stage)?;
                }
                (Kind::Work, _) => {}
                (Kind::Communication | Kind::Flight, name) => {
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
    use crate::trace::{self, Flight, Name, place, watch, work};

    #[test]
    fn another_thread_sees_where_this_one_is() {
        watch();
        assert_eq!(place().to_string(), "between operations");
        let step = work(Name::Step).step(17);
        let pass = work(Name::Backward).micro_batch(1, 2);
        let before = place();
        let mut flight = Flight::start(Name::Receive, 64, 0, Some(3));
        flight.wait(|| {
            let seen = std::thread::spawn(place).join().unwrap();
            assert_eq!(
                seen.to_string(),
                "step 17, backward of micro-batch 2 in stage 1, receive of 64 bytes from rank 3"
            );
            assert_ne!(seen.progress, before.progress);
        });
        assert_eq!(place().to_string(), "step 17, backward of micro-batch 2 in stage 1");
        drop((pass, step));
        assert_eq!(place().to_string(), "between operations");
        // nothing is recorded for a trace
        assert!(trace::finish().events.is_empty());
    }
}
