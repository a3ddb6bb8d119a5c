//! [`BlockOrder`]: whole blocks in random order, with their samples mixed within a window of so many
//! blocks, for files that are too large to be read sample by sample.

use std::ops::Range;

use super::blocks::SampleBlocks;
use super::permutation::{Permutation, mix};

/// The order of the samples of every epoch: a new random order of the blocks, cut into windows of
/// consecutive blocks, and a new random order of the samples of each window. It depends on the seed
/// and the blocks alone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockOrder {
    blocks: SampleBlocks,
    window: usize,
    seed: u64,
}

/// The order of one epoch. A *place* is the position of a block in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EpochOrder {
    /// The number of the epoch, from 0.
    pub epoch: u64,
    /// The block at each place.
    blocks: Vec<usize>,
    /// The place of each block.
    places: Vec<usize>,
    /// For each place, the number of samples before it in the epoch, and then that of all.
    starts: Vec<usize>,
    /// The first sample of the block at each place.
    firsts: Vec<usize>,
    window: usize,
    key: u64,
}

impl BlockOrder {
    /// Creates the order of `blocks` in windows of `window ≥ 1` of them.
    pub fn new(blocks: SampleBlocks, window: usize, seed: u64) -> BlockOrder {
        BlockOrder { blocks, window, seed }
    }

    /// Returns the blocks.
    pub fn blocks(&self) -> &SampleBlocks {
        &self.blocks
    }

    /// Returns the number of blocks in a window.
    pub fn window(&self) -> usize {
        self.window
    }

    /// Computes the order of an epoch.
    pub fn epoch(&self, epoch: u64) -> EpochOrder {
        let num_blocks = self.blocks.num_blocks();
        let key = mix(mix(self.seed) ^ epoch);
        let permutation = Permutation::new(num_blocks as u64, key);
        let blocks: Vec<usize> = (0..num_blocks).map(|place| permutation.at(place as u64) as usize).collect();
        let (mut places, mut starts, mut firsts) = (vec![0; num_blocks], vec![0], Vec::new());
        let mut end = 0;
        for (place, &block) in blocks.iter().enumerate() {
            let samples = self.blocks.samples(block);
            places[block] = place;
            firsts.push(samples.start);
            end += samples.len();
            starts.push(end);
        }
        EpochOrder { epoch, blocks, places, starts, firsts, window: self.window, key }
    }
}

impl EpochOrder {
    /// Returns the block at a place.
    pub fn block(&self, place: usize) -> usize {
        self.blocks[place]
    }

    /// Returns the place of a block.
    pub fn place(&self, block: usize) -> usize {
        self.places[block]
    }

    /// Returns the first place of the window that has the sample at `position` of the epoch.
    pub fn window_start(&self, position: usize) -> usize {
        let place = self.starts.partition_point(|start| *start <= position) - 1;
        place - place % self.window
    }

    /// Adds the samples at `positions` of the epoch to `samples`.
    pub fn samples(&self, positions: Range<usize>, samples: &mut Vec<usize>) {
        let mut position = positions.start;
        while position < positions.end {
            let first = self.window_start(position);
            let last = (first + self.window).min(self.blocks.len());
            let (start, end) = (self.starts[first], self.starts[last]);
            let window = (first / self.window) as u64;
            let permutation = Permutation::new((end - start) as u64, mix(self.key ^ mix(window)));
            let within = &self.starts[first..=last];
            for position in position..positions.end.min(end) {
                let mixed = start + permutation.at((position - start) as u64) as usize;
                let place = first + within.partition_point(|start| *start <= mixed) - 1;
                samples.push(self.firsts[place] + mixed - self.starts[place]);
            }
            position = positions.end.min(end);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_hold_whole_blocks_and_every_sample_comes_once() {
        for (num_samples, len, window) in
            [(100, 7, 3), (100, 7, 100), (5, 5, 1), (1, 3, 2), (64, 1, 4), (50, 9, 1)]
        {
            let order = BlockOrder::new(SampleBlocks::every(len, num_samples), window, 11);
            let first = order.epoch(0);
            let (mut samples, mut others) = (Vec::new(), Vec::new());
            first.samples(0..num_samples, &mut samples);
            order.epoch(1).samples(0..num_samples, &mut others);
            assert!(num_samples < 50 || samples != others, "two epochs have one order");
            let mut seen = vec![false; num_samples];
            samples.iter().for_each(|sample| assert!(!std::mem::replace(&mut seen[*sample], true)));
            assert!(seen.iter().all(|seen| *seen));
            for (position, sample) in samples.iter().enumerate() {
                let place = first.place(order.blocks().of(*sample));
                assert_eq!(first.block(place), order.blocks().of(*sample));
                assert_eq!(place - place % window, first.window_start(position));
            }
            for start in 0..num_samples {
                let mut part = Vec::new();
                first.samples(start..num_samples, &mut part);
                assert_eq!(part, samples[start..]);
            }
        }
    }

    #[test]
    fn a_window_is_mixed() {
        let order = BlockOrder::new(SampleBlocks::every(10, 1000), 10, 3).epoch(0);
        let mut samples = Vec::new();
        order.samples(0..100, &mut samples);
        // ten blocks of ten: a sample's neighbours are seldom of its own block
        let same = samples.windows(2).filter(|pair| pair[0] / 10 == pair[1] / 10).count();
        assert!(same < 25, "{same}");
        let ordered = samples.windows(2).filter(|pair| pair[0] < pair[1]).count();
        assert!((30..70).contains(&ordered), "{ordered}");
    }
}
