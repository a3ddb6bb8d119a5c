//! [`Shelf`]: the blocks that the ranks of a node keep for a while, in memory that they share.
//!
//! Blocks are numbered in the order in which they are needed, over all epochs: a block's number is
//! its *ticket*. Ticket t is kept in slot t modulo the number of slots. The threads of the ranks
//! take tickets in order. The next ticket can be taken once the earlier block in its slot has been
//! read from its file and every rank has released it. A thread that has taken a ticket reads the block
//! and marks the slot as filled, even if its rank has finished training meanwhile: other ranks may
//! wait for the block. A block that cannot be read ends the job when a step needs it, so that the end
//! does not depend on how far the threads have read ahead.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::comm::{Communicator, SharedMemory};
use crate::{Error, Result};

/// The words for the text of an error.
const TEXT_WORDS: usize = 512;

/// The word with the next ticket.
const NEXT: usize = 0;
/// The word with the state of an error: none, one that has been written, or one that a rank returns.
const FAILURE: usize = 1;
/// The word with the exit code of the error.
const EXIT_CODE: usize = 2;
/// The word with the length of the error's text in bytes, which follows it.
const TEXT: usize = 3;
/// The word with the first ticket of all.
const FIRST: usize = TEXT + 1 + TEXT_WORDS;
/// The first word after those.
const END: usize = FIRST + 1;

/// Marks the ticket of a slot whose block cannot be read.
const UNREADABLE: u64 = 1 << 63;

/// States of an error.
const WRITING: u64 = 1;
const WRITTEN: u64 = 2;
const TAKEN: u64 = 3;

/// The memory of one node, with the tickets of its blocks. A copy is the same memory.
#[derive(Clone, Copy)]
pub(super) struct Shelf {
    memory: SharedMemory,
    num_ranks: usize,
    num_slots: usize,
    slot_words: usize,
    row_words: usize,
}

impl Shelf {
    /// Returns the number of words of a shelf.
    fn num_words(num_ranks: usize, num_slots: usize, slot_words: usize) -> usize {
        END + num_ranks + num_slots + num_slots * slot_words
    }

    /// Makes a shelf with room for `num_slots` blocks of at most `num_rows` samples on every node.
    /// Collective.
    ///
    /// # Errors
    /// There is not enough shared memory: the same error on every rank.
    pub(super) fn new(
        all: &Communicator,
        node: &Communicator,
        num_slots: usize,
        num_rows: usize,
        row_words: usize,
    ) -> Result<Shelf> {
        let (num_ranks, slot_words) = (node.size(), num_rows * row_words);
        let num_words = Shelf::num_words(num_ranks, num_slots, slot_words);
        let memory = SharedMemory::new(all, node, num_words)?;
        if node.is_root() {
            memory.words()[..END + num_ranks + num_slots]
                .iter()
                .for_each(|word| word.store(0, Ordering::Relaxed));
        }
        node.barrier();
        Ok(Shelf { memory, num_ranks, num_slots, slot_words, row_words })
    }

