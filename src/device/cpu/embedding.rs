//! Embeddings. The gradient of a table is formed row by row, so that its memory is passed over once.

use std::cell::RefCell;

use smallvec::SmallVec;

use super::Cpu;
use super::leaf_sums::{LeafSums, add_up};
use crate::device::{EmbeddingOperations, EmbeddingShape, RowSums};
use crate::sums::MOST_PENDING;

/// Memory of a thread.
#[derive(Default)]
struct EmbeddingScratch {
    sums: LeafSums,
    /// The places of each row's tokens, one row after the other.
    places: Vec<u32>,
    /// The end of the places of each row.
    ends: Vec<u32>,
}

thread_local! {
    static SCRATCH: RefCell<EmbeddingScratch> = RefCell::default();
}

impl EmbeddingShape {
    /// Returns the row of a token, if it has one here.
    fn row(&self, token: f32) -> Option<usize> {
        (token as usize).checked_sub(self.first).filter(|row| *row < self.rows)
    }
}

impl EmbeddingScratch {
    /// Sorts the places of tokens by their rows.
    fn sort(&mut self, shape: &EmbeddingShape, tokens: &[f32]) {
        let EmbeddingScratch { places, ends, .. } = self;
        ends.clear();
        ends.resize(shape.rows + 1, 0);
        let rows = || tokens.iter().map(|token| shape.row(*token));
        rows().flatten().for_each(|row| ends[row + 1] += 1);
        (0..shape.rows).for_each(|row| ends[row + 1] += ends[row]);
        places.resize(ends[shape.rows] as usize, 0);
        // `ends[row]` is the start of the row until its places are there
        for (place, row) in rows().enumerate() {
            if let Some(row) = row {
                places[ends[row] as usize] = place as u32;
                ends[row] += 1;
            }
        }
    }
}

impl EmbeddingOperations for Cpu {
    fn embed(&self, shape: &EmbeddingShape, tokens: &[f32], table: &[f32], output: &mut [f32]) {
        assert_eq!(output.len(), shape.tokens * shape.columns, "a row for each token");
        for (output, token) in output.chunks_exact_mut(shape.columns).zip(tokens) {
            match shape.row(*token) {
                Some(row) => {
                    let row = &table[row * shape.columns..][..shape.columns];
                    output.iter_mut().zip(row).for_each(|(output, value)| *output = 0.0 + value);
                }
                None => output.fill(0.0),
            }
        }
    }

    fn embed_backward(
        &self,
        shape: &EmbeddingShape,
        tokens: &[f32],
        gradient: &[f32],
        table_gradient: RowSums<&mut [f32]>,
    ) {
        let columns = shape.columns;
        let section = table_gradient.rows;
        let mut arrays = table_gradient.arrays(shape.rows * columns);
        SCRATCH.with_borrow_mut(|scratch| {
            scratch.sort(shape, &tokens[..section.len()]);
            let EmbeddingScratch { sums, places, ends } = scratch;
            let mut start = 0;
            for (row, end) in ends[..shape.rows].iter().enumerate() {
                let mut places = places[std::mem::replace(&mut start, *end as usize)..*end as usize].iter();
                let mut own: SmallVec<[&mut [f32]; MOST_PENDING]> =
                    arrays.iter_mut().map(|array| &mut array[row * columns..][..columns]).collect();
                add_up(section, sums, &mut own, |rows, sums| {
                    while let Some(place) = places.as_slice().first().map(|place| *place as usize) {
                        if place >= rows.end {
                            break;
                        }
                        places.next();
                        let gradient = &gradient[place * columns..][..columns];
                        self.vectorised(
                            #[inline(always)]
                            || sums.iter_mut().zip(gradient).for_each(|(sum, value)| *sum += value),
                        );
                    }
                });
            }
        });
    }

    fn add_table(&self, input: &[f32], table: &[f32], output: &mut [f32]) {
        for (input, output) in input.chunks_exact(table.len()).zip(output.chunks_exact_mut(table.len())) {
            self.vectorised(
                #[inline(always)]
                || {
                    for ((output, value), row) in output.iter_mut().zip(input).zip(table) {
                        *output = value + row;
                    }
                },
            );
        }
    }
}
