//! [`NodeMemory`], the room that the nodes have for samples, and what it allows.

use crate::comm::{Operation, World, shared_room};
use crate::memory::{free_bytes, megabytes};
use crate::train::options::DataStore;
use crate::{Error, Result};

/// The memory of the nodes, in bytes, as all ranks of the job know it: the least that one has, and the most
/// that one needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct NodeMemory {
    /// The free memory of the node that has the least.
    pub(super) free: usize,
    /// The room for memory that ranks share: the free memory, or less where /dev/shm is smaller.
    pub(super) room: usize,
    /// The bytes of all samples on the node that would keep the most.
    pub(super) all_samples: usize,
}

impl NodeMemory {
    /// Measures the memory of all nodes, where this rank's node would keep `bytes` of samples. Collective.
    ///
    /// # Errors
    /// None but those of an all-reduce.
    pub(super) fn measure(world: &World, bytes: usize) -> Result<NodeMemory> {
        let free = free_bytes().unwrap_or(usize::MAX);
        // a rank that is alone on its node shares nothing
        let limit = shared_room().filter(|_| world.num_local_ranks() > 1);
        let room = limit.map_or(free, |room| room.min(free));
        // an `f64` holds these numbers; ranks of a node may see different ones, so that the smallest counts
        let [free, room, bytes] = [free, room, bytes].map(|bytes| bytes.min(1 << 52) as f64);
        let mut extremes = [-free, -room, bytes];
        world.communicator().all_reduce(&mut extremes, Operation::Max)?;
        let [free, room, all_samples] = [-extremes[0], -extremes[1], extremes[2]].map(|bytes| bytes as usize);
        Ok(NodeMemory { free, room, all_samples })
    }

    /// Returns whether all samples are kept in memory. Not collective.
    ///
    /// # Errors
    /// They are to be, and do not fit: the same error on every rank.
    pub(super) fn keeps_all(self, wanted: DataStore) -> Result<bool> {
        match wanted {
            DataStore::Off => Ok(false),
            DataStore::Auto => Ok(self.all_samples <= self.room / 2),
            DataStore::On if self.all_samples <= self.room => Ok(true),
            DataStore::On => {
                let why = format!(
                    "the samples take {}; more nodes, or --data-store off, need less",
                    self.share(self.all_samples)
                );
                Err(Error::input_on_every_rank("--data-store on", why))
            }
        }
    }

    /// Checks that a node has room for `bytes`, which samples take that are read ahead within windows of
    /// `window` blocks. Not collective.
    ///
    /// # Errors
    /// It has not: the same error on every rank.
    pub(super) fn check_windows(self, window: usize, bytes: usize) -> Result<()> {
        if bytes <= self.room {
            return Ok(());
        }
        let way_out = match self.all_samples <= self.room {
            true => "--data-store on keeps all samples there, which fit",
            false => "fewer blocks need less, and mix samples less",
        };
        let why = format!("windows of {window} blocks take {}; {way_out}", self.share(bytes));
        Err(Error::input_on_every_rank("--shuffle-window", why))
    }

    /// Describes `bytes` as a part of the room.
    fn share(self, bytes: usize) -> String {
        let memory = if self.room < self.free { "shared memory (/dev/shm)" } else { "memory" };
        format!(
            "{:.1} MB of a node's {memory}, and {:.1} MB are free",
            megabytes(bytes),
            megabytes(self.room)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::NodeMemory;
    use crate::train::options::DataStore;

    const MEMORY: NodeMemory = NodeMemory { free: 8_000_000, room: 8_000_000, all_samples: 5_000_000 };

    #[test]
    fn samples_are_kept_where_they_fit() {
        let keeps = |all_samples: usize, wanted| {
            NodeMemory { all_samples, ..MEMORY }.keeps_all(wanted).map_err(|error| error.to_string())
        };
        assert_eq!(keeps(4_000_000, DataStore::Auto), Ok(true));
        assert_eq!(keeps(4_000_001, DataStore::Auto), Ok(false));
        assert_eq!(keeps(1, DataStore::Off), Ok(false));
        assert_eq!(keeps(8_000_000, DataStore::On), Ok(true));
        let refusal = "--data-store on: the samples take 9.5 MB of a node's memory, and 8.0 MB are free; \
                       more nodes, or --data-store off, need less";
        assert_eq!(keeps(9_500_000, DataStore::On), Err(refusal.to_owned()));
    }

    #[test]
    fn windows_that_do_not_fit_name_the_way_out() {
        let refusal = |memory: NodeMemory, bytes| memory.check_windows(3, bytes).unwrap_err();
        MEMORY.check_windows(3, 8_000_000).unwrap();
        let shared = NodeMemory { free: 9_000_000, ..MEMORY };
        let error = refusal(shared, 8_500_000);
        assert_eq!(
            error.to_string(),
            "--shuffle-window: windows of 3 blocks take 8.5 MB of a node's shared memory (/dev/shm), and 8.0 \
             MB are free; --data-store on keeps all samples there, which fit"
        );
        assert!(error.is_agreed() && error.exit_code() == 2);
        let error = refusal(NodeMemory { all_samples: 10_000_000, ..MEMORY }, 8_500_000).to_string();
        assert!(error.ends_with("8.0 MB are free; fewer blocks need less, and mix samples less"), "{error}");
    }
}
