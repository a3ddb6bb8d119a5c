//! Attention: sequences are split among the threads.
//!
//! The scores of a block of queries with all keys are formed at a time, so memory grows with the length
//! of a sequence and not with its square. They lie key by key, `[keys, queries of the block]`: a query has
//! its lane of the vectors in all steps of the softmax, and the products after it read the queries of a key
//! side by side. Each element of a product is one chain of fused multiply-adds, whatever the width of
//! vectors.

mod lanes;

use std::cell::RefCell;
use std::ops::Range;

use super::Cpu;
use super::activation::drop_out;
use super::loops::sum_of;
use super::math;
use super::small_product::{Left, MatrixRows, MatrixRowsMut, SmallProduct};
use super::transpose::transpose;
use crate::device::{AttentionDropout, AttentionOperations, AttentionShape, Rotation};
use crate::memory::scratch::Room;
use lanes::{BLOCK, Queries};

/// Memory of a thread. Each array has a row of [`Queries`] for each element or key.
struct AttentionScratch {
    /// The queries of a block.
    queries: Room,
    /// The gradients of their outputs.
    outputs: Room,
    /// Their scores.
    scores: Room,
    /// The gradients of their scores.
    gradients: Room,
    /// The factors by which dropout multiplies their weights.
    factors: Room,
}

