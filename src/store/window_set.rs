//! [`WindowSet`]: the blocks around the present step in the memory of the nodes, read ahead.

use std::ops::Range;
use std::thread;
use std::time::{Duration, Instant};

use super::exchange::{Home, SampleExchange};
use super::loader::{Loader, Tickets};
use super::shelf::Shelf;
use super::{SharedFiles, Source, StoreRanks, row_words};
use crate::Result;
use crate::comm::{self, Communicator};
use crate::dataset::{BlockOrder, Dataset, EpochOrder, Hdf5Set, ReplicaRows, SampleBlocks, Sampler, Targets};
use crate::nn::Features;
use crate::trace::{self, Name};

/// A set of which a node keeps the blocks of two windows: the one from which samples come, and the
/// next, which is being read.
pub struct WindowSet {
    source: Source,
    /// The ranks of this node.
    node: Communicator,
    window: Window,
    exchange: Option<SampleExchange>,
    /// True if the files' pages stay in the system's cache until they are read again.
    is_cached: bool,
    /// The step that has begun.
    step: Option<u64>,
    /// The words of one sample.
    row: Vec<u64>,
}

/// The blocks in memory.
struct Window {
    shelf: Shelf,
    tickets: Tickets,
    /// The ranks of every node.
    members: Vec<Vec<usize>>,
    /// This rank's number on its node.
    local_rank: usize,
    steps_per_epoch: u64,
    /// The orders of this step's epoch and of the next step's.
    orders: Vec<EpochOrder>,
    loader: Option<Loader>,
    waited: Duration,
}

/// Returns the number of slots that a node needs for `order` and steps of `batch_size` samples.
fn num_slots(order: &BlockOrder, batch_size: usize, num_nodes: usize) -> usize {
    let blocks = order.blocks();
    let mean = (blocks.num_samples() / blocks.num_blocks().max(1)).max(1);
    let in_window = order.window().saturating_mul(mean);
    // samples of the next step are sent to other nodes already, and the last window of an epoch may
    // be short
    let num_windows = match num_nodes {
        1 => 1 + batch_size.div_ceil(in_window),
        _ => 2 + (2 * batch_size).div_ceil(in_window),
    };
    let needed = num_windows.saturating_mul(order.window()).min(2 * blocks.num_blocks());
    needed.div_ceil(num_nodes) + 1
}

/// Returns the bytes of shared memory that a [`WindowSet`] takes on every node.
pub fn window_bytes(order: &BlockOrder, files: &Hdf5Set, batch_size: usize, num_nodes: usize) -> usize {
    let slot = order.blocks().largest().saturating_mul(row_words(&files.row_format()) * size_of::<u64>());
    num_slots(order, batch_size, num_nodes).saturating_mul(slot)
}

impl WindowSet {
    /// Makes room for the samples `range` of `files`, which are read in `order` in steps of
    /// `batch_size`. Threads read blocks from the first step on; past the system's page cache unless
    /// `is_cached`. Collective.
    ///
    /// # Errors
    /// There is not enough shared memory: the same error on every rank.
    pub fn open(
        ranks: &StoreRanks,
        files: &SharedFiles,
        range: Range<usize>,
        order: BlockOrder,
        batch_size: usize,
        is_cached: bool,
    ) -> Result<WindowSet> {
        let source = Source::new(files, range);
        let (nodes, row_words) = (ranks.all_nodes(), source.row_words());
        let num_slots = num_slots(&order, batch_size, nodes.len());
        let shelf = Shelf::new(&ranks.all, &ranks.node, num_slots, order.blocks().largest(), row_words)?;
        let node = nodes.iter().position(|node| *node == ranks.own_node()).unwrap_or_default();
        let on = |node: usize| (0..ranks.nodes.len()).filter(|rank| ranks.nodes[*rank] == node).collect();
        let members = nodes.iter().map(|node| on(*node)).collect();
        let steps_per_epoch = order.blocks().num_samples().div_ceil(batch_size) as u64;
        let tickets = Tickets { order, node, num_nodes: nodes.len() };
        let window = Window {
            shelf,
            tickets,
            members,
            local_rank: ranks.node.rank(),
            steps_per_epoch,
            orders: Vec::new(),
            loader: None,
            waited: Duration::ZERO,
        };
        let exchange = (nodes.len() > 1).then(|| SampleExchange::new(ranks, row_words));
        let node = ranks.node.clone();
        Ok(WindowSet { source, node, window, exchange, is_cached, step: None, row: vec![0; row_words] })
    }
}

impl Window {
    /// Returns the number of the order of the epoch of `step`, which is computed if it is new.
    fn order(&mut self, step: u64) -> usize {
        let epoch = step / self.steps_per_epoch;
        self.orders.retain(|order| order.epoch + 1 >= epoch);
        match self.orders.iter().position(|order| order.epoch == epoch) {
            Some(known) => known,
            None => {
                self.orders.push(self.tickets.order.epoch(epoch));
                self.orders.len() - 1
            }
        }
    }

