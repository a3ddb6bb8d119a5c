//! Attention: sequences are split among the threads.
//!
//! The scores of a block of queries are formed at a time, so memory grows with the length of a sequence and
//! not with its square. They lie key by key, `[keys, queries of the block]`: a query has its lane of the
//! vectors in all steps of the softmax, and the products after it read the queries of a key side by side.
//! Each element of a product is one chain of fused multiply-adds, whatever the width of vectors. A query's
//! results have the same bits in any block: keys that it does not see are left out or add zeros, which
//! changes no bits as long as all values are finite.

mod head;
mod lanes;
#[cfg(test)]
mod tests;

use std::cell::RefCell;
use std::ops::Range;

use super::Cpu;
use super::math;
use super::small_product::{Left, MatrixRows, MatrixRowsMut, SmallProduct};
use super::transpose::transpose;
use crate::device::{AttentionOperations, AttentionShape, Rotation};
use crate::memory::scratch::Room;
use head::{AttentionHead, Pairs};
use lanes::{BLOCK, FEWEST_LANES};

/// Memory of a thread, of a value for each query of a block in each row.
struct AttentionScratch {
    /// The queries: a row for each element of a vector.
    queries: Room,
    /// The gradients of their outputs: a row for each element of a vector.
    output_gradients: Room,
    /// Their scores: a row for each key.
    scores: Room,
    /// The gradients of their scores: a row for each key.
    gradients: Room,
    /// The factors by which dropout multiplies their weights: a row for each key. Those of one query are
    /// behind them.
    factors: Room,
}

impl AttentionScratch {
    const fn new() -> AttentionScratch {
        AttentionScratch {
            queries: Room::new(),
            output_gradients: Room::new(),
            scores: Room::new(),
            gradients: Room::new(),
            factors: Room::new(),
        }
    }
}

thread_local! {
    static SCRATCH: RefCell<AttentionScratch> = const { RefCell::new(AttentionScratch::new()) };
}

impl AttentionOperations for Cpu {
    fn attention_forward(
        &self,
        shape: &AttentionShape,
        input: &[f32],
        saved: &mut [f32],
        output: &mut [f32],
    ) {
        let input_len = shape.positions * shape.input_width();
        let (output_len, saved_len) =
            (shape.positions * shape.output_width(), shape.positions * shape.num_heads());
        let rows = input.chunks_exact(input_len).zip(output.chunks_exact_mut(output_len));
        let rows = rows.zip(saved.chunks_exact_mut(saved_len)).enumerate();
        self.for_each(rows, |(row, ((input, output), saved))| {
            self.forward_sequence(shape, row, 0, input, saved, output);
        });
    }

    fn attention_next(&self, shape: &AttentionShape, first: usize, input: &[f32], output: &mut [f32]) {
        let input_len = shape.positions * shape.input_width();
        let output_len = (shape.positions - first) * shape.output_width();
        let rows = input.chunks_exact(input_len).zip(output.chunks_exact_mut(output_len));
        self.for_each(rows, |(input, output)| {
            self.forward_sequence(shape, 0, first, input, &mut [], output);
        });
    }

    fn attention_backward(
        &self,
        shape: &AttentionShape,
        input: &[f32],
        saved: &[f32],
        _output: &[f32],
        gradient: &[f32],
        input_gradient: &mut [f32],
    ) {
        let input_len = shape.positions * shape.input_width();
        let (output_len, saved_len) =
            (shape.positions * shape.output_width(), shape.positions * shape.num_heads());
        let rows = input_gradient.chunks_exact_mut(input_len).enumerate();
        self.for_each(rows, |(row, input_gradient)| {
            let of_row = |array: &'_ [f32], len: usize| -> Range<usize> {
                assert!(array.len() >= (row + 1) * len, "an array of {} values", array.len());
                row * len..(row + 1) * len
            };
            let input = &input[of_row(input, input_len)];
            let saved = &saved[of_row(saved, saved_len)];
            let gradient = &gradient[of_row(gradient, output_len)];
            SCRATCH.with_borrow_mut(|scratch| {
                let mut saved = saved.chunks_exact(shape.positions);
                for group in 0..shape.groups {
                    for head in 0..shape.heads {
                        let is_first = head == 0;
                        let arrays = HeadArrays {
                            input,
                            logarithms: saved.next().expect("a row for each head"),
                            gradient,
                        };
                        let head = AttentionHead::new(*shape, row, group, head);
                        self.backward_head(head, is_first, arrays, scratch, input_gradient);
                    }
                }
            });
        });
    }

    fn rotate(&self, shape: &AttentionShape, rotation: Rotation, from: Option<&[f32]>, values: &mut [f32]) {
        if let Some(from) = from {
            values.copy_from_slice(from);
        }
        self.rotate_in_place(shape, rotation, values);
    }
}

