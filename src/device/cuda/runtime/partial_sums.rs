//! Memory for the partial sums of reductions: blocks write theirs, and a later block or kernel adds
//! them in a fixed order.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use super::buffer::CudaViewMut;
use super::format::Format;
use super::launch::{BLOCK, Launch, launch, size32};
use super::memory::DeviceMemory;
use super::streams::Streams;
use crate::Result;

/// The number of columns of a block in the kernels that sum over rows.
pub(crate) const SUM_COLUMNS: u32 = 32;

/// The number of counters for blocks of columns.
pub(crate) const COLUMN_COUNTERS: usize = 4096;

/// An array in which partial sums are added up.
#[derive(Clone, Copy)]
pub(crate) struct Total {
    pointer: u64,
    pub(crate) len: usize,
    /// True if they are added to what is there.
    accumulates: bool,
}

impl Total {
    pub(crate) fn new(array: &CudaViewMut<'_>, accumulates: bool) -> Total {
        Total { pointer: array.pointer, len: array.len, accumulates }
    }
}

/// Memory for partial sums. It grows when it is too short, and is free between operations.
pub(crate) struct PartialSums {
    streams: Rc<Streams>,
    memory: RefCell<DeviceMemory>,
    len: Cell<usize>,
    blocks_done: DeviceMemory,
}

impl PartialSums {
    pub(crate) fn new(streams: &Rc<Streams>) -> Result<PartialSums> {
        let len = 2 * streams.max_blocks();
        Ok(PartialSums {
            streams: Rc::clone(streams),
            memory: RefCell::new(DeviceMemory::zeroed(streams, len, Format::F32)?),
            len: Cell::new(len),
            blocks_done: DeviceMemory::zeroed(streams, 1 + COLUMN_COUNTERS, Format::F32)?,
        })
    }

    /// Returns memory for a partial sum of each block of a launch by [`Streams::over`].
    pub(crate) fn of_blocks(&self) -> u64 {
        self.memory.borrow().pointer()
    }

    /// Returns memory for `len` partial sums, or `None` after a failure.
    pub(crate) fn reserve(&self, len: usize) -> Option<u64> {
        if len > self.len.get() {
            match DeviceMemory::new(&self.streams, len, Format::F32) {
                Ok(memory) => {
                    // freeing the old memory waits for the device
                    self.memory.replace(memory);
                    self.len.set(len);
                }
                Err(error) => {
                    self.streams.fail("allocating memory for partial sums", error);
                    return None;
                }
            }
        }
        Some(self.memory.borrow().pointer())
    }

    /// Returns the number of partial sums that fit in the memory.
    pub(crate) fn len(&self) -> usize {
        self.len.get()
    }

    /// Returns a counter of the blocks that have left their partial sums: 0 between kernels.
    pub(crate) fn blocks_done(&self) -> u64 {
        self.blocks_done.pointer()
    }

    /// Returns [`COLUMN_COUNTERS`] counters of the blocks that have left partial sums of the same columns: 0
    /// between kernels.
    pub(crate) fn column_counters(&self) -> u64 {
        self.blocks_done.pointer() + size_of::<u32>() as u64
    }

    /// Forms a sum in `num` parts, and writes it to `total`, or adds it if `accumulate`.
    /// `start(sums, adds)` starts a kernel that writes the parts to the rows of `sums`, or adds them if
    /// `adds`. A single part goes to `total` at once.
    pub(crate) fn sum_parts(
        &self,
        total: &CudaViewMut<'_>,
        num: usize,
        accumulate: bool,
        start: impl FnOnce(u64, bool),
    ) {
        if num == 1 {
            return start(total.pointer, accumulate);
        }
        let Some(sums) = self.reserve(num * total.len) else { return };
        start(sums, false);
        self.add_to(Total::new(total, accumulate), None, num, sums);
    }

    /// Adds up the `num` rows at `sums`: the first elements in `total`, and the others in `rest`.
    pub(crate) fn add_to(&self, total: Total, rest: Option<Total>, num: usize, sums: u64) {
        let rest = rest.unwrap_or(Total { pointer: 0, len: 0, ..total });
        assert_eq!(rest.accumulates, total.accumulates, "both have had the same rows");
        let [num, len, own_len] = [num, total.len + rest.len, total.len].map(size32);
        let blocks = len.div_ceil(SUM_COLUMNS);
        let threads = (SUM_COLUMNS, BLOCK / SUM_COLUMNS);
        let launch = Launch { blocks: (blocks, 1), threads, shared_bytes: 0 };
        let (total, accumulate, rest) = (total.pointer, i32::from(total.accumulates), rest.pointer);
        let kernel = &self.streams.kernels.add_partial_sums;
        launch!(self.streams, kernel, launch, num, len, sums, total, own_len, rest, accumulate);
    }
}
