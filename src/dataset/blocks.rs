//! [`SampleBlocks`]: the cut of a dataset into samples that are read and unpacked together.

use std::ops::Range;

use xxhash_rust::xxh3::xxh3_64;

/// Consecutive samples, cut into blocks.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SampleBlocks {
    /// The first sample of each block, and then the number of samples.
    starts: Vec<usize>,
}

impl SampleBlocks {
    /// Cuts `num_samples` samples into blocks of `len ≥ 1`, of which the last may be shorter.
    pub fn every(len: usize, num_samples: usize) -> SampleBlocks {
        let mut starts: Vec<usize> = (0..num_samples).step_by(len).collect();
        starts.push(num_samples);
        SampleBlocks { starts }
    }

    /// Returns the number of blocks.
    pub fn num_blocks(&self) -> usize {
        self.starts.len().saturating_sub(1)
    }

    /// Returns the number of samples.
    pub fn num_samples(&self) -> usize {
        self.starts.last().copied().unwrap_or_default()
    }

    /// Returns the samples of a block.
    pub fn samples(&self, block: usize) -> Range<usize> {
        self.starts[block]..self.starts[block + 1]
    }

    /// Returns the block of a sample.
    pub fn of(&self, sample: usize) -> usize {
        self.starts.partition_point(|start| *start <= sample) - 1
    }

    /// Returns a hash of the cut, by which ranks and starts of a run compare it.
    pub fn hash(&self) -> u64 {
        xxh3_64(bytemuck::cast_slice(&self.starts))
    }

    /// Returns the number of samples in the largest block.
    pub fn largest(&self) -> usize {
        self.starts.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or_default()
    }

    /// Adds the blocks of samples that follow these.
    pub fn append(&mut self, later: &SampleBlocks) {
        let end = self.starts.pop().unwrap_or_default();
        self.starts.extend(later.starts.iter().map(|start| end + start));
    }

    /// Returns the blocks of the samples in `range`, renumbered from 0; the first and the last may
    /// be parts of the blocks here.
    pub fn within(&self, range: &Range<usize>) -> SampleBlocks {
        let inner = self.starts.iter().filter(|start| range.start < **start && **start < range.end);
        let bounds = std::iter::once(&range.start).chain(inner).chain([&range.end]);
        let starts: Vec<usize> = bounds.map(|bound| bound - range.start).collect();
        if range.is_empty() { SampleBlocks { starts: vec![0] } } else { SampleBlocks { starts } }
    }

    /// Joins neighbouring blocks as long as a block has at most `most` samples.
    pub fn joined(&self, most: usize) -> SampleBlocks {
        let mut starts = Vec::new();
        for block in 0..self.num_blocks() {
            let Range { start, end } = self.samples(block);
            if starts.last().is_none_or(|first| end - first > most) {
                starts.push(start);
            }
        }
        starts.push(self.num_samples());
        SampleBlocks { starts }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_cut_joined_and_found() {
        let mut blocks = SampleBlocks::every(4, 10);
        assert_eq!((blocks.num_blocks(), blocks.num_samples(), blocks.largest()), (3, 10, 4));
        blocks.append(&SampleBlocks::every(5, 7));
        assert_eq!(blocks.starts, [0, 4, 8, 10, 15, 17]);
        let found: Vec<usize> = (0..17).map(|sample| blocks.of(sample)).collect();
        assert_eq!(found, [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 3, 3, 3, 4, 4]);
        assert_eq!(blocks.within(&(2..16)).starts, [0, 2, 6, 8, 13, 14]);
        assert_eq!(blocks.within(&(4..10)).starts, [0, 4, 6]);
        assert_eq!(blocks.within(&(3..3)).num_blocks(), 0);
        assert_eq!(blocks.joined(8).starts, [0, 8, 15, 17]);
        assert_eq!(blocks.joined(1).starts, blocks.starts);
        assert_eq!(blocks.joined(100).starts, [0, 17]);
    }
}
