//! Whole tensors of a model, gathered from the ranks that hold their shards.

use super::layout::Layout;
use crate::comm::Grid;
use crate::nn::hash_values;
use crate::{Error, Result};

/// A function that looks at values of a tensor.
pub type Show<'a> = dyn FnMut(&[f32]) -> Result<()> + 'a;

/// A function that reads this rank's values of one of its tensors and shows them to another
/// function.
pub type ReadTensor<'a> = dyn Fn(usize, &mut Show<'_>) -> Result<()> + 'a;

/// The memory on rank 0 in which whole tensors are assembled.
pub trait Assembly {
    /// Returns the memory for tensor `number` of the model.
    fn tensor(&mut self, number: usize) -> &mut [f32];

    /// Accepts tensor `number`, which is whole.
    ///
    /// # Errors
    /// The tensor is not accepted.
    fn complete(&mut self, number: usize) -> Result<()>;
}

/// Memory for one whole tensor at a time, which a function inspects before the next one.
struct OneAtATime<'a> {
    lengths: Vec<usize>,
    values: Vec<f32>,
    look: &'a mut dyn FnMut(usize, &[f32]) -> Result<()>,
}

impl Assembly for OneAtATime<'_> {
    fn tensor(&mut self, number: usize) -> &mut [f32] {
        self.values.resize(self.lengths[number], 0.0);
        &mut self.values
    }

    fn complete(&mut self, number: usize) -> Result<()> {
        (self.look)(number, &self.values)
    }
}

impl Layout {
    /// Gathers whole tensors, one after the other in logical order, on rank 0 of the world,
    /// straight into their places in `whole`. At most the block of one rank is held in memory
    /// beside `whole`. `read` shows the values of this rank's tensor `number`: the whole block if
    /// `num_replicas` is 1, else the part that this rank keeps. The parts of the first
    /// `num_replicas` replicas make up the block. Collective over the grid.
    ///
    /// # Errors
    /// `read` or `whole` failed (this rank alone).
    pub fn gather(
        &self,
        grid: &Grid,
        num_replicas: usize,
        read: &ReadTensor<'_>,
        whole: &mut dyn Assembly,
    ) -> Result<()> {
        let (rank, is_root) = (grid.all.rank(), grid.all.is_root());
        let mut block = Vec::new();
        for (number, holders) in self.places.iter().enumerate() {
            let tag = (number % (1 << 15)) as i32;
            let local = self.tensors.iter().position(|(other, _)| *other == number);
            for (holder, shard) in holders {
                let (_, stage, tensor) = grid.shape.coordinates(*holder);
                let source = |replica| grid.shape.rank(replica, stage, tensor);
                if !is_root {
                    let is_mine = (0..num_replicas).any(|replica| source(replica) == rank);
                    if let (true, Some(local)) = (is_mine, local) {
                        read(local, &mut |values| grid.all.send(values, 0, tag))?;
                    }
                    continue;
                }
                // a block of whole rows is contiguous, and is received into its place directly
                let mut pieces = shard.ranges();
                let first = pieces.next().filter(|_| pieces.next().is_none());
                let target = match first.clone() {
                    Some(piece) => &mut whole.tensor(number)[piece],
                    None => {
                        block.resize(shard.num_elements(), 0.0);
                        &mut block[..]
                    }
                };
                let mut at = 0;
                for from in (0..num_replicas).map(source) {
                    match local {
                        Some(local) if from == rank => read(local, &mut |values| {
                            target[at..at + values.len()].copy_from_slice(values);
                            at += values.len();
                            Ok(())
                        })?,
                        _ => at += grid.all.receive(&mut target[at..], from, tag)?,
                    }
                }
                if at != target.len() {
                    let why = format!("its {num_replicas} replicas sent {at} of the {} values", target.len());
                    let doing = format!("gathering {} from rank {holder}", shard.spec.name);
                    return Err(Error::failed(doing, why));
                }
                if first.is_none() {
                    shard.insert(&block, whole.tensor(number));
                }
            }
            if is_root {
                whole.complete(number)?;
            }
        }
        Ok(())
    }

    /// Gathers whole tensors as [`Layout::gather`] does, and calls `look` on rank 0 with the number
    /// and the values of each. Collective over the grid.
    ///
    /// # Errors
    /// `read` failed (this rank alone), or `look` did (rank 0 alone).
    pub fn look_at(
        &self,
        grid: &Grid,
        num_replicas: usize,
        read: &ReadTensor<'_>,
        look: &mut dyn FnMut(usize, &[f32]) -> Result<()>,
    ) -> Result<()> {
        let lengths = self
            .places
            .iter()
            .map(|holders| holders.first().map_or(0, |(_, shard)| shard.spec.num_elements()));
        let mut one = OneAtATime { lengths: lengths.collect(), values: Vec::new(), look };
        self.gather(grid, num_replicas, read, &mut one)
    }

    /// Returns a hash of all parameters' bits in logical order, on every rank: XXH3 with 128 bits
    /// over the little-endian bytes of the whole tensors, whatever the layout. `read` and
    /// `num_replicas` are those of [`Layout::gather`]. Collective over the grid.
    ///
    /// # Errors
    /// `read` failed (this rank alone).
    pub fn digest(&self, grid: &Grid, num_replicas: usize, read: &ReadTensor<'_>) -> Result<u128> {
        let mut hash = xxhash_rust::xxh3::Xxh3::new();
        self.look_at(grid, num_replicas, read, &mut |_, values| {
            hash_values(&mut hash, values);
            Ok(())
        })?;
        let digest = hash.digest128();
        let mut halves = [digest as i64, (digest >> 64) as i64];
        grid.all.broadcast(&mut halves, 0)?;
        Ok(u128::from(halves[0] as u64) | u128::from(halves[1] as u64) << 64)
    }
}
