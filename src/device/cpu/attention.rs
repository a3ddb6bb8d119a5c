//! Attention: sequences are split among the threads.
//!
//! The scores of a block of queries with all keys are formed at a time, so memory grows with the length
//! of a sequence and not with its square. Each element of a product is one chain of fused multiply-adds,
//! whatever the width of vectors.

use std::cell::RefCell;
use std::ops::Range;

use super::Cpu;
use super::activation::drop_out;
use super::loops::{LANES, largest, sum_of};
use super::math;
use super::small_product::{Left, MatrixRows, MatrixRowsMut, SmallProduct};
use super::transpose::transpose;
use crate::device::{AttentionDropout, AttentionOperations, AttentionShape, Rotation};
use crate::memory::scratch::Room;

/// The queries of a block.
const BLOCK: usize = 16;

/// Memory of a thread.
struct AttentionScratch {
    /// Keys, one column for each position.
    keys: Room,
    /// Values, one column for each position.
    values: Room,
    /// The scores of a block of queries.
    scores: Room,
    /// The gradients of the scores.
    gradients: Room,
}

impl AttentionScratch {
    const fn new() -> AttentionScratch {
        AttentionScratch {
            keys: Room::new(),
            values: Room::new(),
            scores: Room::new(),
            gradients: Room::new(),
        }
    }
}

thread_local! {
    static SCRATCH: RefCell<AttentionScratch> = const { RefCell::new(AttentionScratch::new()) };
}

/// One head of a sequence: the places of its arrays in a position.
#[derive(Clone, Copy)]
struct AttentionHead {
    shape: AttentionShape,
    /// The number of the first weight, for dropout.
    first_weight: u64,
    query: usize,
    key: usize,
    value: usize,
    output: usize,
    /// The first position whose output is computed.
    first: usize,
}

impl AttentionHead {
    /// Returns head `head` of `group` in sequence `row`.
    fn new(shape: AttentionShape, row: usize, group: usize, head: usize) -> AttentionHead {
        let (start, width) = (group * shape.group_width(), shape.width);
        let key = start + shape.heads * width;
        let number = group * shape.heads + head;
        let output = number * width;
        let first_weight = shape.dropout.map_or(0, |dropout| dropout.of_head(row, number, shape.positions));
        let (query, value) = (start + head * width, key + width);
        AttentionHead { shape, first_weight, query, key, value, output, first: 0 }
    }

    /// Computes the dropout of the weights of the query at `position`, or of their gradients, if there is
    /// one.
    #[inline(always)]
    fn drop_out(&self, position: usize, weights: &mut [f32]) {
        if let Some(AttentionDropout { mask, .. }) = &self.shape.dropout {
            let stride = AttentionDropout::query_stride(self.shape.positions);
            drop_out(mask, self.first_weight + position as u64 * stride, weights);
        }
    }

    /// Returns the number of keys that the queries before `end` see.
    fn num_keys(&self, end: usize) -> usize {
        if self.shape.causal { end } else { self.shape.positions }
    }

