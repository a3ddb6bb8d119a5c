//! [`SharedMemory`]: memory that the ranks of a node share, of atomic words, so that ranks and
//! their threads may read and write it at any time.

use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::statvfs;

use super::Communicator;
use super::world::host_name;
use crate::memory::megabytes;
use crate::{Error, Result};

/// The file system in which MPIs on Linux keep shared memory.
const FILE_SYSTEM: &str = "/dev/shm";

/// Words that all ranks of a node read and write. They stay mapped for as long as the job lasts. A
/// copy is the same memory.
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
    /// `all`, by `MPI_Win_allocate_shared` (MPI-4.1 §12.2.3). The ranks of a node pass the same
    /// number. Collective.
    ///
    /// # Errors
    /// A node does not have that much shared memory: the same error on every rank.
    pub fn new(all: &Communicator, node: &Communicator, num_words: usize) -> Result<SharedMemory> {
        let bytes = num_words.saturating_mul(size_of::<AtomicU64>());
        let room = shared_room().filter(|_| node.is_root());
        all.agree(match room {
            // writing to a full file system of this kind ends the process
            Some(room) if bytes > room => Err(Error::failed(
                format!("sharing memory on {}", host_name()),
                format!(
                    "{:.1} MB are wanted, and {FILE_SYSTEM} has {:.1} MB left",
                    megabytes(bytes),
                    megabytes(room)
                ),
            )),
            _ => Ok(()),
        })?;
        Ok(SharedMemory { words: node.shared_words(num_words) })
    }

    /// Makes words of this process alone, which are 0, for tests. Not collective.
    #[doc(hidden)]
    pub fn of_process(num_words: usize) -> SharedMemory {
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

/// Returns the bytes of shared memory that this node has left, if the system reports it. Not
/// collective.
pub fn shared_room() -> Option<usize> {
    let found = statvfs(FILE_SYSTEM).ok()?;
    usize::try_from(found.f_bavail.saturating_mul(found.f_frsize)).ok()
}
