//! The samples of files in the memory of the job, so that a step never waits for a disk.
//!
//! Every sample has a *home*: a rank that reads its block from the file, and the node of that rank,
//! which keeps it in memory that the ranks of the node share, in the type of the file. A rank reads
//! samples of its own node from that memory. Samples of other nodes are sent to it one step ahead.
//!
//! * [`StoredSet`] keeps all samples of a set. Each rank reads its share of the blocks once, before
//!   training.
//! * [`WindowSet`] keeps the blocks of the window of a [`BlockOrder`](crate::dataset::BlockOrder)
//!   from which the samples of the next steps come, and of the window after it. A thread of each
//!   rank reads blocks ahead.
//!
//! Invariants: once an order of the samples is chosen, it does not depend on any of this; a sample
//! that is not in memory, for whatever reason, is read from the file; a rank that waits for a block
//! advances everything that other ranks wait for; and an error of a rank's thread is found by every
//! rank that waits for its blocks.

mod exchange;
mod loader;
mod shelf;
mod stored_set;
mod window_set;

pub use stored_set::StoredSet;
pub use window_set::{WindowSet, window_bytes};

use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;

use crate::Result;
use crate::comm::Communicator;
use crate::dataset::{Dataset, Hdf5Set, RowBuffer, RowFormat};

/// The ranks of a job as the data store sees them.
#[derive(Clone)]
pub struct StoreRanks {
    /// All ranks, for messages about samples alone.
    pub all: Communicator,
    /// The ranks of this node.
    pub node: Communicator,
    /// The node of every rank, as the number of its first rank.
    pub nodes: Vec<usize>,
    /// The replica that every rank belongs to.
    pub replicas: Vec<usize>,
}

impl StoreRanks {
    /// Gathers the places of the ranks of `all`, of which those of `node` share memory, and those of
    /// `data` are this rank's replicas. Collective.
    ///
    /// # Errors
    /// None but those of a gather.
    pub fn new(all: Communicator, node: Communicator, data: &Communicator) -> Result<StoreRanks> {
        let mut leader = [all.rank() as i64];
        node.broadcast(&mut leader, 0)?;
        let own = [leader[0], data.rank() as i64];
        let mut places = vec![0; own.len() * all.size()];
        all.all_gather(&own, &mut places)?;
        let nodes = places.chunks_exact(2).map(|place| place[0] as usize).collect();
        let replicas = places.chunks_exact(2).map(|place| place[1] as usize).collect();
        Ok(StoreRanks { all, node, nodes, replicas })
    }

    /// Returns the node of this rank.
    fn own_node(&self) -> usize {
        self.nodes[self.all.rank()]
    }

    /// Returns the nodes in the order of their numbers.
    fn all_nodes(&self) -> Vec<usize> {
        (0..self.nodes.len()).filter(|rank| self.nodes[*rank] == *rank).collect()
    }
}

/// Samples of files, which several sets share.
type SharedFiles = Rc<RefCell<Hdf5Set>>;

/// Consecutive samples of a set of files.
struct Source {
    files: SharedFiles,
    range: Range<usize>,
    format: RowFormat,
}

impl Source {
    fn new(files: &SharedFiles, range: Range<usize>) -> Source {
        let format = files.borrow().row_format();
        Source { files: Rc::clone(files), range, format }
    }

    /// Returns the number of words in which a sample is kept.
    fn row_words(&self) -> usize {
        row_words(&self.format)
    }

    /// Copies the words of a sample to `row`, from the files.
    fn copy(&self, sample: usize, row: &mut [u64]) -> Result<()> {
        let sample = self.range.start + sample;
        read_block(&self.files.borrow(), sample..sample + 1, &mut RowBuffer::default(), |_, words| {
            row.copy_from_slice(words);
        })
    }

    /// Converts samples whose words `copy` copies to `row`; those for which it returns false are read
    /// from the files.
    fn decode(
        &mut self,
        samples: &[usize],
        inputs: &mut [f32],
        targets: &mut [f32],
        row: &mut [u64],
        mut copy: impl FnMut(usize, &mut [u64]) -> Result<bool>,
    ) -> Result<()> {
        let num = samples.len().max(1);
        let (len, targets_len) = (inputs.len() / num, targets.len() / num);
        let mut missing = Vec::new();
        for (at, &sample) in samples.iter().enumerate() {
            if copy(sample, row)? {
                let inputs = &mut inputs[at * len..][..len];
                let targets = &mut targets[at * targets_len..][..targets_len];
                self.format.decode(bytemuck::cast_slice(row), inputs, targets);
            } else {
                missing.push(at);
            }
        }
        if missing.is_empty() {
            return Ok(());
        }
        // together, so that a block is unpacked once
        let wanted: Vec<usize> = missing.iter().map(|at| self.range.start + samples[*at]).collect();
        let mut found = [vec![0.0; wanted.len() * len], vec![0.0; wanted.len() * targets_len]];
        let [found_inputs, found_targets] = &mut found;
        self.files.borrow_mut().read(&wanted, found_inputs, found_targets)?;
        for (number, at) in missing.into_iter().enumerate() {
            inputs[at * len..][..len].copy_from_slice(&found_inputs[number * len..][..len]);
            let targets = &mut targets[at * targets_len..][..targets_len];
            targets.copy_from_slice(&found_targets[number * targets_len..][..targets_len]);
        }
        Ok(())
    }
}

/// Returns the number of words in which a sample of `format` is kept.
fn row_words(format: &RowFormat) -> usize {
    format.bytes().div_ceil(size_of::<u64>())
}

/// Reads the samples `rows` of `files` and passes the words of each to `keep`, with its number
/// among them.
fn read_block(
    files: &Hdf5Set,
    rows: Range<usize>,
    buffer: &mut RowBuffer,
    mut keep: impl FnMut(usize, &[u64]),
) -> Result<()> {
    let mut words = vec![0_u64; row_words(&files.row_format())];
    let first = rows.start;
    files.read_rows(rows, buffer, |row, inputs, targets| {
        join(inputs, targets, &mut words);
        keep(row - first, &words);
    })
}

/// Writes the bytes of the inputs and of the targets of a sample to `words`.
fn join(inputs: &[u8], targets: &[u8], words: &mut [u64]) {
    let bytes: &mut [u8] = bytemuck::cast_slice_mut(words);
    bytes[..inputs.len()].copy_from_slice(inputs);
    bytes[inputs.len()..][..targets.len()].copy_from_slice(targets);
}
