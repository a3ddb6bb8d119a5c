//! [`Loader`]: the thread of a rank that reads blocks ahead. It does not communicate.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::read_block;
use super::shelf::Shelf;
use crate::dataset::{BlockOrder, EpochOrder, Hdf5Set, RowBuffer};
use crate::trace::{self, Record};
use crate::{Error, Result};

/// The time after which a thread that cannot take a ticket tries again.
const PAUSE: Duration = Duration::from_micros(500);

/// The rows after which a thread offers its core to others: a rank that has to wait for one delays
/// all ranks.
const ROWS_AT_A_TIME: usize = 32;

/// The blocks of a node in the order in which they are needed: in every epoch, those at every
/// `num_nodes`-th place from `node` on.
#[derive(Clone)]
pub(super) struct Tickets {
    pub(super) order: BlockOrder,
    pub(super) node: usize,
    pub(super) num_nodes: usize,
}

impl Tickets {
    /// Returns the number of blocks of this node in an epoch.
    fn in_epoch(&self) -> u64 {
        (self.order.blocks().num_blocks() + self.num_nodes - 1 - self.node).div_euclid(self.num_nodes) as u64
    }

    /// Returns the epoch and the place of a ticket.
    fn place(&self, ticket: u64) -> (u64, usize) {
        let (epoch, number) = (ticket / self.in_epoch(), ticket % self.in_epoch());
        (epoch, number as usize * self.num_nodes + self.node)
    }

    /// Returns the ticket of the first block of this node at `place` or later in an epoch.
    pub(super) fn from(&self, epoch: u64, place: usize) -> u64 {
        epoch * self.in_epoch() + (place + self.num_nodes - 1 - self.node).div_euclid(self.num_nodes) as u64
    }

    /// Returns the ticket of the block at `place` in an epoch, if it is this node's.
    pub(super) fn at(&self, epoch: u64, place: usize) -> Option<u64> {
        (place % self.num_nodes == self.node).then(|| self.from(epoch, place))
    }
}

/// A thread that reads blocks until the value is dropped.
pub(super) struct Loader {
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<Record>>,
}

impl Loader {
    /// Starts reading the blocks of `tickets`, among the samples `range` of `files`, to `shelf`. Not
    /// collective.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub(super) fn start(
        files: Hdf5Set,
        range: Range<usize>,
        shelf: Shelf,
        tickets: Tickets,
    ) -> Result<Loader> {
        let is_over = Arc::new(AtomicBool::new(false));
        let (over, is_traced) = (Arc::clone(&is_over), trace::is_on());
        let work = move || {
            if is_traced {
                trace::start_loader();
            }
            read_ahead(&files, &range, shelf, &tickets, &over);
            trace::finish()
        };
        let thread = thread::Builder::new().name("loader".into()).spawn(work);
        let thread = thread.map_err(|error| Error::failed("starting a thread that reads samples", error))?;
        Ok(Loader { is_over, thread: Some(thread) })
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        if let Some(Ok(record)) = self.thread.take().map(JoinHandle::join) {
            trace::append(record);
        }
    }
}

/// Reads blocks until `is_over`.
fn read_ahead(files: &Hdf5Set, range: &Range<usize>, shelf: Shelf, tickets: &Tickets, is_over: &AtomicBool) {
    if tickets.in_epoch() == 0 {
        // there are fewer blocks than nodes
        return;
    }
    let mut buffer = RowBuffer::default();
    let mut known: Option<EpochOrder> = None;
    while !is_over.load(Ordering::Relaxed) {
        let Some(ticket) = shelf.take() else {
            thread::sleep(PAUSE);
            continue;
        };
        let (epoch, place) = tickets.place(ticket);
        let order = known.take().filter(|known| known.epoch == epoch);
        let order = order.unwrap_or_else(|| tickets.order.epoch(epoch));
        let rows = tickets.order.blocks().samples(order.block(place));
        let rows = range.start + rows.start..range.start + rows.end;
        known = Some(order);
        let outcome = read_block(files, rows, &mut buffer, |row, words| {
            if row % ROWS_AT_A_TIME == 0 {
                thread::yield_now();
            }
            shelf.write(ticket, row, words);
        });
        match outcome {
            Ok(()) => shelf.fill(ticket),
            Err(error) => shelf.fail(ticket, &error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dataset::SampleBlocks;

    #[test]
    fn every_block_is_one_nodes_and_its_tickets_follow_the_order() {
        for (num_blocks, num_nodes) in [(7, 1), (7, 2), (7, 3), (3, 3), (12, 5)] {
            let order = BlockOrder::new(SampleBlocks::every(4, 4 * num_blocks), 2, 1);
            let all: Vec<Tickets> =
                (0..num_nodes).map(|node| Tickets { order: order.clone(), node, num_nodes }).collect();
            for epoch in 0..3 {
                for place in 0..num_blocks {
                    let found: Vec<u64> = all.iter().filter_map(|node| node.at(epoch, place)).collect();
                    assert_eq!(found.len(), 1);
                    assert_eq!(all[place % num_nodes].place(found[0]), (epoch, place));
                    for node in &all {
                        let (next_epoch, next) = node.place(node.from(epoch, place));
                        assert!((next_epoch, next) >= (epoch, place), "{next_epoch} {next}");
                        assert!(next_epoch > epoch || next < place + num_nodes);
                    }
                }
            }
        }
    }
}