    /// Returns the blocks of queries.
    fn blocks(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let positions = self.shape.positions;
        (self.first..positions).step_by(BLOCK).map(move |start| start..positions.min(start + BLOCK))
    }
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
        output: &[f32],
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
            let output = &output[of_row(output, output_len)];
            let saved = &saved[of_row(saved, saved_len)];
            let gradient = &gradient[of_row(gradient, output_len)];
            input_gradient.fill(0.0);
            SCRATCH.with_borrow_mut(|scratch| {
                let mut saved = saved.chunks_exact(shape.positions);
                for group in 0..shape.groups {
                    for head in 0..shape.heads {
                        let arrays = HeadArrays {
                            input,
                            logarithms: saved.next().expect("a row for each head"),
                            output,
                            gradient,
                        };
                        let is_first = head == 0;
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
    output: &'a [f32],
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
            for group in 0..shape.groups {
                let keys = scratch.keys.elements(shape.width * shape.positions);
                let key = AttentionHead::new(*shape, row, group, 0).key;
                self.vectorised(
                    #[inline(always)]
                    || columns_of(shape, input, key, keys),
                );
                let scores = scratch.scores.elements(BLOCK * row_len(shape.positions));
                for head in 0..shape.heads {
                    let logarithms = saved.next().unwrap_or_default();
                    let head = AttentionHead { first, ..AttentionHead::new(*shape, row, group, head) };
                    self.forward_head(head, input, keys, scores, logarithms, output);
                }
            }
        });
    }

    /// Computes the outputs of a head, block by block. `keys` has a column for each position. `logarithms`
    /// may be empty.
    fn forward_head(
        &self,
        head: AttentionHead,
        input: &[f32],
        keys: &[f32],
        scores: &mut [f32],
        logarithms: &mut [f32],
        output: &mut [f32],
    ) {
        let (shape, stride, out_stride) = (head.shape, head.shape.input_width(), head.shape.output_width());
        let (positions, width, row_len) = (shape.positions, shape.width, row_len(shape.positions));
        for block in head.blocks() {
            let num_keys = head.num_keys(block.end);
            let queries = &input[block.start * stride + head.query..];
            self.multiply_small(SmallProduct {
                rows: block.len(),
                columns: num_keys,
                terms: width,
                left: Left::Rows(MatrixRows { values: queries, stride }),
                right: MatrixRows { values: keys, stride: positions },
                target: MatrixRowsMut { values: scores, stride: row_len },
                continues: false,
            });
            let (mut largest_of_rows, mut sums) = ([0.0_f32; BLOCK], [1.0_f32; BLOCK]);
            self.vectorised(
                #[inline(always)]
                || {
                    let scale = shape.scale();
                    let rows = largest_of_rows.iter_mut().zip(&mut sums);
                    for (at, (row_largest, total)) in block.clone().zip(rows) {
                        let end = head.num_keys(at + 1);
                        let row = &mut scores[(at - block.start) * row_len..][..row_len];
                        row[end..].fill(f32::NEG_INFINITY);
                        let seen = whole_chunks(row, end);
                        let largest = largest(seen.as_flattened());
                        for chunk in &mut *seen {
                            chunk.iter_mut().for_each(|x| *x = math::exp((*x - largest) * scale));
                        }
                        row[end..].fill(0.0);
                        // zeros at the end change no sum
                        *total = sum_of([&row[..end.next_multiple_of(LANES)]], |[x]| x);
                        head.drop_out(at, &mut row[..end]);
                        *row_largest = largest;
                    }
                    let mut block_logarithms = [0.0_f32; BLOCK];
                    for row in 0..BLOCK {
                        block_logarithms[row] = largest_of_rows[row] * scale + math::ln(sums[row]);
                    }
                    if let Some(logarithms) = logarithms.get_mut(block.clone()) {
                        logarithms.copy_from_slice(&block_logarithms[..block.len()]);
                    }
                },
            );
            let out = &mut output[(block.start - head.first) * out_stride + head.output..];
            self.multiply_small(SmallProduct {
                rows: block.len(),
                columns: width,
                terms: num_keys,
                left: Left::Rows(MatrixRows { values: scores, stride: row_len }),
                right: MatrixRows { values: &input[head.value..], stride },
                target: MatrixRowsMut { values: out, stride: out_stride },
                continues: false,
            });
            for (row, total) in (0..block.len()).zip(sums) {
                out[row * out_stride..][..width].iter_mut().for_each(|value| *value /= total);
            }
        }
    }

    /// Adds the gradients of a head's queries, keys and values to `input_gradient`, block by block. The
    /// columns of keys and values are formed for the first head of a group.
    fn backward_head(
        &self,
        head: AttentionHead,
        is_first: bool,
        arrays: HeadArrays<'_>,
        scratch: &mut AttentionScratch,
        input_gradient: &mut [f32],
    ) {
        let HeadArrays { input, logarithms, output, gradient } = arrays;
        let (shape, stride, out_stride) = (head.shape, head.shape.input_width(), head.shape.output_width());
        let (positions, width, row_len) = (shape.positions, shape.width, row_len(shape.positions));
        let keys = scratch.keys.elements(width * positions);
        let values = scratch.values.elements(width * positions);
        if is_first {
            self.vectorised(
                #[inline(always)]
                || {
                    columns_of(&shape, input, head.key, keys);
                    columns_of(&shape, input, head.value, values);
                },
            );
        }
        let scores = scratch.scores.elements(BLOCK * row_len);
        let gradients = scratch.gradients.elements(BLOCK * row_len);
        for block in head.blocks() {
            let num_keys = head.num_keys(block.end);
            let queries = &input[block.start * stride + head.query..];
            let outputs = &gradient[block.start * out_stride + head.output..];
            let lefts =
                [(queries, stride, &*keys, &mut *scores), (outputs, out_stride, &*values, &mut *gradients)];
            for (left, row_stride, right, target) in lefts {
                self.multiply_small(SmallProduct {
                    rows: block.len(),
                    columns: num_keys,
                    terms: width,
                    left: Left::Rows(MatrixRows { values: left, stride: row_stride }),
                    right: MatrixRows { values: right, stride: positions },
                    target: MatrixRowsMut { values: target, stride: row_len },
                    continues: false,
                });
            }
            self.vectorised(
                #[inline(always)]
                || {
                    let scale = shape.scale();
                    for (row, at) in block.clone().enumerate() {
                        let (end, place) = (head.num_keys(at + 1), at * out_stride + head.output);
                        let (dy, y) = (&gradient[place..][..width], &output[place..][..width]);
                        let mean = sum_of([dy, y], |[dy, y]| dy * y);
                        let scores = &mut scores[row * row_len..][..row_len];
                        let gradients = &mut gradients[row * row_len..][..row_len];
                        head.drop_out(at, &mut gradients[..end]);
                        let chunks = whole_chunks(scores, end).iter_mut();
                        for (scores, gradients) in chunks.zip(whole_chunks(gradients, end)) {
                            for (score, gradient) in scores.iter_mut().zip(gradients) {
                                *score = math::exp(score.mul_add(scale, -logarithms[at]));
                                *gradient = *score * (*gradient - mean) * scale;
                            }
                        }
                        head.drop_out(at, &mut scores[..end]);
                        scores[end..].fill(0.0);
                        gradients[end..].fill(0.0);
                    }
                },
            );
            let rows = |values| MatrixRows { values, stride: row_len };
            let weights = Left::Terms(rows(&*scores));
            let (straight, transposed) = (Left::Rows(rows(&*gradients)), Left::Terms(rows(&*gradients)));
            let products = [
                (
                    straight,
                    block.len(),
                    num_keys,
                    &input[head.key..],
                    stride,
                    block.start * stride + head.query,
                ),
                (transposed, num_keys, block.len(), queries, stride, head.key),
                (weights, num_keys, block.len(), outputs, out_stride, head.value),
            ];
            for (left, rows, terms, right, right_stride, place) in products {
                self.multiply_small(SmallProduct {
                    rows,
                    columns: width,
                    terms,
                    left,
                    right: MatrixRows { values: right, stride: right_stride },
                    target: MatrixRowsMut { values: &mut input_gradient[place..], stride },
                    continues: true,
                });
            }
        }
    }
}

/// Returns the length of a row of scores: whole chunks of lanes, so that no loop has a rest.
fn row_len(positions: usize) -> usize {
    positions.next_multiple_of(LANES)
}

/// Returns the chunks of a row that its first `len` elements are in.
#[inline(always)]
fn whole_chunks(row: &mut [f32], len: usize) -> &mut [[f32; LANES]] {
    row[..len.next_multiple_of(LANES)].as_chunks_mut().0
}

/// Writes the vectors at `place` of each position, as columns.
#[inline(always)]
fn columns_of(shape: &AttentionShape, input: &[f32], place: usize, columns: &mut [f32]) {
    let AttentionShape { positions, width, .. } = *shape;
    transpose([positions, width], &input[place..], shape.input_width(), columns, positions);
}