/// The arrays of a sequence that the backward pass of a head reads.
#[derive(Clone, Copy)]
struct HeadArrays<'a> {
    input: &'a [f32],
    logarithms: &'a [f32],
    gradient: &'a [f32],
}

impl Cpu {
    /// Computes the outputs of sequence `row` from position `first` on. `saved` receives the logarithms of
    /// all positions, unless it is empty.
    fn forward_sequence(
        &self,
        shape: &AttentionShape,
        row: usize,
        first: usize,
        input: &[f32],
        saved: &mut [f32],
        output: &mut [f32],
    ) {
        SCRATCH.with_borrow_mut(|scratch| {
            let mut saved = saved.chunks_exact_mut(shape.positions);
            for head in (0..shape.groups).flat_map(|group| AttentionHead::of_group(*shape, row, group, first))
            {
                let logarithms = saved.next().unwrap_or_default();
                self.forward_head(head, input, scratch, logarithms, output);
            }
        });
    }

    /// Computes the outputs of a head, block by block. `logarithms` may be empty.
    fn forward_head(
        &self,
        head: AttentionHead,
        input: &[f32],
        scratch: &mut AttentionScratch,
        logarithms: &mut [f32],
        output: &mut [f32],
    ) {
        let (shape, stride, out_stride) = (head.shape, head.shape.input_width(), head.shape.output_width());
        let [query_stride, target_stride] = head.strides();
        for block in head.blocks() {
            let num_keys = head.num_keys(block.end);
            let queries = &input[block.start * stride + head.query..];
            let queries = MatrixRows { values: queries, stride: query_stride };
            let keys = MatrixRows { values: &input[head.key..], stride };
            let scores = &mut scratch.scores.elements(head.room_len())[..BLOCK * num_keys];
            self.multiply_block(head, &block, queries, keys, &mut scratch.queries, scores);
            let mut shares = [0.0; BLOCK];
            self.vectorised(
                #[inline(always)]
                || {
                    let scale = shape.scale();
                    let (keys, scores) = (head.key_rows(&block), scores.as_chunks_mut().0);
                    let largest = lanes::largest(keys, scores);
                    let sums = lanes::exponentials(keys, scores, &largest, scale);
                    shares = sums.map(|sum| 1.0 / sum);
                    if let Some(factors) = head.dropout_factors(&block, &mut scratch.factors) {
                        lanes::multiply(scores, factors);
                    }
                    let mut block_logarithms = [0.0_f32; BLOCK];
                    for (lane, logarithm) in block_logarithms.iter_mut().enumerate() {
                        *logarithm = largest[lane] * scale + math::ln(sums[lane]);
                    }
                    if let Some(logarithms) = logarithms.get_mut(block.clone()) {
                        logarithms.copy_from_slice(&block_logarithms[..block.len()]);
                    }
                },
            );
            let out = &mut output[(block.start - head.first) * out_stride + head.output..];
            for (lanes, terms) in head.by_queries(&block) {
                self.multiply_small(SmallProduct {
                    rows: lanes.len(),
                    columns: shape.width,
                    terms,
                    left: Left::Terms(MatrixRows { values: &scores[lanes.start..], stride: BLOCK }),
                    right: MatrixRows { values: &input[head.value..], stride },
                    target: MatrixRowsMut {
                        values: &mut out[lanes.start * target_stride..],
                        stride: target_stride,
                    },
                    continues: false,
                });
            }
            self.vectorised(
                #[inline(always)]
                || {
                    for (lane, share) in shares.iter().enumerate().take(head.num_queries(&block)) {
                        let output = &mut out[lane * target_stride..][..shape.width];
                        output.iter_mut().for_each(|value| *value *= share);
                    }
                },
            );
        }
    }