    /// Returns the epoch and the place of the block of a sample of `step`, if its order is known.
    fn place(&self, step: u64, sample: usize) -> Option<(u64, usize)> {
        let epoch = step / self.steps_per_epoch;
        let order = self.orders.iter().find(|order| order.epoch == epoch)?;
        Some((epoch, order.place(self.tickets.order.blocks().of(sample))))
    }

    /// Releases the blocks before the window of `step`.
    fn release(&mut self, sampler: &Sampler, step: u64) -> u64 {
        let order = self.order(step);
        let order = &self.orders[order];
        let first = order.window_start(sampler.positions(step).start);
        let ticket = self.tickets.from(order.epoch, first);
        self.shelf.release(self.local_rank, ticket);
        ticket
    }

    /// Returns the error if the block of a ticket cannot be read.
    fn check(&self, ticket: u64) -> Result<()> {
        while self.shelf.failure(ticket)? {
            // another rank ends the job, perhaps after a checkpoint for which it needs this one
            comm::advance();
            thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// Copies the words of a sample of `step` to `row` if its block is, or will be, on this node.
    fn copy(&mut self, step: u64, sample: usize, row: &mut [u64]) -> Result<bool> {
        let Some((epoch, place)) = self.place(step, sample) else { return Ok(false) };
        let Some(ticket) = self.tickets.at(epoch, place) else { return Ok(false) };
        if !self.shelf.has_room(self.local_rank, ticket) {
            return Ok(false);
        }
        self.wait(ticket)?;
        let blocks = self.tickets.order.blocks();
        self.shelf.read(ticket, sample - blocks.samples(blocks.of(sample)).start, row);
        Ok(true)
    }

    /// Waits until the block of a ticket is there, and meanwhile advances what other ranks wait for.
    fn wait(&mut self, ticket: u64) -> Result<()> {
        if self.shelf.is_filled(ticket) {
            return Ok(());
        }
        let began = Instant::now();
        let span = trace::work(Name::DataWait);
        while !self.shelf.is_filled(ticket) {
            self.check(ticket)?;
            comm::advance();
            thread::sleep(Duration::from_micros(50));
        }
        drop(span);
        self.waited += began.elapsed();
        Ok(())
    }
}

/// The homes of the samples in a window, and the files for samples that it has no room for.
struct WindowHomes<'a> {
    window: &'a mut Window,
    source: &'a Source,
}

impl Home for WindowHomes<'_> {
    fn rank(&self, step: u64, sample: usize) -> usize {
        let Some((_, place)) = self.window.place(step, sample) else { return 0 };
        let node = &self.window.members[place % self.window.members.len()];
        node[place / self.window.members.len() % node.len()]
    }

    fn copy(&mut self, step: u64, sample: usize, row: &mut [u64]) -> Result<()> {
        if self.window.copy(step, sample, row)? { Ok(()) } else { self.source.copy(sample, row) }
    }
}

impl Dataset for WindowSet {
    fn source(&self) -> String {
        self.source.files.borrow().source()
    }

    fn num_samples(&self) -> usize {
        self.source.range.len()
    }

    fn features(&self) -> Features {
        self.source.files.borrow().features()
    }

    fn targets(&self) -> Targets {
        self.source.files.borrow().targets()
    }

    fn blocks(&self) -> SampleBlocks {
        self.window.tickets.order.blocks().clone()
    }

    fn begin_step(
        &mut self,
        sampler: &Sampler,
        rows: &ReplicaRows<'_>,
        step: u64,
        next: Option<u64>,
    ) -> Result<()> {
        let WindowSet { source, window, exchange, is_cached, .. } = self;
        window.order(next.unwrap_or(step));
        let ticket = window.release(sampler, step);
        if window.loader.is_none() {
            if self.node.is_root() {
                window.shelf.begin(ticket);
            }
            self.node.barrier();
            let (range, tickets) = (source.range.clone(), window.tickets.clone());
            let mut files = source.files.borrow().reader();
            if !*is_cached {
                files.bypass_cache();
            }
            window.loader = Some(Loader::start(files, range, window.shelf, tickets)?);
        }
        self.step = Some(step);
        match exchange {
            Some(exchange) => {
                let homes = &mut WindowHomes { window, source };
                exchange.begin_step(homes, sampler, rows, step, next)
            }
            None => Ok(()),
        }
    }

    fn waited(&self) -> Duration {
        let direct = self.source.files.borrow().waited();
        direct + self.window.waited + self.exchange.as_ref().map_or(Duration::ZERO, SampleExchange::waited)
    }

    fn finish(&mut self) {
        self.exchange.iter_mut().for_each(SampleExchange::finish);
        self.window.loader = None;
    }

    fn read(&mut self, samples: &[usize], inputs: &mut [f32], targets: &mut [f32]) -> Result<()> {
        let WindowSet { source, window, exchange, step, row, .. } = self;
        let (step, exchange) = (*step, exchange.as_ref());
        source.decode(samples, inputs, targets, row, |sample, row| {
            let Some(step) = step else { return Ok(false) };
            Ok(exchange.is_some_and(|arrived| arrived.copy(sample, row)) || window.copy(step, sample, row)?)
        })
    }
}
