//! The places of a head's arrays, its blocks of queries and their dropout.

use std::ops::Range;

use super::lanes::{BLOCK, HALF, KeyRows, PerQuery};
use crate::device::cpu::activation::drop_out;
use crate::device::{AttentionDropout, AttentionShape};
use crate::memory::scratch::Room;

/// Some keys, and the lanes of a block whose queries see some of them.
pub(super) struct Pairs {
    pub(super) keys: Range<usize>,
    pub(super) lanes: Range<usize>,
    /// True if no block before this one sees the keys.
    pub(super) is_first: bool,
}

/// One head of a sequence: the places of its arrays in a position. Or several of a group, of which the last
/// position alone is computed: they share keys, so their queries make up a block.
#[derive(Clone, Copy)]
pub(super) struct AttentionHead {
    pub(super) shape: AttentionShape,
    /// The number of heads, of which this is the first.
    heads: usize,
    /// The number of the first weight, for dropout.
    first_weight: u64,
    pub(super) query: usize,
    pub(super) key: usize,
    pub(super) value: usize,
    pub(super) output: usize,
    /// The first position whose output is computed.
    pub(super) first: usize,
}

impl AttentionHead {
    /// Returns head `head` of `group` in sequence `row`.
    pub(super) fn new(shape: AttentionShape, row: usize, group: usize, head: usize) -> AttentionHead {
        let (start, width) = (group * shape.group_width(), shape.width);
        let key = start + shape.heads * width;
        let number = group * shape.heads + head;
        let output = number * width;
        let first_weight = shape.dropout.map_or(0, |dropout| dropout.of_head(row, number, shape.positions));
        let (query, value) = (start + head * width, key + width);
        AttentionHead { shape, heads: 1, first_weight, query, key, value, output, first: 0 }
    }

    /// Returns the heads of `group` in sequence `row` for the outputs from position `first` on. If this is
    /// the last of several positions, one query a head would fill one lane: heads come together then.
    pub(super) fn of_group(
        shape: AttentionShape,
        row: usize,
        group: usize,
        first: usize,
    ) -> impl Iterator<Item = AttentionHead> {
        let together = if first > 0 && first + 1 == shape.positions { BLOCK } else { 1 };
        (0..shape.heads).step_by(together).map(move |head| {
            let heads = together.min(shape.heads - head);
            AttentionHead { heads, first, ..AttentionHead::new(shape, row, group, head) }
        })
    }

    /// Returns the number of queries of a block.
    pub(super) fn num_queries(&self, block: &Range<usize>) -> usize {
        block.len() * self.heads
    }

    /// Returns the distance between the queries of a block in the input and between their outputs.
    pub(super) fn strides(&self) -> [usize; 2] {
        if self.heads > 1 {
            [self.shape.width; 2]
        } else {
            [self.shape.input_width(), self.shape.output_width()]
        }
    }

    /// Returns the number of keys that the queries before `end` see.
    pub(super) fn num_keys(&self, end: usize) -> usize {
        if self.shape.causal { end } else { self.shape.positions }
    }

    /// Returns how many keys of a causal block come after all queries of its first `HALF` lanes.
    pub(super) fn num_late_keys(&self, block: &Range<usize>) -> usize {
        if self.shape.causal { block.len().saturating_sub(HALF) } else { 0 }
    }

    /// Returns rectangles that hold all pairs of a key and a query that sees it, each key in one rectangle.
    /// Those on a block's diagonal also hold pairs of a key and a query that does not see it, with weight 0.
    pub(super) fn by_keys(&self, block: &Range<usize>) -> impl Iterator<Item = Pairs> + use<> {
        let (end, len) = (self.num_keys(block.end), self.num_queries(block));
        let late = end - self.num_late_keys(block);
        let own = if self.shape.causal { block.start } else { 0 };
        let is_first = self.shape.causal || block.start == self.first;
        [
            Pairs { keys: 0..own, lanes: 0..len, is_first: false },
            Pairs { keys: own..late, lanes: 0..len, is_first },
            Pairs { keys: late..end, lanes: HALF..len, is_first },
        ]
        .into_iter()
        .filter(|pairs| !pairs.keys.is_empty())
    }

    /// Returns the lanes of a block, in parts, with the number of keys, from the first on, that each sees.
    pub(super) fn by_queries(
        &self,
        block: &Range<usize>,
    ) -> impl Iterator<Item = (Range<usize>, usize)> + use<> {
        let (num_keys, len) = (self.num_keys(block.end), self.num_queries(block));
        let num_late = self.num_late_keys(block);
        let middle = if num_late == 0 { len } else { HALF };
        let parts = [(0..middle, num_keys - num_late), (middle..len, num_keys)];
        parts.into_iter().filter(|(lanes, _)| !lanes.is_empty())
    }

    /// Returns the keys of a block.
    pub(super) fn key_rows(&self, block: &Range<usize>) -> KeyRows {
        let num = self.num_keys(block.end);
        let own = if self.shape.causal { block.start } else { num };
        KeyRows { num, own, late: num - self.num_late_keys(block) }
    }

    /// Returns the number of values of all keys, rounded up, so that memory lasts while a text grows.
    pub(super) fn room_len(&self) -> usize {
        BLOCK * self.shape.positions.next_multiple_of(4 * BLOCK)
    }

    /// Returns the factors by which dropout multiplies the weights of a block, if there is a dropout. The
    /// lanes after the last query have any factors.
    #[inline(always)]
    pub(super) fn dropout_factors<'a>(
        &self,
        block: &Range<usize>,
        room: &'a mut Room,
    ) -> Option<&'a [PerQuery]> {
        let dropout = self.shape.dropout.as_ref()?;
        let num_keys = self.num_keys(block.end);
        let (factors, row) = room.elements(self.room_len() + num_keys).split_at_mut(self.room_len());
        let factors = &mut factors[..BLOCK * num_keys];
        for (lane, position) in block.clone().enumerate() {
            let before = position as u64 * AttentionDropout::query_stride(self.shape.positions);
            row.fill(1.0);
            drop_out(&dropout.mask, self.first_weight + before, row);
            for (factors, factor) in factors.as_chunks_mut::<BLOCK>().0.iter_mut().zip(&*row) {
                factors[lane] = *factor;
            }
        }
        Some(factors.as_chunks().0)
    }

    /// Returns the blocks of queries.
    pub(super) fn blocks(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let positions = self.shape.positions;
        (self.first..positions).step_by(BLOCK).map(move |start| start..positions.min(start + BLOCK))
    }
}
