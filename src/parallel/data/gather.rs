//! Whole tensors of a model, gathered from the ranks that provide parts of them.

use xxhash_rust::xxh3::Xxh3;

use super::parts::StateParts;
use crate::Result;
use crate::comm::{Grid, LARGEST_TAG};
use crate::nn::hash_values;

/// A function that is called with values of a tensor.
pub type Visit<'a> = dyn FnMut(&[f32]) -> Result<()> + 'a;

/// A function that shows this rank's part of a tensor of the model to another function.
pub type ReadPart<'a> = dyn Fn(usize, &mut Visit<'_>) -> Result<()> + 'a;

impl StateParts {
    /// Gathers whole tensors, one after the other in logical order, on rank 0 of the world, and
    /// calls `look` there with the number and the values of each. `read` shows this rank's part of
    /// a tensor. Collective over the grid.
    ///
    /// # Errors
    /// `read` failed (this rank alone), or `look` did (rank 0 alone).
    pub fn gather_on_root(
        &self,
        grid: &Grid,
        read: &ReadPart<'_>,
        look: &mut dyn FnMut(usize, &[f32]) -> Result<()>,
    ) -> Result<()> {
        let (rank, is_root) = (grid.all.rank(), grid.all.is_root());
        let (mut whole, mut received) = (Vec::new(), Vec::new());
        for (number, len) in self.tensor_lengths().enumerate() {
            let tag = (number % (LARGEST_TAG as usize + 1)) as i32;
            if !is_root {
                if self.part_of(number, rank).is_some() {
                    read(number, &mut |values| grid.all.send(values, 0, tag))?;
                }
                continue;
            }
            whole.resize(len, 0.0);
            for part in self.parts_of(number) {
                if part.rank == rank {
                    read(number, &mut |values| {
                        part.shard.insert(part.block.clone(), values, &mut whole);
                        Ok(())
                    })?;
                } else if let Some(range) = part.shard.contiguous(part.block.clone()) {
                    grid.all.receive(&mut whole[range], part.rank, tag)?;
                } else {
                    received.resize(part.block.len(), 0.0);
                    grid.all.receive(&mut received, part.rank, tag)?;
                    part.shard.insert(part.block, &received, &mut whole);
                }
            }
            look(number, &whole)?;
        }
        Ok(())
    }

    /// Returns a hash of all parameters' bits in logical order, on every rank: XXH3 with 128 bits
    /// over the little-endian bytes of the whole tensors, whatever the layout. `read` is that of
    /// [`StateParts::gather_on_root`]. Collective over the grid.
    ///
    /// # Errors
    /// `read` failed (this rank alone).
    pub fn digest(&self, grid: &Grid, read: &ReadPart<'_>) -> Result<u128> {
        let mut hash = Xxh3::new();
        self.gather_on_root(grid, read, &mut |_, values| {
            hash_values(&mut hash, values);
            Ok(())
        })?;
        let digest = hash.digest128();
        let mut halves = [digest as i64, (digest >> 64) as i64];
        grid.all.broadcast(&mut halves, 0)?;
        Ok(u128::from(halves[0] as u64) | u128::from(halves[1] as u64) << 64)
    }
}
