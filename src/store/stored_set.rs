//! [`StoredSet`]: all samples of a set in the memory of the job.

use std::ops::Range;
use std::time::Duration;

use super::exchange::{Home, SampleExchange};
use super::{SharedFiles, Source, StoreRanks, read_block, row_words};
use crate::Result;
use crate::comm::{SharedMemory, shard};
use crate::dataset::{Dataset, Hdf5Set, ReplicaRows, RowBuffer, SampleBlocks, Sampler, Targets};
use crate::nn::Features;

/// A set whose samples are all in the job's memory. Every rank reads its share of the blocks, and
/// its node keeps it.
pub struct StoredSet {
    source: Source,
    blocks: SampleBlocks,
    shelves: Shelves,
    exchange: Option<SampleExchange>,
    /// The words of one sample.
    row: Vec<u64>,
}

/// The places of all samples in the memory of the nodes.
struct Shelves {
    memory: SharedMemory,
    /// The first sample of every rank's share, and then the number of samples.
    shares: Vec<usize>,
    /// For every rank of this node, the word at which its share begins.
    starts: Vec<Option<usize>>,
    row_words: usize,
}

impl Shelves {
    /// Returns the rank that has read a sample.
    fn home(&self, sample: usize) -> usize {
        // shares may be empty: the last that begins at the sample or before has it
        self.shares.partition_point(|first| *first <= sample) - 1
    }

    /// Copies the words of a sample to `row` if it is on this node.
    fn read(&self, sample: usize, row: &mut [u64]) -> bool {
        let home = self.home(sample);
        let start = self.starts[home];
        if let Some(start) = start {
            self.memory.read(start + (sample - self.shares[home]) * self.row_words, row);
        }
        start.is_some()
    }
}

impl Home for Shelves {
    fn rank(&self, _step: u64, sample: usize) -> usize {
        self.home(sample)
    }

    fn copy(&mut self, _step: u64, sample: usize, row: &mut [u64]) -> Result<()> {
        assert!(self.read(sample, row), "a rank's share is on its node");
        Ok(())
    }
}

/// Returns the first sample of every rank's share of `blocks`, and then their number: whole blocks, as
/// many on each rank.
fn shares(blocks: &SampleBlocks, num_ranks: usize) -> Vec<usize> {
    let first = |rank: usize| {
        let share = shard(blocks.num_blocks(), rank, num_ranks);
        if share.start == blocks.num_blocks() {
            blocks.num_samples()
        } else {
            blocks.samples(share.start).start
        }
    };
    (0..num_ranks).map(first).chain([blocks.num_samples()]).collect()
}

impl StoredSet {
    /// Returns the bytes that this rank's node keeps of samples of `files` that are cut into `blocks`.
    /// Not collective.
    pub fn bytes(ranks: &StoreRanks, files: &Hdf5Set, blocks: &SampleBlocks) -> usize {
        let shares = shares(blocks, ranks.all.size());
        let own = (0..ranks.all.size()).filter(|rank| ranks.nodes[*rank] == ranks.own_node());
        let num_samples: usize = own.map(|rank| shares[rank + 1] - shares[rank]).sum();
        num_samples.saturating_mul(row_words(&files.row_format()) * size_of::<u64>())
    }

    /// Allocates memory for the samples `range` of `files`, and reads them: every rank its share of
    /// `blocks`, into which they are cut. Calls `after_block` after each block, with the number of
    /// blocks of this rank. Collective.
    ///
    /// # Errors
    /// There is not enough shared memory, or a rank cannot read its share: the same error on every
    /// rank.
    pub fn load(
        ranks: &StoreRanks,
        files: &SharedFiles,
        range: Range<usize>,
        blocks: SampleBlocks,
        after_block: &mut dyn FnMut(usize),
    ) -> Result<StoredSet> {
        let source = Source::new(files, range.clone());
        let (own, row_words) = (ranks.all.rank(), source.row_words());
        let shares = shares(&blocks, ranks.all.size());
        let (mut starts, mut num_words) = (vec![None; ranks.all.size()], 0);
        for rank in (0..ranks.all.size()).filter(|rank| ranks.nodes[*rank] == ranks.own_node()) {
            starts[rank] = Some(num_words);
            num_words += (shares[rank + 1] - shares[rank]) * row_words;
        }
        let memory = SharedMemory::new(&ranks.all, &ranks.node, num_words)?;
        let mut read = || {
            let (files, first) = (files.borrow(), range.start + shares[own]);
            let share = first..range.start + shares[own + 1];
            // blocks of the files are smaller than those that ranks share, and stay in a cache
            let blocks = files.blocks().within(&share);
            let (mut buffer, start) = (RowBuffer::default(), starts[own].unwrap_or_default());
            for block in 0..blocks.num_blocks() {
                let rows = blocks.samples(block);
                let at = start + rows.start * row_words;
                let rows = first + rows.start..first + rows.end;
                read_block(&files, rows, &mut buffer, |row, words| {
                    memory.write(at + row * row_words, words)
                })?;
                after_block(blocks.num_blocks());
            }
            Ok(())
        };
        ranks.all.agree(read())?;
        let exchange = (ranks.all_nodes().len() > 1).then(|| SampleExchange::new(ranks, row_words));
        let shelves = Shelves { memory, shares, starts, row_words };
        Ok(StoredSet { source, blocks, shelves, exchange, row: vec![0; row_words] })
    }
}

impl Dataset for StoredSet {
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
        self.blocks.clone()
    }

    fn begin_step(
        &mut self,
        sampler: &Sampler,
        rows: &ReplicaRows<'_>,
        step: u64,
        next: Option<u64>,
    ) -> Result<()> {
        match &mut self.exchange {
            Some(exchange) => exchange.begin_step(&mut self.shelves, sampler, rows, step, next),
            None => Ok(()),
        }
    }

    fn waited(&self) -> Duration {
        let direct = self.source.files.borrow().waited();
        direct + self.exchange.as_ref().map_or(Duration::ZERO, SampleExchange::waited)
    }

    fn finish(&mut self) {
        self.exchange.iter_mut().for_each(SampleExchange::finish);
    }

    fn read(&mut self, samples: &[usize], inputs: &mut [f32], targets: &mut [f32]) -> Result<()> {
        let StoredSet { source, shelves, exchange, row, .. } = self;
        let exchange = exchange.as_ref();
        source.decode(samples, inputs, targets, row, |sample, row| {
            Ok(shelves.read(sample, row) || exchange.is_some_and(|arrived| arrived.copy(sample, row)))
        })
    }
}