    /// Writes `products[key][lane]`, the products of each key with the `vectors` of the queries that see it.
    /// The entries of other lanes may keep what they have. `room` takes the transpose of the vectors.
    fn multiply_block(
        &self,
        head: AttentionHead,
        block: &Range<usize>,
        vectors: MatrixRows<'_>,
        keys: MatrixRows<'_>,
        room: &mut Room,
        products: &mut [f32],
    ) {
        let (len, width) = (head.num_queries(block), head.shape.width);
        let columns = room.elements(BLOCK * width);
        self.vectorised(
            #[inline(always)]
            || {
                if len < BLOCK {
                    columns.fill(0.0);
                }
                transpose([len, width], vectors.values, vectors.stride, columns, BLOCK);
            },
        );
        for pairs in head.by_keys(block) {
            let first = BLOCK * pairs.keys.start + pairs.lanes.start;
            self.multiply_small(SmallProduct {
                rows: pairs.keys.len(),
                // a text that grows has one query at a time, for which a few lanes are enough
                columns: pairs.lanes.len().next_multiple_of(FEWEST_LANES),
                terms: width,
                left: Left::Rows(keys.from(pairs.keys.start)),
                right: MatrixRows { values: &columns[pairs.lanes.start..], stride: BLOCK },
                target: MatrixRowsMut { values: &mut products[first..], stride: BLOCK },
                continues: false,
            });
        }
    }

    /// Writes the gradients of a head's queries, keys and values to `input_gradient`, block by block.
    /// `is_first` is true for the first head with these keys: the others add to what it wrote.
    fn backward_head(
        &self,
        head: AttentionHead,
        is_first: bool,
        arrays: HeadArrays<'_>,
        scratch: &mut AttentionScratch,
        input_gradient: &mut [f32],
    ) {
        let HeadArrays { input, logarithms, gradient } = arrays;
        let (shape, stride, out_stride) = (head.shape, head.shape.input_width(), head.shape.output_width());
        let at = |place: usize| MatrixRows { values: &input[place..], stride };
        for block in head.blocks() {
            let num_keys = head.num_keys(block.end);
            let query = block.start * stride + head.query;
            let place = block.start * out_stride + head.output;
            let output_gradients = MatrixRows { values: &gradient[place..], stride: out_stride };
            let scores = &mut scratch.scores.elements(head.room_len())[..BLOCK * num_keys];
            self.multiply_block(head, &block, at(query), at(head.key), &mut scratch.queries, scores);
            let gradients = &mut scratch.gradients.elements(head.room_len())[..BLOCK * num_keys];
            let room = &mut scratch.output_gradients;
            self.multiply_block(head, &block, output_gradients, at(head.value), room, gradients);
            let mut block_logarithms = [0.0; BLOCK];
            block_logarithms[..block.len()].copy_from_slice(&logarithms[block.clone()]);
            self.vectorised(
                #[inline(always)]
                || {
                    let (scores, gradients) = (scores.as_chunks_mut().0, gradients.as_chunks_mut().0);
                    let factors = head.dropout_factors(&block, &mut scratch.factors);
                    if let Some(factors) = factors {
                        lanes::multiply(gradients, factors);
                    }
                    let keys = head.key_rows(&block);
                    let arrays = [&mut *scores, gradients];
                    lanes::score_gradients(keys, arrays, &block_logarithms, shape.scale());
                    if let Some(factors) = factors {
                        lanes::multiply(scores, factors);
                    }
                },
            );
            let mut multiply = |left, [rows, terms]: [usize; 2], right, place: usize, continues| {
                self.multiply_small(SmallProduct {
                    rows,
                    columns: shape.width,
                    terms,
                    left,
                    right,
                    target: MatrixRowsMut { values: &mut input_gradient[place..], stride },
                    continues,
                });
            };
            let of_block = |values| MatrixRows { values, stride: BLOCK };
            for (lanes, num_keys) in head.by_queries(&block) {
                let left = Left::Terms(of_block(&gradients[lanes.start..]));
                let place = query + lanes.start * stride;
                multiply(left, [lanes.len(), num_keys], at(head.key), place, false);
            }
            for Pairs { keys, lanes, is_first: are_first } in head.by_keys(&block) {
                let (size, continues) = ([keys.len(), lanes.len()], !(is_first && are_first));
                let (first, place) = (BLOCK * keys.start + lanes.start, keys.start * stride);
                let left = Left::Rows(of_block(&gradients[first..]));
                multiply(left, size, at(query).from(lanes.start), head.key + place, continues);
                let left = Left::Rows(of_block(&scores[first..]));
                multiply(left, size, output_gradients.from(lanes.start), head.value + place, continues);
            }
        }
    }
}
