//! Fills, copies and sums in host memory.

use std::cell::RefCell;

use super::Cpu;
use super::activation::relu;
use super::transpose::transpose;
use crate::device::{BlockShape, CopyOperations, GatheredRows};

impl CopyOperations for Cpu {
    fn fill(&self, into: &mut [f32], value: f32) {
        into.fill(value);
    }

    fn copy(&self, from: &[f32], into: &mut [f32]) {
        into.copy_from_slice(from);
    }

    fn add(&self, from: &[f32], into: &mut [f32]) {
        assert_eq!(from.len(), into.len(), "arrays that are added have one length");
        self.zip(into, from, |sum, value| sum + value);
    }

    fn sum(&self, first: &[f32], second: &[f32], has_relu: bool, output: &mut [f32]) {
        let len = output.len();
        assert!(first.len() == len && second.len() == len, "arrays that are added have one length");
        let part = self.part_len(len);
        let parts = output.chunks_mut(part).zip(first.chunks(part)).zip(second.chunks(part));
        self.for_each(parts, |((output, first), second)| {
            self.vectorised(
                #[inline(always)]
                || {
                    let values = output.iter_mut().zip(first).zip(second);
                    match has_relu {
                        true => values.for_each(|((sum, first), second)| *sum = relu(first + second)),
                        false => values.for_each(|((sum, first), second)| *sum = first + second),
                    }
                },
            );
        });
    }

    fn copy_block(&self, shape: &BlockShape, from: &[f32], into: &mut [f32]) {
        let BlockShape { rows, columns, from_stride, into_stride } = *shape;
        for row in 0..rows {
            into[row * into_stride..][..columns].copy_from_slice(&from[row * from_stride..][..columns]);
        }
    }

    fn transpose_each(&self, rows: usize, columns: usize, input: &[f32], output: &mut [f32]) {
        let len = rows * columns;
        let part = self.part_len(input.len()).next_multiple_of(len);
        self.for_each(input.chunks(part).zip(output.chunks_mut(part)), |(input, output)| {
            let matrices = input.chunks_exact(len).zip(output.chunks_exact_mut(len));
            matrices.for_each(|(input, output)| self.transpose_matrix(rows, columns, input, output));
        });
    }

    fn gather_rows(
        &self,
        numbers: &[f32],
        first: GatheredRows<&[f32], &mut [f32]>,
        second: GatheredRows<&[f32], &mut [f32]>,
    ) {
        let tables = [first, second].into_iter().filter(|table| table.columns > 0);
        for GatheredRows { columns, table, into } in tables {
            let part = self.part_len(into.len()).div_ceil(columns);
            self.for_each(into.chunks_mut(part * columns).zip(numbers.chunks(part)), |(into, numbers)| {
                for (row, number) in into.chunks_exact_mut(columns).zip(numbers) {
                    row.copy_from_slice(&table[number.to_bits() as usize * columns..][..columns]);
                }
            });
        }
    }
}

thread_local! {
    /// A copy of a matrix that is transposed in place.
    static MATRIX: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

impl Cpu {
    /// Transposes each of the `rows × columns` matrices that `values` consists of, on this thread.
    pub(super) fn transpose_in_place(&self, rows: usize, columns: usize, values: &mut [f32]) {
        MATRIX.with_borrow_mut(|copy| {
            copy.resize(rows * columns, 0.0);
            for matrix in values.chunks_exact_mut(rows * columns) {
                copy.copy_from_slice(matrix);
                self.transpose_matrix(rows, columns, copy, matrix);
            }
        });
    }

    /// Computes `output = inputᵀ`, `input` being `[rows, columns]`.
    pub(super) fn transpose_matrix(&self, rows: usize, columns: usize, input: &[f32], output: &mut [f32]) {
        self.vectorised(
            #[inline(always)]
            || transpose([rows, columns], input, columns, output, rows),
        );
    }
}
