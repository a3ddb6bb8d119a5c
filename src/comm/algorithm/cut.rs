//! The lengths of a buffer's parts, and of the chunks of a long buffer.

use std::ops::Range;

use crate::sums::shard;

/// Returns the elements that two ranges have in common.
pub(in crate::comm) fn common(one: &Range<usize>, other: &Range<usize>) -> Range<usize> {
    let start = one.start.max(other.start);
    start..one.end.min(other.end).max(start)
}

/// The most chunks of a buffer: every chunk of an operation under way has a tag of its own, and a
/// communicator has seven times as many.
const MOST_CHUNKS: usize = 4096;

/// The lengths of a buffer's parts and chunks. Every chunk is moved separately, by the same plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::comm) struct Cut {
    /// The first element of the buffer that is cut.
    start: usize,
    /// The number of elements between two parts, which belong to none.
    gap: usize,
    len: usize,
    parts: usize,
    chunks: usize,
    /// True if part r belongs to rank r, so that chunks cut every part; false if chunks cut the
    /// buffer.
    is_owned: bool,
}

impl Cut {
    /// Cuts `len` elements into `parts` parts, in chunks of at most about `chunk` elements, or more if they
    /// would be more than [`MOST_CHUNKS`].
    pub(in crate::comm) fn new(len: usize, parts: usize, chunk: usize, is_owned: bool) -> Cut {
        let chunks = len.div_ceil(chunk.max(1)).clamp(1, MOST_CHUNKS);
        Cut { start: 0, gap: 0, len, parts, chunks, is_owned }
    }

    /// Returns the same cut of the elements from `start` on.
    pub(in crate::comm) fn starting_at(self, start: usize) -> Cut {
        Cut { start, ..self }
    }

    /// Returns the same cut of parts, which belong to ranks, with `gap` other elements between them.
    pub(in crate::comm) fn with_gaps(self, gap: usize) -> Cut {
        debug_assert!(self.is_owned || gap == 0, "chunks cut the buffer");
        Cut { gap, ..self }
    }

    /// Returns the cut that leaves `len` elements in one piece.
    pub(in crate::comm) fn whole(len: usize) -> Cut {
        Cut::new(len, 1, usize::MAX, false)
    }

    /// Returns the elements of all parts of a chunk, as [`Cut::pieces`] does.
    pub(in crate::comm) fn all_pieces(&self, chunk: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        self.pieces(chunk, &(0..self.parts))
    }

    /// Returns the number of elements of a sum.
    pub(in crate::comm) fn len(&self) -> usize {
        self.len
    }

    pub(in crate::comm) fn chunks(&self) -> usize {
        self.chunks
    }

    /// Returns the most elements that a part of a chunk has.
    pub(in crate::comm) fn largest_part(&self) -> usize {
        if self.is_owned {
            self.len.div_ceil(self.parts).div_ceil(self.chunks)
        } else {
            self.len.div_ceil(self.chunks).div_ceil(self.parts)
        }
    }

    /// Returns the elements of one part of a chunk, counted from the first that is cut.
    fn part(&self, chunk: usize, part: usize) -> Range<usize> {
        // short messages are in one chunk, and divisions take a good part of their time
        if self.chunks == 1 {
            return shard(self.len, part, self.parts);
        }
        let (outer, inner) = if self.is_owned {
            (shard(self.len, part, self.parts), (chunk, self.chunks))
        } else {
            (shard(self.len, chunk, self.chunks), (part, self.parts))
        };
        let range = shard(outer.len(), inner.0, inner.1);
        outer.start + range.start..outer.start + range.end
    }

    /// Returns the elements of consecutive parts of a chunk: one range, or, where chunks cut every
    /// part or there are gaps, one for each part.
    pub(in crate::comm) fn pieces(
        &self,
        chunk: usize,
        parts: &Range<usize>,
    ) -> impl Iterator<Item = Range<usize>> + use<> {
        let cut = *self;
        let in_one = self.gap == 0 && (!self.is_owned || self.chunks == 1);
        let step = if in_one { parts.len().max(1) } else { 1 };
        parts.clone().step_by(step).map(move |first| {
            let start = cut.start + first * cut.gap;
            start + cut.part(chunk, first).start..start + cut.part(chunk, first + step - 1).end
        })
    }
}
