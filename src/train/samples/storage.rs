//! The choice of where the samples of files are kept: all of them in memory, a window of blocks, or
//! none.

use super::node_memory::NodeMemory;
use super::progress::ReadingProgress;
use super::source::{FileRange, Files};
use crate::Result;
use crate::comm::{Grid, World};
use crate::dataset::{BlockOrder, Data, Dataset, Order};
use crate::memory::megabytes;
use crate::store::{StoreRanks, StoredSet, WindowSet, window_bytes};
use crate::trace::Name;
use crate::train::options::{Shuffle, TrainOptions};

/// Sets that take more bytes than this are logged.
pub(super) const WORTH_SAYING: usize = 100_000_000;

/// The samples where they are kept, and their order.
pub(super) struct Storage {
    pub(super) data: Data,
    /// The order of the training samples.
    pub(super) order: Order,
    /// The bytes that the ranks of this rank's node share, on the first of them.
    pub(super) shared_bytes: usize,
}

impl Storage {
    /// Leaves samples where they are, to be read in any order that `shuffle` allows.
    pub(super) fn of(data: Data, shuffle: Shuffle) -> Storage {
        let order = if shuffle == Shuffle::Off { Order::Sequential } else { Order::Shuffled };
        Storage { data, order, shared_bytes: 0 }
    }

    /// Chooses where the samples of `files` are kept as `options` say, to be taken in the order of `shuffle`,
    /// and reads those that are kept in memory. Collective.
    ///
    /// # Errors
    /// There is not enough memory for what the options want, or a file cannot be read: the same
    /// error on every rank.
    pub(super) fn choose(
        world: &World,
        grid: &Grid,
        options: &TrainOptions,
        shuffle: Shuffle,
        files: &Files,
    ) -> Result<Storage> {
        let samples = grid.channels.samples.clone();
        let ranks = StoreRanks::new(samples, world.node_communicator().clone(), &grid.data)?;
        let bytes_of = |part: &FileRange| StoredSet::bytes(&ranks, &part.files.borrow(), &part.leaves());
        let bytes: usize = files.ranges().map(bytes_of).sum();
        let memory = NodeMemory::measure(world, bytes)?;
        let is_stored = memory.keeps_all(options.data.data_store)?;
        let shuffle = match shuffle {
            Shuffle::On if is_stored => Shuffle::Full,
            Shuffle::On => Shuffle::Blocks,
            chosen => chosen,
        };
        let order = order_of(shuffle, options, files);
        if world.is_root() {
            log_order(&order, is_stored, options.given.has("shuffle-window"));
        }
        let (data, bytes) = match &order {
            _ if is_stored => (load_all(&ranks, files, bytes, memory)?, bytes),
            Order::Blocks(blocks) => read_ahead(world, &ranks, options, files, blocks, memory)?,
            Order::Shuffled | Order::Sequential => (files.direct(), 0),
        };
        // a rank that is alone on its node keeps them in memory of its own, which is counted with the rest
        let shares = world.local_rank() == 0 && world.num_local_ranks() > 1;
        Ok(Storage { data, order, shared_bytes: if shares { bytes } else { 0 } })
    }
}

/// Returns the order of the samples of `files` that `shuffle` stands for.
fn order_of(shuffle: Shuffle, options: &TrainOptions, files: &Files) -> Order {
    match shuffle {
        Shuffle::On | Shuffle::Full => Order::Shuffled,
        Shuffle::Off => Order::Sequential,
        Shuffle::Blocks => {
            let blocks = files.train.direct().blocks();
            let window = options.data.shuffle_window.min(blocks.num_blocks());
            Order::Blocks(BlockOrder::new(blocks, window, options.seed))
        }
    }
}

/// Logs what follows from the order of samples that are in memory if `is_stored`; `has_window` says that
/// --shuffle-window is given.
fn log_order(order: &Order, is_stored: bool, has_window: bool) {
    if let Order::Blocks(blocks) = order {
        let (window, in_block) = (blocks.window(), blocks.blocks().largest());
        log::info!("samples are mixed within windows of {window} blocks of at most {in_block} samples");
        return;
    }
    if has_window {
        let why = if is_stored { "are kept in memory and mixed" } else { "of this run are mixed" };
        log::warn!("--shuffle-window has no effect: all samples {why} at once");
    }
    if *order == Order::Shuffled && !is_stored {
        log::warn!(
            "all samples are mixed at once but not kept in memory, so that each is read by itself, which is \
             slow; --data-store on, or more nodes, keep them in memory"
        );
    }
}

/// Reads the training samples of `files` ahead, in the order of `blocks`; returns the samples, and the bytes
/// that they take on a node. Collective.
///
/// # Errors
/// A node has not enough memory, or a file cannot be read: the same error on every rank.
fn read_ahead(
    world: &World,
    ranks: &StoreRanks,
    options: &TrainOptions,
    files: &Files,
    blocks: &BlockOrder,
    memory: NodeMemory,
) -> Result<(Data, usize)> {
    let FileRange { files: train, range } = &files.train;
    let batch_size = options.batch_size.min(range.len());
    let bytes = window_bytes(blocks, &train.borrow(), batch_size, world.num_nodes());
    memory.check_windows(blocks.window(), bytes)?;
    log::info!(
        "reading samples ahead: {:.1} MB on a node; all samples take {:.1} MB, of {:.1} MB free",
        megabytes(bytes),
        megabytes(memory.all_samples),
        megabytes(memory.room)
    );
    // a node may read all blocks, and a file may hold more than the samples
    let most_read = memory.all_samples.saturating_mul(world.num_nodes()) as u64;
    let is_cached = train.borrow().file_bytes().min(most_read) < memory.free.saturating_sub(bytes) as u64;
    let train = WindowSet::open(ranks, train, range.clone(), blocks.clone(), batch_size, is_cached)?;
    Ok((Data { train: Box::new(train), ..files.direct() }, bytes))
}

/// Reads all samples of `files` into memory, where they take `bytes` on this rank's node. Collective.
fn load_all(ranks: &StoreRanks, files: &Files, bytes: usize, memory: NodeMemory) -> Result<Data> {
    let level = if bytes > WORTH_SAYING { log::Level::Info } else { log::Level::Debug };
    log::log!(
        level,
        "keeping all samples in memory: {:.1} MB of samples on a node, of {:.1} MB free",
        megabytes(memory.all_samples),
        megabytes(memory.room)
    );
    let num_samples: usize = files.ranges().map(|part| part.range.len()).sum();
    let load = |part: &FileRange| {
        let share = part.range.len() as f64 / num_samples.max(1) as f64;
        load(ranks, part, (bytes as f64 * share) as usize)
    };
    let train = load(&files.train)?;
    let test = files.test.as_ref().map(load).transpose()?;
    Ok(Data { train, test })
}

/// Reads samples, about `bytes`, into memory, and says how far it is. Collective.
fn load(ranks: &StoreRanks, part: &FileRange, bytes: usize) -> Result<Box<dyn Dataset>> {
    let mut progress = ReadingProgress::new(Name::Load);
    let mut after_block = |num_blocks: usize| {
        progress.count(num_blocks, |percent| format!("{percent} % of {:.1} MB read", megabytes(bytes)));
    };
    let set = StoredSet::load(ranks, &part.files, part.range.clone(), part.leaves(), &mut after_block)?;
    Ok(Box::new(set))
}
