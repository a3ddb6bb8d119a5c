//! The recorder of spans: this rank's own work, its time inside MPI, and its messages in flight.
//!
//! Nothing is recorded, and next to no time spent, until [`start`] is called; from then on every
//! [`Span`] is recorded, from its creation until it is dropped, and so is every [`Flight`]. The
//! spans of a rank nest, since one thread creates them all. After [`watch`], another thread can
//! read the spans that the thread is in ([`SpanStack`]). The recorder does not know what a message
//! or a rank is: [`comm`](crate::comm) describes what it sends, and [`app`](crate::app) merges the
//! records of the ranks.

mod span_stack;

use std::cell::{Cell, RefCell};
use std::sync::LazyLock;
use std::time::Instant;

use bytemuck::{Pod, Zeroable};

pub use span_stack::{SpanStack, current_spans, watch};

/// The activity of a span.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Name {
    /// `MPI_Init_thread` and the discovery of ranks and nodes.
    Start,
    /// One training step.
    Step,
    /// A pass over the test samples.
    Evaluation,
    /// Reading samples.
    Read,
    /// The forward pass of a micro-batch through a stage.
    Forward,
    /// The backward pass of a micro-batch through a stage.
    Backward,
    /// The half of a backward pass that computes the gradient of its input.
    InputGradient,
    /// The half of a backward pass that computes the gradients of weights.
    WeightGradient,
    /// One layer of a pass.
    Layer,
    /// An update of parameters.
    Optimizer,
    /// Copying the state for a checkpoint, or restoring it.
    Checkpoint,
    /// A message to another rank.
    Send,
    /// A message from another rank.
    Receive,
    /// A message to one rank and one from another at once.
    SendReceive,
    /// `MPI_Barrier`.
    Barrier,
    /// `MPI_Bcast`.
    Broadcast,
    /// `MPI_Scatter`.
    Scatter,
    /// `MPI_Gather`.
    Gather,
    /// `MPI_Allgather`, or an all-gather in place by pairwise exchange.
    AllGather,
    /// `MPI_Alltoall`.
    AllToAll,
    /// `MPI_Reduce`.
    Reduce,
    /// `MPI_Allreduce`, or an all-reduce in place by pairwise exchange.
    AllReduce,
    /// The operation of `MPI_Reduce_scatter_block`, by pairwise exchange.
    ReduceScatter,
}

impl Name {
    /// All names with their texts, each at the index of its number.
    const ALL: [(Name, &'static str); 23] = [
        (Name::Start, "starting MPI"),
        (Name::Step, "step"),
        (Name::Evaluation, "evaluation"),
        (Name::Read, "read samples"),
        (Name::Forward, "forward"),
        (Name::Backward, "backward"),
        (Name::InputGradient, "input gradient"),
        (Name::WeightGradient, "weight gradient"),
        (Name::Layer, "layer"),
        (Name::Optimizer, "optimizer"),
        (Name::Checkpoint, "checkpoint"),
        (Name::Send, "send"),
        (Name::Receive, "receive"),
        (Name::SendReceive, "send_receive"),
        (Name::Barrier, "barrier"),
        (Name::Broadcast, "broadcast"),
        (Name::Scatter, "scatter"),
        (Name::Gather, "gather"),
        (Name::AllGather, "all_gather"),
        (Name::AllToAll, "all_to_all"),
        (Name::Reduce, "reduce"),
        (Name::AllReduce, "all_reduce"),
        (Name::ReduceScatter, "reduce_scatter"),
    ];

    /// Returns the text of the name in traces.
    pub fn text(self) -> &'static str {
        Name::ALL[self as usize].1
    }

    /// Returns true for the passes of a micro-batch through a stage.
    pub fn is_pass(self) -> bool {
        matches!(self, Name::Forward | Name::Backward | Name::InputGradient | Name::WeightGradient)
    }
}

