//! The choice of where the samples of files are kept: all of them in memory, a window of blocks, or
//! none.

use super::progress::ReadingProgress;
use super::source::{FileRange, Files};
use crate::comm::{Grid, Operation, World, shared_room};
use crate::dataset::{BlockOrder, Data, Dataset, Order};
use crate::memory::{free_bytes, megabytes};
use crate::store::{StoreRanks, StoredSet, WindowSet, window_bytes};
use crate::trace::Name;
use crate::train::options::{DataStore, Shuffle, TrainOptions};
use crate::{Error, Result};

/// Sets that take more bytes than this are logged.
pub(super) const WORTH_SAYING: usize = 100_000_000;

/// The samples where they are kept, and their order.
pub(super) struct Storage {
    pub(super) data: Data,
    /// The order of the training samples.
    pub(super) order: Order,
    /// The bytes that this rank's node keeps for all of its ranks, on the first of them.
    pub(super) shared_bytes: usize,
}

impl Storage {
    /// Leaves samples where they are, to be read in any order that `shuffle` allows.
    pub(super) fn of(data: Data, shuffle: Shuffle) -> Storage {
        let order = if shuffle == Shuffle::Off { Order::Sequential } else { Order::Shuffled };
        Storage { data, order, shared_bytes: 0 }
    }

    /// Chooses where the samples of `files` are kept as `options` say, and reads those that are kept
    /// in memory. Collective.
    ///
    /// # Errors
    /// There is not enough memory for what the options want, or a file cannot be read: the same
    /// error on every rank.
    pub(super) fn choose(
        world: &World,
        grid: &Grid,
        options: &TrainOptions,
        files: &Files,
    ) -> Result<Storage> {
        let samples = grid.channels.samples.clone();
        let ranks = StoreRanks::new(samples, world.node_communicator().clone(), &grid.data)?;
        let bytes_of = |part: &FileRange| StoredSet::bytes(&ranks, &part.files.borrow(), &part.leaves());
        let bytes: usize = files.ranges().map(bytes_of).sum();
        // the ranks of a node may see different values, so that the smallest counts
        let free = free_bytes().unwrap_or(usize::MAX);
        let room = shared_room().map_or(free, |room| room.min(free));
        let mut extremes = [-(clamp(room) as f64), clamp(bytes) as f64, -(clamp(free) as f64)];
        world.communicator().all_reduce(&mut extremes, Operation::Max)?;
        let [room, bytes_of_node, free] =
            [-extremes[0], extremes[1], -extremes[2]].map(|bytes| bytes as usize);
        let memory = if room < free { "shared memory (/dev/shm)" } else { "memory" };
        let is_stored = match options.data.data_store {
            DataStore::Off => false,
            DataStore::On if bytes_of_node > room => {
                let why = format!(
                    "the samples take {:.1} MB of a node's {memory}, and {:.1} MB are free; more nodes, or \
                     --data-store off, need less",
                    megabytes(bytes_of_node),
                    megabytes(room)
                );
                return Err(Error::input_on_every_rank("--data-store on", why));
            }
            DataStore::On => true,
            DataStore::Auto => bytes_of_node <= room / 2,
        };
        let shuffle = match options.data.shuffle {
            Shuffle::On if is_stored => Shuffle::Full,
            Shuffle::On => Shuffle::Blocks,
            chosen => chosen,
        };
        let blocks = files.train.direct().blocks();
        let window = options.data.shuffle_window.min(blocks.num_blocks());
        let block_order = BlockOrder::new(blocks, window, options.seed);
        let order = match shuffle {
            Shuffle::On | Shuffle::Full => Order::Shuffled,
            Shuffle::Off => Order::Sequential,
            Shuffle::Blocks => Order::Blocks(block_order.clone()),
        };
        if shuffle == Shuffle::Blocks {
            let in_block = block_order.blocks().largest();
            log::info!("samples are mixed within windows of {window} blocks of at most {in_block} samples");
        }
        let is_first = world.local_rank() == 0;
        if is_stored {
            let what = || {
                format!(
                    "{:.1} MB of samples on a node, of {:.1} MB free",
                    megabytes(bytes_of_node),
                    megabytes(room)
                )
            };
            if bytes > WORTH_SAYING {
                log::info!("keeping all samples in memory: {}", what());
            } else {
                log::debug!("keeping all samples in memory: {}", what());
            }
            let train = load(&ranks, &files.train, bytes)?;
            let test = files.test.as_ref().map(|test| load(&ranks, test, bytes)).transpose()?;
            let shared_bytes = if is_first { bytes } else { 0 };
            return Ok(Storage { data: Data { train, test }, order, shared_bytes });
        }
        let test = files.test.as_ref().map(FileRange::direct);
        if shuffle != Shuffle::Blocks {
            if world.is_root() && shuffle == Shuffle::Full {
                log::warn!("--shuffle full without a data store reads every sample by itself, which is slow");
            }
            return Ok(Storage { data: Data { train: files.train.direct(), test }, order, shared_bytes: 0 });
        }
        let FileRange { files: train, range } = &files.train;
        let batch_size = options.batch_size.min(range.len());
        let bytes = window_bytes(&block_order, &train.borrow(), batch_size, world.num_nodes());
        if bytes > room {
            let way_out = match bytes_of_node <= room {
                true => "--data-store on keeps all samples there, which fit",
                false => "fewer blocks are mixed less, but fit",
            };
            let why = format!(
                "{window} blocks take {:.1} MB of a node's {memory}, and {:.1} MB are free; {way_out}",
                megabytes(bytes),
                megabytes(room)
            );
            return Err(Error::input_on_every_rank("--shuffle-window", why));
        }
        log::info!(
            "reading samples ahead: {:.1} MB on a node for two windows; all samples take {:.1} MB, of {:.1} \
             MB free",
            megabytes(bytes),
            megabytes(bytes_of_node),
            megabytes(room)
        );
        // a node may read all blocks, and a file may hold more than the samples
        let most_read = bytes_of_node.saturating_mul(world.num_nodes()) as u64;
        let is_cached = train.borrow().file_bytes().min(most_read) < free.saturating_sub(bytes) as u64;
        let train = WindowSet::open(&ranks, train, range.clone(), block_order, batch_size, is_cached)?;
        let shared_bytes = if is_first { bytes } else { 0 };
        Ok(Storage { data: Data { train: Box::new(train), test }, order, shared_bytes })
    }
}

/// Returns a number of bytes that an `f64` can hold.
fn clamp(bytes: usize) -> usize {
    bytes.min(1 << 52)
}

/// Reads samples into memory, and says how far it is. Collective.
fn load(ranks: &StoreRanks, part: &FileRange, bytes: usize) -> Result<Box<dyn Dataset>> {
    let mut progress = ReadingProgress::new(Name::Load);
    let mut after_block = |num_blocks: usize| {
        progress.count(num_blocks, |percent| format!("{percent} % of {:.1} MB read", megabytes(bytes)));
    };
    let set = StoredSet::load(ranks, &part.files, part.range.clone(), part.leaves(), &mut after_block)?;
    Ok(Box::new(set))
}
