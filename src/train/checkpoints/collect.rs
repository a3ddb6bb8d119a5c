//! Rank 0 collects the state from the ranks that provide its parts: the thread that writes a
//! checkpoint asks for bundles ([`CollectedState`]), and the rank's own thread, the only one that uses
//! MPI, requests and receives them ([`StateCollector`]).
//!
//! ```text
//! thread of the writer              rank 0                               other ranks
//! CollectedState ── wanted ──▶ StateCollector ── request of a bundle ──▶ Providing
//!                ◀── arrived ──               ◀────── its values ──────
//!                ─── used ────▶  (memory of messages, for the next ones)
//! ```
//!
//! Invariants: messages arrive in the order in which bundles are wanted, and by rank within a bundle;
//! no more than [`AHEAD`] bundles are on their way, so the memory is bounded however slow the disk
//! is; a thread that fails leaves messages behind, which its next attempt discards.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use super::copy::StateCopy;
use super::provide::{END, REQUEST, VALUES};
use crate::checkpoint::StateSource;
use crate::comm::{Background, Communicator, Front, Pending};
use crate::parallel::data::StateParts;

/// The number of bundles that are on their way to the thread.
pub(in crate::train) const AHEAD: usize = 2;

/// A wish of the thread.
enum Want {
    /// The values of a bundle.
    Bundle(usize),
    /// Nothing more: it has ended with the checkpoint.
    Nothing,
}

/// The whole state, as the thread that writes it sees it.
pub(super) struct CollectedState {
    parts: Arc<StateParts>,
    /// The copy of rank 0's own parts.
    pub(super) copy: StateCopy,
    wanted: Sender<Want>,
    arrived: Receiver<Vec<f32>>,
    used: Sender<Vec<f32>>,
    /// The number of messages that were asked for and have not been received.
    num_expected: usize,
    whole: Vec<f32>,
}

/// Rank 0's side of the messages.
pub(super) struct StateCollector {
    channel: Communicator,
    parts: Arc<StateParts>,
    wanted: Receiver<Want>,
    arrived: Sender<Vec<f32>>,
    used: Receiver<Vec<f32>>,
    requests: Vec<Pending<Vec<i64>>>,
    /// The messages on their way, in the order in which they were asked for.
    receiving: VecDeque<Pending<Front<Vec<f32>>>>,
    /// The memory of messages that is not in use.
    free: Vec<Vec<f32>>,
    phase: CollectorPhase,
}

/// The phase of a [`StateCollector`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CollectorPhase {
    /// The thread may ask for bundles.
    Open,
    /// The thread has ended, and the ranks will be told when the last messages have arrived.
    Ending,
    /// The ranks have been told.
    Ended,
}

/// Connects a thread that reads the state with the messages of rank 0.
pub(super) fn connect(
    all: Communicator,
    parts: &Arc<StateParts>,
    copy: StateCopy,
) -> (CollectedState, StateCollector) {
    let ((wanted, wants), (arrivals, arrived), (used, returned)) = (channel(), channel(), channel());
    let state = CollectedState {
        parts: Arc::clone(parts),
        copy,
        wanted,
        arrived,
        used,
        num_expected: 0,
        whole: Vec::new(),
    };
    let collector = StateCollector {
        channel: all,
        parts: Arc::clone(parts),
        wanted: wants,
        arrived: arrivals,
        used: returned,
        requests: Vec::new(),
        receiving: VecDeque::new(),
        free: Vec::new(),
        phase: CollectorPhase::Ended,
    };
    (state, collector)
}

/// A bundle of one rank, of which the values before `at` have been used.
struct ReceivedBundle {
    rank: usize,
    values: Vec<f32>,
    at: usize,
}

impl CollectedState {
    /// Asks for `bundle`, if there is such a bundle.
    fn want(&mut self, bundle: usize) {
        if bundle < self.copy.num_bundles() {
            let providers = self.parts.providers(bundle % self.parts.bundles().len());
            self.num_expected += providers.keys().filter(|rank| **rank != 0).count();
            // if rank 0 has given up, the next message does not arrive, which is the error
            let _ = self.wanted.send(Want::Bundle(bundle));
        }
    }

    fn receive(&mut self) -> io::Result<Vec<f32>> {
        let values = self.arrived.recv().map_err(|_| io::Error::other("training has ended"))?;
        self.num_expected -= 1;
        Ok(values)
    }

    fn give_back(&self, values: Vec<f32>) {
        // nobody needs the memory if rank 0 has given up
        let _ = self.used.send(values);
    }

