//! [`SharedMemory`]: memory that the ranks of a node share, of atomic words, so that ranks and
//! their threads may read and write it at any time.

use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::statvfs;

use super::Communicator;
use super::world::host_name;
use crate::memory::{check_room, megabytes};
use crate::{Error, Result};

/// The file system in which MPIs on Linux keep shared memory.
const FILE_SYSTEM: &str = "/dev/shm";

/// Words that all ranks of a node read and write. They stay mapped for as long as the [`World`](super::World)
/// exists, after which they must not be used. A copy is the same memory.
///
/// [`SharedMemory::read`] and [`SharedMemory::write`] are relaxed: a rank that has written values
/// tells the others by a message, or by a word that it writes with [`Ordering::Release`] and that
/// they read with [`Ordering::Acquire`].
#[derive(Debug, Clone, Copy)]
pub struct SharedMemory {
    words: &'static [AtomicU64],
}

impl SharedMemory {
    /// Allocates `num_words` words with arbitrary values for the ranks of `node`, on every node of
    /// `all`, by `MPI_Win_allocate_shared` (MPI-4.1 §12.2.3). A rank that is alone on its node gets memory
    /// of its process, which the limit of shared memory does not bind. The ranks of a node pass the same
    /// number. Collective.
    ///
    /// # Errors
    /// A node does not have that much shared memory, or that much memory if it has one rank: the same error
    /// on every rank.
    pub fn new(all: &Communicator, node: &Communicator, num_words: usize) -> Result<SharedMemory> {
        let bytes = num_words.saturating_mul(size_of::<AtomicU64>());
        let is_alone = node.size() == 1;
        let outcome = if is_alone { check_room(bytes) } else { check_shared_room(node, bytes) };
        let failed = |why: String| Error::failed(format!("sharing memory on {}", host_name()), why);
        all.agree(outcome.map_err(failed))?;
        if is_alone {
            return Ok(SharedMemory::of_process(num_words));
        }
        Ok(SharedMemory { words: node.shared_words(num_words) })
    }

    /// Makes words of this process alone, which are 0. Not collective.
    pub(crate) fn of_process(num_words: usize) -> SharedMemory {
        let words: Vec<AtomicU64> = (0..num_words).map(|_| AtomicU64::new(0)).collect();
        SharedMemory { words: words.leak() }
    }

    /// Returns the words. Not collective.
    pub fn words(&self) -> &'static [AtomicU64] {
        self.words
    }

    /// Copies the words from number `start` on to `values`. Not collective.
    pub fn read(&self, start: usize, values: &mut [u64]) {
        let words = &self.words[start..][..values.len()];
        values.iter_mut().zip(words).for_each(|(value, word)| *value = word.load(Ordering::Relaxed));
    }

    /// Copies `values` to the words from number `start` on. Not collective.
    pub fn write(&self, start: usize, values: &[u64]) {
        let words = &self.words[start..][..values.len()];
        values.iter().zip(words).for_each(|(value, word)| word.store(*value, Ordering::Relaxed));
    }
}

/// Refuses, on the first rank of `node`, a size above the shared memory that is left: writing to a full file
/// system of this kind ends the process.
fn check_shared_room(node: &Communicator, bytes: usize) -> std::result::Result<(), String> {
    match shared_room().filter(|room| node.is_root() && bytes > *room) {
        Some(room) => Err(format!(
            "{:.1} MB are wanted, and {FILE_SYSTEM} has {:.1} MB left",
            megabytes(bytes),
            megabytes(room)
        )),
        None => Ok(()),
    }
}

/// Returns the bytes of shared memory that this node has left, if the system reports it. A rank that is
/// alone on its node needs none for [`SharedMemory`]. Not collective.
pub fn shared_room() -> Option<usize> {
    let found = statvfs(FILE_SYSTEM).ok()?;
    usize::try_from(found.f_bavail.saturating_mul(found.f_frsize)).ok()
}
