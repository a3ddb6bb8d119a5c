//! The records of a trace: what a rank did, and from when to when.

use std::sync::LazyLock;
use std::time::Instant;

use bytemuck::{Pod, Zeroable};

/// The activity of a span.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Name {
    /// `MPI_Init_thread` and the discovery of ranks and nodes.
    Start,
    /// One training step.
    Step,
    /// A pass over the test samples.
    Evaluation,
    /// Measuring the algorithms of matrix products.
    Tuning,
    /// Reading samples.
    Read,
    /// Reading and unpacking samples together.
    Load,
    /// Unpacking samples.
    Unpack,
    /// Exchanging samples with other nodes.
    DataExchange,
    /// Waiting for blocks of samples.
    DataWait,
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
    /// `MPI_Allgather`, or an all-gather in place by a plan.
    AllGather,
    /// `MPI_Alltoall`.
    AllToAll,
    /// `MPI_Reduce`.
    Reduce,
    /// `MPI_Allreduce`, or an all-reduce in place by a plan.
    AllReduce,
    /// The operation of `MPI_Reduce_scatter_block`, by a plan.
    ReduceScatter,
    /// `MPI_Scan`.
    Scan,
}

impl Name {
    /// All names with their texts, each at the index of its number.
    const ALL: [(Name, &'static str); 29] = [
        (Name::Start, "starting MPI"),
        (Name::Step, "step"),
        (Name::Evaluation, "evaluation"),
        (Name::Tuning, "tuning of products"),
        (Name::Read, "read samples"),
        (Name::Load, "read and unpack samples"),
        (Name::Unpack, "unpack samples"),
        (Name::DataExchange, "exchange samples"),
        (Name::DataWait, "wait for samples"),
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
        (Name::Scan, "scan"),
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
    /// The thread of this rank that reads samples worked.
    Loader,
}

impl EventKind {
    const ALL: [EventKind; 4] =
        [EventKind::Work, EventKind::Communication, EventKind::Flight, EventKind::Loader];
}

/// One record. All fields are numbers, so that it can be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Event {
    name: i64,
    kind: i64,
    /// The start, in nanoseconds on this rank's clock (see [`now`]).
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
    pub(super) fn new(name: Name, kind: EventKind) -> Event {
        let (name, kind, start) = (name as i64, kind as i64, now());
        let (step, stage, micro_batch, layer, bytes, peer) = (-1, -1, -1, -1, -1, -1);
        Event { name, kind, start, end: start, step, stage, micro_batch, layer, bytes, peer, link: 0 }
    }

    pub(super) fn communication(
        kind: EventKind,
        name: Name,
        bytes: usize,
        link: i64,
        peer: Option<usize>,
    ) -> Event {
        let peer = peer.map_or(-1, |peer| peer as i64);
        Event { bytes: bytes as i64, link, peer, ..Event::new(name, kind) }
    }

    /// Returns the event of handing the message of this flight to MPI, which begins now.
    pub(super) fn communicated(self) -> Event {
        Event { kind: EventKind::Communication as i64, start: now(), ..self }
    }

    /// Returns this event with the present as its end.
    pub(super) fn ended(self) -> Event {
        Event { end: now(), ..self }
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

static ORIGIN: LazyLock<Instant> = LazyLock::new(Instant::now);

/// Returns the time on this process's clock in nanoseconds.
pub fn now() -> i64 {
    ORIGIN.elapsed().as_nanos() as i64
}

#[cfg(test)]
mod tests {
    use super::Name;

    #[test]
    fn names_are_listed_in_the_order_of_their_numbers() {
        assert!(Name::ALL.iter().enumerate().all(|(number, (name, _))| *name as usize == number));
    }
}