    /// Writes the tensors of `bundle`, which were asked for.
    fn read_bundle(
        &mut self,
        bundle: usize,
        write: &mut dyn FnMut(&[f32]) -> io::Result<()>,
    ) -> io::Result<()> {
        let parts = Arc::clone(&self.parts);
        let of_section = bundle % parts.bundles().len();
        let mut received: Vec<ReceivedBundle> = Vec::new();
        for rank in parts.providers(of_section).into_keys().filter(|rank| *rank != 0) {
            received.push(ReceivedBundle { rank, values: self.receive()?, at: 0 });
        }
        let (own, mut own_at) = (self.copy.bundle(bundle).unwrap_or_default(), 0);
        let lengths: Vec<usize> = parts.tensor_lengths().collect();
        for number in parts.bundles()[of_section].clone() {
            self.whole.resize(lengths[number], 0.0);
            for part in parts.parts_of(number) {
                let (values, at) = match received.binary_search_by_key(&part.rank, |message| message.rank) {
                    Ok(index) => {
                        let ReceivedBundle { values, at, .. } = &mut received[index];
                        (&values[..], at)
                    }
                    Err(_) => (own, &mut own_at),
                };
                let end = *at + part.block.len();
                part.shard.insert(part.block, &values[*at..end], &mut self.whole);
                *at = end;
            }
            write(&self.whole)?;
        }
        received.into_iter().for_each(|message| self.give_back(message.values));
        Ok(())
    }
}

impl StateSource for CollectedState {
    fn read(&mut self, write: &mut dyn FnMut(&[f32]) -> io::Result<()>) -> io::Result<()> {
        while self.num_expected > 0 {
            let left = self.receive()?;
            self.give_back(left);
        }
        (0..AHEAD).for_each(|bundle| self.want(bundle));
        for bundle in 0..self.copy.num_bundles() {
            self.read_bundle(bundle, write)?;
            self.want(bundle + AHEAD);
        }
        Ok(())
    }

    fn end(&mut self) {
        // nobody waits for it if rank 0 has given up
        let _ = self.wanted.send(Want::Nothing);
    }
}

impl StateCollector {
    /// Expects the requests of a thread.
    pub(super) fn begin(&mut self) {
        self.phase = CollectorPhase::Open;
    }

    /// Accepts that the thread has ended, or could not be started.
    pub(super) fn end(&mut self) {
        self.phase = CollectorPhase::Ending;
    }

    /// Returns true if all ranks have been told that no request follows.
    pub(super) fn is_done(&self) -> bool {
        self.phase == CollectorPhase::Ended && self.requests.is_empty()
    }

    fn request(&mut self, bundle: i64, rank: usize) {
        let request = self.channel.start_send(vec![bundle], rank, REQUEST);
        self.requests.push(request.expect("the rank and the tag exist, and host memory needs no staging"));
    }

    fn start_receive(&mut self, rank: usize, len: usize) {
        let fitting = (0..self.free.len()).filter(|at| self.free[*at].len() >= len);
        let buffer = match fitting.min_by_key(|at| self.free[*at].len()) {
            Some(at) => self.free.swap_remove(at),
            None => {
                // in place of one that is too short
                self.free.pop();
                vec![0.0; len]
            }
        };
        let receive = self.channel.start_receive(Front { buffer, len }, rank, VALUES);
        self.receiving.push_back(receive.expect("the rank and the tag exist"));
    }
}

impl Background for StateCollector {
    fn advance(&mut self) -> bool {
        self.free.extend(self.used.try_iter());
        while let Ok(want) = self.wanted.try_recv() {
            let Want::Bundle(bundle) = want else {
                self.end();
                continue;
            };
            let providers = self.parts.providers(bundle % self.parts.bundles().len());
            for (rank, len) in providers.into_iter().filter(|(rank, _)| *rank != 0) {
                self.request(bundle as i64, rank);
                self.start_receive(rank, len);
            }
        }
        while self.receiving.front_mut().is_some_and(Pending::test) {
            if let Some(receive) = self.receiving.pop_front() {
                // a thread that has ended needs no values
                let _ = self.arrived.send(receive.wait().buffer);
            }
        }
        if self.phase == CollectorPhase::Ending && self.receiving.is_empty() {
            (1..self.channel.size()).for_each(|rank| self.request(END, rank));
            self.phase = CollectorPhase::Ended;
        }
        for at in (0..self.requests.len()).rev() {
            if self.requests[at].test() {
                drop(self.requests.swap_remove(at).wait());
            }
        }
        self.is_done()
    }
}