/// The kind of time that a record is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventKind {
    /// This rank worked.
    Work,
    /// This rank was inside MPI: it communicated, or waited.
    Communication,
    /// A message was in flight, whatever the rank did meanwhile.
    Flight,
}

impl EventKind {
    const ALL: [EventKind; 3] = [EventKind::Work, EventKind::Communication, EventKind::Flight];
}

/// One record. All fields are numbers, so that it can be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Event {
    name: i64,
    kind: i64,
    /// The begin, in nanoseconds on this rank's clock (see [`now`]).
    pub start: i64,
    /// The end, in nanoseconds on this rank's clock.
    pub end: i64,
    /// The step, or −1.
    pub step: i64,
    /// The stage, or −1.
    pub stage: i64,
    /// The micro-batch, or −1.
    pub micro_batch: i64,
    /// The layer of the model, or −1.
    pub layer: i64,
    /// The bytes that this rank sends or receives, or −1.
    pub bytes: i64,
    /// The rank in the job at the other end of a message, or −1.
    pub peer: i64,
    /// An identifier that all events of one message, or of one collective operation, share on all
    /// its ranks; 0 for none.
    pub link: i64,
}

impl Event {
    fn new(name: Name, kind: EventKind) -> Event {
        let (name, kind, start) = (name as i64, kind as i64, now());
        let (step, stage, micro_batch, layer, bytes, peer) = (-1, -1, -1, -1, -1, -1);
        Event { name, kind, start, end: start, step, stage, micro_batch, layer, bytes, peer, link: 0 }
    }

    fn communication(kind: EventKind, name: Name, bytes: usize, link: i64, peer: Option<usize>) -> Event {
        let peer = peer.map_or(-1, |peer| peer as i64);
        Event { bytes: bytes as i64, link, peer, ..Event::new(name, kind) }
    }

    /// Returns the activity of the span.
    pub fn name(&self) -> Name {
        Name::ALL[self.name as usize].0
    }

    /// Returns the kind of time that the event is about.
    pub fn kind(&self) -> EventKind {
        EventKind::ALL[self.kind as usize]
    }

    /// Returns the duration in nanoseconds.
    pub fn duration(&self) -> i64 {
        self.end - self.start
    }
}

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
    static LIMIT: Cell<usize> = const { Cell::new(0) };
    static RECORD: RefCell<Record> = RefCell::default();
}

static ORIGIN: LazyLock<Instant> = LazyLock::new(Instant::now);

/// Returns the time on this process's clock in nanoseconds.
pub fn now() -> i64 {
    ORIGIN.elapsed().as_nanos() as i64
}

/// Starts recording the calling thread, one of `num_ranks` whose records will be merged.
pub fn start(num_ranks: usize) {
    now();
    LIMIT.set((MOST_EVENTS[0] / num_ranks).min(MOST_EVENTS[1]));
    ON.set(true);
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
pub struct Span(Option<Event>);

/// Begins a span of work.
pub fn work(name: Name) -> Span {
    Span::new(is_observed().then(|| Event::new(name, EventKind::Work)))
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
        Span(event)
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
                record(Event { end: now(), ..event });
            }
        }
    }
}

/// A message in flight.
#[derive(Debug, Clone, Copy)]
pub struct Flight(Option<Event>);

impl Flight {
    /// Begins a flight; the arguments are those of [`communication`].
    pub fn start(name: Name, bytes: usize, link: i64, peer: Option<usize>) -> Flight {
        Flight(is_observed().then(|| Event::communication(EventKind::Flight, name, bytes, link, peer)))
    }

    /// Begins the span in which the message is handed to MPI.
    pub fn posting(&self) -> Span {
        let event = self.0.filter(|_| is_observed());
        Span::new(event.map(|event| Event { kind: EventKind::Communication as i64, start: now(), ..event }))
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
            record(Event { end: now(), ..event });
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
        assert!(Name::ALL.iter().enumerate().all(|(number, (name, _))| *name as usize == number));
        assert!(finish().events.is_empty());
    }
}