impl AttentionScratch {
    const fn new() -> AttentionScratch {
        AttentionScratch {
            queries: Room::new(),
            outputs: Room::new(),
            scores: Room::new(),
            gradients: Room::new(),
            factors: Room::new(),
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

    /// Returns the number of keys that the queries before `end` see.
    fn num_keys(&self, end: usize) -> usize {
        if self.shape.causal { end } else { self.shape.positions }
    }

    /// Writes `value` in place of what queries of `block` have for the keys that they do not see.
    #[inline(always)]
    fn hide(&self, block: &Range<usize>, values: &mut [Queries], value: f32) {
        if self.shape.causal {
            lanes::hide(&mut values[block.start..], value);
        }
    }

    /// Returns the factors by which dropout multiplies the weights of a block, if there is a dropout.
    #[inline(always)]
    fn dropout_factors<'a>(&self, block: &Range<usize>, room: &'a mut Room) -> Option<&'a [Queries]> {
        let dropout = self.shape.dropout.as_ref()?;
        let num_keys = self.num_keys(block.end);
        let (factors, row) = room.elements((BLOCK + 1) * num_keys).split_at_mut(BLOCK * num_keys);
        for (lane, position) in block.clone().enumerate() {
            let first = position as u64 * AttentionDropout::query_stride(self.shape.positions);
            row.fill(1.0);
            drop_out(&dropout.mask, self.first_weight + first, row);
            for (factors, factor) in factors.as_chunks_mut::<BLOCK>().0.iter_mut().zip(&*row) {
                factors[lane] = *factor;
            }
        }
        Some(factors.as_chunks().0)
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
                        let head = AttentionHead::new(*shape, row, group, head);
                        self.backward_head(head, arrays, scratch, input_gradient);
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
                for head in 0..shape.heads {
                    let logarithms = saved.next().unwrap_or_default();
                    let head = AttentionHead { first, ..AttentionHead::new(*shape, row, group, head) };
                    self.forward_head(head, input, scratch, logarithms, output);
                }
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
        for block in head.blocks() {
            let num_keys = head.num_keys(block.end);
            let queries = MatrixRows { values: &input[block.start * stride + head.query..], stride };
            let keys = MatrixRows { values: &input[head.key..], stride };
            let scores = scratch.scores.elements(BLOCK * num_keys);
            self.multiply_block(block.len(), shape.width, queries, keys, &mut scratch.queries, scores);
            let (mut largest, mut sums) = ([0.0; BLOCK], [0.0; BLOCK]);
            self.vectorised(
                #[inline(always)]
                || {
                    let scale = shape.scale();
                    let scores = scores.as_chunks_mut().0;
                    head.hide(&block, scores, f32::NEG_INFINITY);
                    largest = lanes::largest(scores);
                    for scores in &mut *scores {
                        for (score, largest) in scores.iter_mut().zip(&largest) {
                            *score = math::exp((*score - largest) * scale);
                        }
                    }
                    head.hide(&block, scores, 0.0);
                    sums = lanes::sums(scores);
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
            self.multiply_small(SmallProduct {
                rows: block.len(),
                columns: shape.width,
                terms: num_keys,
                left: Left::Terms(MatrixRows { values: scores, stride: BLOCK }),
                right: MatrixRows { values: &input[head.value..], stride },
                target: MatrixRowsMut { values: out, stride: out_stride },
                continues: false,
            });
            for (row, total) in (0..block.len()).zip(sums) {
                out[row * out_stride..][..shape.width].iter_mut().for_each(|value| *value /= total);
            }
        }
    }

    /// Computes the products of vectors of `width` elements: `products`, `[keys, BLOCK]`, of each of `keys`
    /// with each of the `len` vectors of a block. `room` is for the transpose of the block.
    fn multiply_block(
        &self,
        len: usize,
        width: usize,
        block: MatrixRows<'_>,
        keys: MatrixRows<'_>,
        room: &mut Room,
        products: &mut [f32],
    ) {
        let columns = room.elements(BLOCK * width);
        self.vectorised(
            #[inline(always)]
            || {
                if len < BLOCK {
                    columns.fill(0.0);
                }
                transpose([len, width], block.values, block.stride, columns, BLOCK);
            },
        );
        self.multiply_small(SmallProduct {
            rows: products.len() / BLOCK,
            columns: BLOCK,
            terms: width,
            left: Left::Rows(keys),
            right: MatrixRows { values: columns, stride: BLOCK },
            target: MatrixRowsMut { values: products, stride: BLOCK },
            continues: false,
        });
    }

    /// Adds the gradients of a head's queries, keys and values to `input_gradient`, block by block.
    fn backward_head(
        &self,
        head: AttentionHead,
        arrays: HeadArrays<'_>,
        scratch: &mut AttentionScratch,
        input_gradient: &mut [f32],
    ) {
        let HeadArrays { input, logarithms, output, gradient } = arrays;
        let (shape, stride, out_stride) = (head.shape, head.shape.input_width(), head.shape.output_width());
        let (width, scale) = (shape.width, shape.scale());
        let rows = |place: usize| MatrixRows { values: &input[place..], stride };
        for block in head.blocks() {
            let (len, num_keys) = (block.len(), head.num_keys(block.end));
            let query = block.start * stride + head.query;
            let place = block.start * out_stride + head.output;
            let outputs = MatrixRows { values: &gradient[place..], stride: out_stride };
            let scores = scratch.scores.elements(BLOCK * num_keys);
            self.multiply_block(len, width, rows(query), rows(head.key), &mut scratch.queries, scores);
            let gradients = scratch.gradients.elements(BLOCK * num_keys);
            self.multiply_block(len, width, outputs, rows(head.value), &mut scratch.outputs, gradients);
            self.vectorised(
                #[inline(always)]
                || {
                    let (scores, gradients) = (scores.as_chunks_mut().0, gradients.as_chunks_mut().0);
                    let (mut means, mut block_logarithms) = ([0.0; BLOCK], [0.0; BLOCK]);
                    block_logarithms[..len].copy_from_slice(&logarithms[block.clone()]);
                    for (lane, mean) in means.iter_mut().enumerate().take(len) {
                        let place = place + lane * out_stride;
                        let (dy, y) = (&gradient[place..][..width], &output[place..][..width]);
                        *mean = sum_of([dy, y], |[dy, y]| dy * y);
                    }
                    let factors = head.dropout_factors(&block, &mut scratch.factors);
                    if let Some(factors) = factors {
                        lanes::multiply(gradients, factors);
                    }
                    for (scores, gradients) in scores.iter_mut().zip(&mut *gradients) {
                        for lane in 0..BLOCK {
                            let weight = math::exp(scores[lane].mul_add(scale, -block_logarithms[lane]));
                            scores[lane] = weight;
                            gradients[lane] = weight * (gradients[lane] - means[lane]) * scale;
                        }
                    }
                    head.hide(&block, scores, 0.0);
                    head.hide(&block, gradients, 0.0);
                    if let Some(factors) = factors {
                        lanes::multiply(scores, factors);
                    }
                },
            );
            let of_block = |values| MatrixRows { values, stride: BLOCK };
            let (scores, gradients) = (of_block(scores), of_block(gradients));
            let products = [
                (Left::Terms(gradients), len, num_keys, rows(head.key), query),
                (Left::Rows(gradients), num_keys, len, rows(query), head.key),
                (Left::Rows(scores), num_keys, len, outputs, head.value),
            ];
            for (left, rows, terms, right, place) in products {
                self.multiply_small(SmallProduct {
                    rows,
                    columns: width,
                    terms,
                    left,
                    right,
                    target: MatrixRowsMut { values: &mut input_gradient[place..], stride },
                    continues: true,
                });
            }
        }
    }
}
