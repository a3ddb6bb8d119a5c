//! The recorder of spans: this rank's own work, its time inside MPI, and its messages in flight.
//!
//! Nothing is recorded, and almost no time is spent, until [`start`] is called; from then on every
//! [`Span`] is recorded, from its creation until it is dropped, and so is every [`Flight`]. The
//! spans of a rank nest, since one thread creates them all. After [`watch`], another thread can
//! read the spans that the thread is in ([`SpanStack`]). The recorder is independent of messages
//! and ranks: [`comm`](crate::comm) describes what it sends, and [`app`](crate::app) merges the
//! records of the ranks.

mod event;
mod span_stack;

use std::cell::{Cell, RefCell};

pub use event::{Event, EventKind, Name, now};
pub use span_stack::{SpanStack, at_end, current_spans, watch};

/// The most records that all ranks of a job keep together, and that one rank keeps: 88 bytes each.
const MOST_EVENTS: [usize; 2] = [1 << 23, 1 << 20];

/// The events that this rank has recorded.
#[derive(Debug, Clone, Default)]
pub struct Record {
    /// The events in the order of their ends.
    pub events: Vec<Event>,
    /// The number of events that were discarded because there were too many.
    pub num_lost: usize,
}

thread_local! {
    static ON: Cell<bool> = const { Cell::new(false) };
    /// True on a thread that reads samples for another.
    static IS_LOADER: Cell<bool> = const { Cell::new(false) };
    static LIMIT: Cell<usize> = const { Cell::new(0) };
    static RECORD: RefCell<Record> = RefCell::default();
}

/// Starts recording the calling thread, one of `num_ranks` whose records will be merged.
pub fn start(num_ranks: usize) {
    now();
    LIMIT.set((MOST_EVENTS[0] / num_ranks).min(MOST_EVENTS[1]));
    ON.set(true);
}

/// Starts recording the calling thread, which reads samples for another; see [`append`].
pub fn start_loader() {
    start(1);
    IS_LOADER.set(true);
}

/// Returns true while the calling thread is recorded.
pub fn is_on() -> bool {
    ON.get()
}

/// Stops recording and returns the record.
pub fn finish() -> Record {
    ON.set(false);
    RECORD.take()
}

/// Adds what another thread of this rank has recorded, if the calling thread is recorded.
pub fn append(record: Record) {
    if is_on() {
        record.events.into_iter().for_each(self::record);
        RECORD.with_borrow_mut(|own| own.num_lost += record.num_lost);
    }
}

fn record(event: Event) {
    RECORD.with_borrow_mut(|record| {
        if record.events.len() < LIMIT.get() {
            record.events.push(event);
        } else {
            record.num_lost += 1;
        }
    });
}

/// Returns true if the calling thread is recorded or watched.
fn is_observed() -> bool {
    is_on() || span_stack::is_watched()
}

/// An activity of this rank, from the creation of the value until it is dropped.
#[must_use = "a span ends where it is dropped"]
pub struct Span(Option<Box<Event>>);

/// Begins a span of work.
pub fn work(name: Name) -> Span {
    let kind = || if IS_LOADER.get() { EventKind::Loader } else { EventKind::Work };
    Span::new(is_observed().then(|| Event::new(name, kind())))
}

/// Begins a span inside MPI, for a message of `bytes` that is called `link` on all ranks that take
/// part, from or to rank `peer` of the job if it has two ends.
pub fn communication(name: Name, bytes: usize, link: i64, peer: Option<usize>) -> Span {
    Span::new(is_observed().then(|| Event::communication(EventKind::Communication, name, bytes, link, peer)))
}

impl Span {
    fn new(event: Option<Event>) -> Span {
        if let Some(event) = &event {
            span_stack::enter(event);
        }
        Span(event.map(Box::new))
    }

    fn with(mut self, set: impl FnOnce(&mut Event)) -> Span {
        if let Some(event) = &mut self.0 {
            set(event);
            span_stack::update(event);
        }
        self
    }

    /// Sets the step of the span.
    pub fn step(self, step: u64) -> Span {
        self.with(|event| event.step = step as i64)
    }

    /// Sets the micro-batch and the stage of the span.
    pub fn micro_batch(self, stage: usize, micro_batch: usize) -> Span {
        self.with(|event| (event.stage, event.micro_batch) = (stage as i64, micro_batch as i64))
    }

    /// Sets the layer of the span.
    pub fn layer(self, layer: usize) -> Span {
        self.with(|event| event.layer = layer as i64)
    }
}

impl Drop for Span {
    fn drop(&mut self) {
        if let Some(event) = self.0.take() {
            span_stack::leave();
            if is_on() {
                record(event.ended());
            }
        }
    }
}

/// A message in flight. It is a pointer, so that messages that nobody records are moved fast.
#[derive(Debug)]
pub struct Flight(Option<Box<Event>>);

impl Flight {
    /// Begins a flight; the arguments are those of [`communication`].
    pub fn start(name: Name, bytes: usize, link: i64, peer: Option<usize>) -> Flight {
        let event = || Box::new(Event::communication(EventKind::Flight, name, bytes, link, peer));
        Flight(is_observed().then(event))
    }

    /// Begins the span in which the message is handed to MPI.
    pub fn posting(&self) -> Span {
        let event = self.0.as_ref().filter(|_| is_observed());
        Span::new(event.map(|event| event.communicated()))
    }

    /// Waits for the end of the flight with `wait`.
    pub fn wait<R>(&mut self, wait: impl FnOnce() -> R) -> R {
        let span = self.posting();
        let result = wait();
        drop(span);
        self.end();
        result
    }

    /// Ends the flight, unless it has ended before.
    pub fn end(&mut self) {
        if let Some(event) = self.0.take().filter(|_| is_on()) {
            record(event.ended());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_recorded_between_start_and_finish_and_nest() {
        drop(work(Name::Step));
        start(1);
        {
            let _step = work(Name::Step).step(7);
            let _layer = work(Name::Layer).micro_batch(1, 2).layer(3);
            let mut flight = Flight::start(Name::Send, 40, 5, Some(2));
            drop(flight.posting());
            flight.wait(|| std::hint::black_box(()));
            flight.end();
        }
        let Record { events, num_lost } = finish();
        drop(work(Name::Step));
        assert_eq!(num_lost, 0);
        let names: Vec<_> = events.iter().map(|event| (event.name(), event.kind())).collect();
        let (send, layer, step) = (Name::Send, Name::Layer, Name::Step);
        assert_eq!(
            names,
            [
                (send, EventKind::Communication),
                (send, EventKind::Communication),
                (send, EventKind::Flight),
                (layer, EventKind::Work),
                (step, EventKind::Work)
            ]
        );
        let [_, wait, flight, layer, step] = events[..] else { panic!() };
        assert!(step.start <= layer.start && layer.end <= step.end && wait.start >= flight.start);
        assert_eq!((flight.bytes, flight.link, layer.layer, layer.stage, step.step), (40, 5, 3, 1, 7));
        assert!(finish().events.is_empty());
    }
}
