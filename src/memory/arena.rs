//! [`Arena`], the contract between a buffer and the code that moves or sums its parts.
//!
//! An operation borrows a [`Buffer`] as an [`Arena`]: two regions that MPI may read and write, one
//! for the buffer's values and one, the *inbox*, for values that arrive and are combined with them.
//! Host memory is used directly ([`HostArena`]). A device lends its own memory to a CUDA-aware MPI,
//! or copies the values to pinned host memory chunk by chunk and back (*staged*).
//!
//! A chunk goes through these steps: [`Arena::fetch`] makes its values readable for MPI; once
//! [`Arena::is_here`] returns true, the messages of a round are posted; when they are complete,
//! [`Arena::combine`] combines the buffer with the inbox until [`Arena::is_combined`] returns true;
//! after the last round [`Arena::deliver`] copies the new values back to the buffer.
#![allow(unsafe_code)]

use std::ops::Range;

/// Terms of a combination, of which some are in the buffer and the others in the inbox. They are
/// combined with a stack: each in turn with as many values on top as `merges` says, then pushed. The
/// value that is left is written to `range`, the place of the first term in the buffer.
#[derive(Debug, Clone)]
pub struct Terms<'a> {
    /// The elements of the first term in the buffer.
    pub range: Range<usize>,
    /// The distance from one term in the buffer to the next, in elements.
    pub own_stride: usize,
    /// The position of the first term in the inbox, in elements.
    pub first: usize,
    /// The number of terms in the inbox.
    pub num_received: usize,
    /// The distance from one term in the inbox to the next, in elements.
    pub stride: usize,
    /// The positions among all terms of those in the buffer.
    pub own: Range<usize>,
    /// For each term, the number of values that it is combined with.
    pub merges: &'a [usize],
}

/// Memory that an operation works on.
///
/// # Safety
/// `values` and `inbox` return pointers to memory that MPI may read and write, that stays in place
/// until the value is dropped, and that holds all elements of the buffer and of the inbox.
pub unsafe trait Arena {
    /// Returns the address of element 0 of the buffer.
    fn values(&self) -> *mut u8;

    /// Returns the address of element 0 of the inbox.
    fn inbox(&self) -> *mut u8;

    /// Starts bringing `ranges`, the values of chunk `chunk` that are sent, to `values`.
    fn fetch(&mut self, _chunk: usize, _ranges: &mut dyn Iterator<Item = Range<usize>>) {}

    /// Returns true when MPI may read and write the values of chunk `chunk`.
    fn is_here(&mut self, _chunk: usize) -> bool {
        true
    }

    /// Starts combining elements of the buffer with `terms`. Combinations of one round may run one after the
    /// other in a lane; a combination starts only when those of the round before are complete.
    fn combine(&mut self, lane: usize, terms: &Terms<'_>);

    /// Returns true when all combinations in lane `lane` are complete and MPI may read the result.
    fn is_combined(&mut self, _lane: usize) -> bool {
        true
    }

    /// Starts bringing `ranges`, the values of a chunk that have changed, back to the buffer.
    fn deliver(&mut self, _ranges: &mut dyn Iterator<Item = Range<usize>>) {}
}
