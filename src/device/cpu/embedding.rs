//! Embeddings. The gradient of a table is formed row by row, so that its memory is passed over once.

use std::cell::RefCell;

use super::Cpu;
use super::leaf_sums::{add_up, split_off};
use super::loops::LONG_PASS;
use crate::device::{EmbeddingOperations, EmbeddingShape, RowSums};

/// The places of tokens by the rows of a table.
#[derive(Default)]
struct TokenPlaces {
    /// The places of each row's tokens, one row after the other.
    places: Vec<u32>,
    /// The end of the places of each row.
    ends: Vec<u32>,
}

thread_local! {
    static PLACES: RefCell<TokenPlaces> = RefCell::default();
}

impl EmbeddingShape {
    /// Returns the row of a token, if it has one here.
    fn row(&self, token: f32) -> Option<usize> {
        (token as usize).checked_sub(self.first).filter(|row| *row < self.rows)
    }
}

impl TokenPlaces {
    /// Sorts the places of tokens by their rows.
    fn sort(&mut self, shape: &EmbeddingShape, tokens: &[f32]) {
        let TokenPlaces { places, ends } = self;
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
        let (columns, part) = (shape.columns, self.part_len(output.len()).div_ceil(shape.columns));
        self.for_each(output.chunks_mut(part * columns).zip(tokens.chunks(part)), |(output, tokens)| {
            for (output, token) in output.chunks_exact_mut(columns).zip(tokens) {
                match shape.row(*token) {
                    Some(row) => {
                        let row = &table[row * columns..][..columns];
                        output.iter_mut().zip(row).for_each(|(output, value)| *output = 0.0 + value);
                    }
                    None => output.fill(0.0),
                }
            }
        });
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
        // most rows of a large table have no token, and a sum that begins here is 0 then
        let begins = section.depth_before() == 0;
        let depth = section.depth_after();
        PLACES.with_borrow_mut(|tokens_by_row| {
            tokens_by_row.sort(shape, &tokens[..section.len()]);
            let TokenPlaces { places, ends } = &*tokens_by_row;
            let is_short = section.len().max(shape.rows) * columns < LONG_PASS;
            let part = if is_short { shape.rows.max(1) } else { self.rows_per_thread(shape.rows) };
            let parts = (0..shape.rows).step_by(part).map(|first| {
                let rows = first..shape.rows.min(first + part);
                let arrays = split_off(&mut arrays, rows.len() * columns);
                (rows, arrays)
            });
            self.for_each(parts, |(rows, mut arrays)| {
                let mut start = rows.start.checked_sub(1).map_or(0, |before| ends[before] as usize);
                for row in rows {
                    let end = ends[row] as usize;
                    let mut places = places[std::mem::replace(&mut start, end)..end].iter();
                    let mut own = split_off(&mut arrays, columns);
                    if begins && places.len() == 0 {
                        own[..depth].iter_mut().for_each(|sum| sum.fill(0.0));
                        continue;
                    }
                    add_up(section, &mut own, |rows, sums| {
                        while let Some(place) = places.as_slice().first().map(|place| *place as usize) {
                            if place >= rows.end {
                                break;
                            }
                            places.next();
                            self.add_vectors(columns, gradient, place..place + 1, 0, sums);
                        }
                    });
                }
            });
        });
    }

    fn add_table(&self, input: &[f32], table: &[f32], output: &mut [f32]) {
        let part = self.part_len(output.len()).next_multiple_of(table.len());
        self.for_each(input.chunks(part).zip(output.chunks_mut(part)), |(input, output)| {
            self.vectorised(
                #[inline(always)]
                || {
                    for (input, output) in input.chunks(table.len()).zip(output.chunks_mut(table.len())) {
                        let values = output.iter_mut().zip(input).zip(table);
                        values.for_each(|((output, value), row)| *output = value + row);
                    }
                },
            );
        });
    }
}