    fn word(&self, number: usize) -> &'static AtomicU64 {
        &self.memory.words()[number]
    }

    /// Returns the word with the first ticket that a rank of the node still needs.
    fn released(&self, rank: usize) -> &'static AtomicU64 {
        self.word(END + rank)
    }

    /// Returns the word with the ticket whose block a slot holds, plus 1.
    fn filled(&self, slot: usize) -> &'static AtomicU64 {
        self.word(END + self.num_ranks + slot)
    }

    fn slot(&self, ticket: u64) -> usize {
        (ticket % self.num_slots as u64) as usize
    }

    /// Returns the word at which the block of a ticket starts.
    fn start(&self, ticket: u64) -> usize {
        END + self.num_ranks + self.num_slots + self.slot(ticket) * self.slot_words
    }

    /// Sets the first ticket that will be taken and needed. On one rank, before any thread starts.
    pub(super) fn begin(&self, ticket: u64) {
        (0..self.num_ranks).for_each(|rank| self.released(rank).store(ticket, Ordering::Relaxed));
        self.word(FIRST).store(ticket, Ordering::Relaxed);
        self.word(NEXT).store(ticket, Ordering::Release);
    }

    /// Takes the next ticket, if its slot may be overwritten. Whoever takes it must fill the slot.
    pub(super) fn take(&self) -> Option<u64> {
        let next = self.word(NEXT);
        let mut ticket = next.load(Ordering::Acquire);
        while self.is_free(ticket) {
            match next.compare_exchange(ticket, ticket + 1, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Some(ticket),
                Err(later) => ticket = later,
            }
        }
        None
    }

    /// Returns true if the slot of a ticket may be overwritten: every rank has released the ticket
    /// before it there, and its thread has filled the slot. Nobody may have waited for that.
    fn is_free(&self, ticket: u64) -> bool {
        let num_slots = self.num_slots as u64;
        let needed = (0..self.num_ranks).map(|rank| self.released(rank).load(Ordering::Acquire)).min();
        let is_first = ticket < self.word(FIRST).load(Ordering::Relaxed) + num_slots;
        needed.is_some_and(|needed| ticket < needed + num_slots)
            && (is_first || self.state(ticket - num_slots) & !UNREADABLE == ticket - num_slots + 1)
    }

    /// Writes a sample of the block of a ticket.
    pub(super) fn write(&self, ticket: u64, row: usize, words: &[u64]) {
        self.memory.write(self.start(ticket) + row * self.row_words, words);
    }

    /// Lets other ranks read the block of a ticket.
    pub(super) fn fill(&self, ticket: u64) {
        self.filled(self.slot(ticket)).store(ticket + 1, Ordering::Release);
    }

    /// Says that `rank` needs no block before `ticket` any more.
    pub(super) fn release(&self, rank: usize, ticket: u64) {
        self.released(rank).store(ticket, Ordering::Release);
    }

    /// Returns true if the block of a ticket will be here without `rank` releasing anything more.
    pub(super) fn has_room(&self, rank: usize, ticket: u64) -> bool {
        let needed = self.released(rank).load(Ordering::Relaxed);
        (needed..needed + self.num_slots as u64).contains(&ticket)
    }

    /// Returns true if the block of a ticket can be read.
    pub(super) fn is_filled(&self, ticket: u64) -> bool {
        self.state(ticket) == ticket + 1
    }

    /// Returns the state of the slot of a ticket: the ticket that it holds, plus 1, perhaps marked.
    fn state(&self, ticket: u64) -> u64 {
        self.filled(self.slot(ticket)).load(Ordering::Acquire)
    }

    /// Reads a sample of the block of a ticket.
    pub(super) fn read(&self, ticket: u64, row: usize, words: &mut [u64]) {
        self.memory.read(self.start(ticket) + row * self.row_words, words);
    }

    /// Passes an error to the ranks that need the block of a ticket. The text is that of the first
    /// error.
    pub(super) fn fail(&self, ticket: u64, error: &Error) {
        self.keep(error);
        self.filled(self.slot(ticket)).store(UNREADABLE | (ticket + 1), Ordering::Release);
    }

    /// Keeps an error if it is the first.
    fn keep(&self, error: &Error) {
        let state = self.word(FAILURE);
        if state.compare_exchange(0, WRITING, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            return;
        }
        let text = error.to_string();
        let bytes = &text.as_bytes()[..text.len().min(TEXT_WORDS * size_of::<u64>())];
        let mut words = [0_u64; TEXT_WORDS];
        bytemuck::cast_slice_mut(&mut words)[..bytes.len()].copy_from_slice(bytes);
        self.memory.write(TEXT + 1, &words);
        self.word(TEXT).store(bytes.len() as u64, Ordering::Relaxed);
        self.word(EXIT_CODE).store(u64::from(error.exit_code()), Ordering::Relaxed);
        state.store(WRITTEN, Ordering::Release);
    }

    /// Returns the error if the block of a ticket cannot be read, to the first rank that asks: it ends
    /// the job. Returns true to others, which wait for that.
    pub(super) fn failure(&self, ticket: u64) -> std::result::Result<bool, Error> {
        let state = self.word(FAILURE);
        let is_unreadable = self.state(ticket) == UNREADABLE | (ticket + 1);
        if !is_unreadable || state.load(Ordering::Acquire) < WRITTEN {
            return Ok(false);
        }
        if state.compare_exchange(WRITTEN, TAKEN, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            return Ok(true);
        }
        let mut words = [0_u64; TEXT_WORDS];
        self.memory.read(TEXT + 1, &mut words);
        let bytes = &bytemuck::cast_slice(&words)[..self.word(TEXT).load(Ordering::Relaxed) as usize];
        let text = String::from_utf8_lossy(bytes).into_owned();
        Err(if self.word(EXIT_CODE).load(Ordering::Relaxed) == 2 {
            Error::Input(text)
        } else {
            Error::Failed(text)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_is_overwritten_only_after_it_has_been_filled_and_released() {
        let (num_ranks, num_slots) = (2, 3);
        let memory = SharedMemory::of_process(Shelf::num_words(num_ranks, num_slots, 4));
        let shelf = Shelf { memory, num_ranks, num_slots, slot_words: 4, row_words: 2 };
        shelf.begin(10);
        assert_eq!([shelf.take(), shelf.take(), shelf.take()], [10, 11, 12].map(Some));
        assert_eq!(shelf.take(), None, "a rank may end without reading 13");
        shelf.write(10, 1, &[5, 6]);
        shelf.fill(10);
        let mut row = [0; 2];
        shelf.read(10, 1, &mut row);
        assert!(shelf.is_filled(10) && !shelf.is_filled(11) && row == [5, 6]);
        shelf.release(0, 12);
        assert_eq!(shelf.take(), None, "the other rank needs 10");
        shelf.release(1, 12);
        assert_eq!(shelf.take(), Some(13));
        // nobody has waited for 11, whose thread still reads it
        assert_eq!(shelf.take(), None);
        shelf.fill(11);
        assert_eq!(shelf.take(), Some(14));
        assert!(shelf.has_room(0, 14) && !shelf.has_room(0, 15));
        assert!(!shelf.has_room(0, 11));
    }

    #[test]
    fn one_rank_returns_the_first_error() {
        let shelf = Shelf {
            memory: SharedMemory::of_process(Shelf::num_words(1, 1, 1)),
            num_ranks: 1,
            num_slots: 1,
            slot_words: 1,
            row_words: 1,
        };
        shelf.begin(5);
        shelf.fill(5);
        assert!(!shelf.failure(5).unwrap() && !shelf.failure(6).unwrap());
        shelf.fail(6, &Error::input("reading x.h5", "it is damaged"));
        assert!(!shelf.is_filled(6) && !shelf.failure(5).unwrap(), "other blocks come");
        shelf.release(0, 7);
        assert!(shelf.is_free(7), "the slot is used again");
        shelf.fail(7, &Error::failed("later", "it does not count"));
        let error = shelf.failure(7).unwrap_err();
        assert_eq!((error.to_string().as_str(), error.exit_code()), ("reading x.h5: it is damaged", 2));
        assert!(shelf.failure(7).unwrap());
    }
}
