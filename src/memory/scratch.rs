//! Scratch memory on the host that operations reuse, one set for each thread: [`take`] and
//! [`give_back`], or a [`Room`] of an operation's own.

use std::cell::RefCell;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::Memory;
use crate::Result;

thread_local! {
    static UNUSED: RefCell<Vec<Memory<u64>>> = const { RefCell::new(Vec::new()) };
}

/// The number of bytes of all scratch memory made so far.
static NUM_BYTES: AtomicUsize = AtomicUsize::new(0);

/// Returns the number of bytes of all scratch memory that this process has made.
#[doc(hidden)]
pub fn num_bytes() -> usize {
    NUM_BYTES.load(Ordering::Relaxed)
}

/// Returns memory of at least `bytes`, with arbitrary contents: the smallest unused piece that
/// fits, because operations repeat with the same sizes, or else new memory.
///
/// # Errors
/// The system does not have that much memory.
pub fn take(bytes: usize) -> Result<Memory<u64>> {
    let needed = bytes.div_ceil(size_of::<u64>());
    UNUSED.with_borrow_mut(|unused| {
        let fitting = (0..unused.len()).filter(|&at| unused[at].len() >= needed);
        match fitting.min_by_key(|&at| unused[at].len()) {
            Some(at) => Ok(unused.swap_remove(at)),
            None => new(needed),
        }
    })
}

fn new(len: usize) -> Result<Memory<u64>> {
    NUM_BYTES.fetch_add(len * size_of::<u64>(), Ordering::Relaxed);
    Memory::zeroed(len)
}

/// Keeps `memory` for the next [`take`].
pub fn give_back(memory: Memory<u64>) {
    // at the end of the thread the memory is freed instead
    let _ = UNUSED.try_with(|unused| unused.borrow_mut().push(memory));
}

/// Scratch memory that grows to the largest need, for an operation whose arrays are to stay in the
/// same place, and so in a cache. It is no piece that [`take`] returns: an operation with a small
/// need would keep a large one.
#[derive(Debug, Default)]
pub struct Room(Option<Memory<u64>>);

impl Room {
    /// Returns no memory.
    pub const fn new() -> Room {
        Room(None)
    }

    /// Returns `len` elements with arbitrary contents.
    ///
    /// # Panics
    /// The system does not have that much memory.
    pub fn elements(&mut self, len: usize) -> &mut [f32] {
        let needed = (len * size_of::<f32>()).div_ceil(size_of::<u64>());
        let memory = self.0.take().filter(|memory| memory.len() >= needed);
        let grown = || new(needed).unwrap_or_else(|error| panic!("scratch memory for an operation: {error}"));
        let memory = self.0.insert(memory.unwrap_or_else(grown));
        &mut bytemuck::cast_slice_mut(memory)[..len]
    }
}
