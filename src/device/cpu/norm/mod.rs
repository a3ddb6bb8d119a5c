//! Normalisations: vectors and images are split among the threads.

mod block;
mod group;
mod layer;
#[cfg(test)]
mod tests;

use std::cell::RefCell;
use std::ops::Range;

use self::group::{
    BackwardArrays, GroupAffine, GroupBackward, GroupForward, GroupPositionSums, GroupSums, NormInput,
};
use self::layer::{LayerBackward, LayerForward};
use super::Cpu;
use super::leaf_sums::{SumArrays, add_up};
use crate::device::{GroupNormShape, NormOperations, NormShape, RowSums};
use crate::sums::Section;

thread_local! {
    /// Values of each channel.
    static CHANNELS: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Runs `work` with memory for `len` values, which operations of this thread reuse.
fn with_channels(len: usize, work: impl FnOnce(&mut [f32])) {
    CHANNELS.with_borrow_mut(|memory| {
        memory.resize(len, 0.0);
        work(memory);
    });
}

impl NormOperations for Cpu {
    fn layer_norm_forward(
        &self,
        shape: &NormShape,
        input: &[f32],
        weight: &[f32],
        bias: Option<&[f32]>,
        saved: &mut [f32],
        output: &mut [f32],
    ) {
        let NormShape { rows, columns, .. } = *shape;
        let part = self.rows_per_thread(rows);
        let parts = input.chunks(part * columns).zip(output.chunks_mut(part * columns));
        self.for_each(parts.zip(saved.chunks_mut(NormShape::SAVED * part)), |((input, output), saved)| {
            self.arch.dispatch(LayerForward { shape, input, weight, bias, saved, output });
        });
    }

    fn layer_norm_backward_weight(
        &self,
        shape: &NormShape,
        input: &[f32],
        saved: &[f32],
        gradient: &[f32],
        weight_gradient: RowSums<&mut [f32]>,
    ) {
        let terms = NormTerms { columns: shape.columns, input, saved: Some(saved), gradient };
        self.add_up_vectors(shape.positions, shape.columns, weight_gradient, |rows, first, sums| {
            self.add_weight_terms(terms, rows, first, sums);
        });
    }

    fn layer_norm_backward_bias(
        &self,
        shape: &NormShape,
        gradient: &[f32],
        bias_gradient: RowSums<&mut [f32]>,
    ) {
        self.add_up_vectors(shape.positions, shape.columns, bias_gradient, |rows, first, sums| {
            self.add_vectors(shape.columns, gradient, rows, first, sums);
        });
    }

    fn layer_norm_position_sums(
        &self,
        shape: &NormShape,
        input: &[f32],
        saved: &[f32],
        gradient: &[f32],
        has_bias: bool,
        sums: &mut [f32],
    ) {
        let NormShape { rows, columns, positions: Some(positions), .. } = *shape else {
            unreachable!("only sequences have sums over positions")
        };
        if positions.is_empty() {
            return sums.fill(0.0);
        }
        let terms = NormTerms { columns, input, saved: Some(saved), gradient };
        let (num_samples, num_tensors) = (rows / positions.len(), 1 + usize::from(has_bias));
        let len = num_samples * columns;
        for (sample, tensor) in (0..num_samples).flat_map(|sample| (0..num_tensors).map(move |t| (sample, t)))
        {
            let (first, start) = (sample * positions.len(), tensor * len + sample * columns);
            let arrays = sums.chunks_exact_mut(num_tensors * len);
            let arrays: SumArrays<'_> = arrays.map(|array| &mut array[start..start + columns]).collect();
            self.by_columns(columns, positions.len() * columns, arrays, |columns_here, mut arrays| {
                add_up(positions, &mut arrays, |own, sums| {
                    let (rows, from) = (first + own.start..first + own.end, columns_here.start);
                    match tensor {
                        0 => self.add_weight_terms(terms, rows, from, sums),
                        _ => self.add_vectors(columns, gradient, rows, from, sums),
                    }
                });
            });
        }
    }

    fn layer_norm_backward_input(
        &self,
        shape: &NormShape,
        input: &[f32],
        weight: &[f32],
        saved: &[f32],
        gradient: &[f32],
        input_gradient: &mut [f32],
    ) {
        let NormShape { rows, columns, .. } = *shape;
        let part = self.rows_per_thread(rows);
        let parts = input.chunks(part * columns).zip(gradient.chunks(part * columns));
        let parts = parts.zip(input_gradient.chunks_mut(part * columns));
        let parts = parts.zip(saved.chunks(NormShape::SAVED * part));
        self.for_each(parts, |(((input, gradient), input_gradient), saved)| {
            self.arch.dispatch(LayerBackward { shape, input, weight, saved, gradient, input_gradient });
        });
    }

    fn group_norm_forward(
        &self,
        shape: &GroupNormShape,
        input: &[f32],
        weight: &[f32],
        bias: &[f32],
        added: Option<&[f32]>,
        saved: &mut [f32],
        output: &mut [f32],
    ) {
        let part = self.rows_per_thread(shape.rows);
        let len = part * shape.image_len();
        let images = input.chunks(len).zip(output.chunks_mut(len)).enumerate();
        let saved = saved.chunks_mut(part * shape.saved_len());
        self.for_each(images.zip(saved), |((number, (input, output)), saved)| {
            let added = added.map(|added| &added[number * len..][..input.len()]);
            let affine = GroupAffine { weight, bias, added };
            with_channels(2 * shape.channels, |channels| {
                self.arch.dispatch(GroupForward { shape, input, affine, saved, output, channels });
            });
        });
    }

    fn group_norm_position_sums(
        &self,
        shape: &GroupNormShape,
        input: &[f32],
        saved: &[f32],
        gradient: &[f32],
        sums: &mut [f32],
    ) {
        let (part, norm_input) = (self.rows_per_thread(shape.rows), NormInput { shape, input, saved });
        let parts = GroupSums::parts(shape, part, sums).zip(norm_input.parts(part));
        let parts = parts.zip(gradient.chunks(part * shape.image_len()));
        self.for_each(parts, |((sums, norm_input), gradient)| {
            with_channels(2 * shape.channels, |channels| {
                self.arch.dispatch(GroupPositionSums { norm_input, gradient, channels, sums });
            });
        });
    }

    fn group_norm_backward_input(
        &self,
        shape: &GroupNormShape,
        input: &[f32],
        weight: &[f32],
        saved: &[f32],
        gradient: &[f32],
        input_gradient: &mut [f32],
    ) {
        let (part, norm_input) = (self.rows_per_thread(shape.rows), NormInput { shape, input, saved });
        let len = part * shape.image_len();
        let parts = norm_input.parts(part).zip(gradient.chunks(len)).zip(input_gradient.chunks_mut(len));
        self.for_each(parts, |((norm_input, gradient), input_gradient)| {
            with_channels(4 * shape.channels, |channels| {
                let arrays = BackwardArrays { norm_input, weight, gradient, channels, input_gradient };
                self.arch.dispatch(GroupBackward { arrays, output: None, sums: None });
            });
        });
    }

    fn fuses_group_norm_backward(&self) -> bool {
        true
    }

    fn group_norm_backward(
        &self,
        shape: &GroupNormShape,
        input: &[f32],
        weight: &[f32],
        saved: &[f32],
        output: &[f32],
        gradient: &[f32],
        sums: &mut [f32],
        input_gradient: &mut [f32],
    ) {
        let (part, norm_input) = (self.rows_per_thread(shape.rows), NormInput { shape, input, saved });
        let len = part * shape.image_len();
        let parts = GroupSums::parts(shape, part, sums).zip(norm_input.parts(part)).zip(output.chunks(len));
        let parts = parts.zip(gradient.chunks(len)).zip(input_gradient.chunks_mut(len));
        self.for_each(parts, |((((sums, norm_input), output), gradient), input_gradient)| {
            with_channels(4 * shape.channels, |channels| {
                let arrays = BackwardArrays { norm_input, weight, gradient, channels, input_gradient };
                let output = shape.relu.then_some(output);
                self.arch.dispatch(GroupBackward { arrays, output, sums: Some(sums) });
            });
        });
    }

    fn scale_columns(&self, input: &[f32], weight: &[f32], output: &mut [f32]) {
        let columns = weight.len();
        let part = self.rows_per_thread(input.len() / columns) * columns;
        self.for_each(input.chunks(part).zip(output.chunks_mut(part)), |(input, output)| {
            self.vectorised(
                #[inline(always)]
                || {
                    for (x, y) in input.chunks_exact(columns).zip(output.chunks_exact_mut(columns)) {
                        y.iter_mut().zip(x).zip(weight).for_each(|((y, x), w)| *y = x * w);
                    }
                },
            );
        });
    }

    fn scale_columns_backward_weight(
        &self,
        columns: usize,
        input: &[f32],
        gradient: &[f32],
        weight_gradient: RowSums<&mut [f32]>,
    ) {
        let terms = NormTerms { columns, input, saved: None, gradient };
        self.add_up_vectors(None, columns, weight_gradient, |rows, first, sums| {
            self.add_weight_terms(terms, rows, first, sums);
        });
    }
}

/// The arrays of the gradient of a weight.
#[derive(Clone, Copy)]
struct NormTerms<'a> {
    columns: usize,
    input: &'a [f32],
    /// The mean and 1/σ of each vector, or nothing if vectors are taken as they are.
    saved: Option<&'a [f32]>,
    gradient: &'a [f32],
}

impl Cpu {
    /// Adds columns of the vectors `rows`, from `first` on, to the gradient of a weight.
    fn add_weight_terms(&self, terms: NormTerms<'_>, rows: Range<usize>, first: usize, sums: &mut [f32]) {
        let NormTerms { columns, input, saved, gradient } = terms;
        self.vectorised(
            #[inline(always)]
            || {
                for row in rows.clone() {
                    let own = row * columns + first..(row + 1) * columns;
                    let (x, g) = (&input[own.clone()], &gradient[own]);
                    let statistics = saved.map(|saved| &saved[row * NormShape::SAVED..][..NormShape::SAVED]);
                    let (mean, scale) = statistics.map_or((0.0, 1.0), |saved| (saved[0], saved[1]));
                    for ((sum, x), g) in sums.iter_mut().zip(x).zip(g) {
                        *sum = ((x - mean) * scale).mul_add(*g, *sum);
                    }
                }
            },
        );
    }

    /// Adds up vectors: without `positions` one after the other, else those of a sample first. `add` adds
    /// columns of some of them, from a first one on, to sums.
    fn add_up_vectors(
        &self,
        positions: Option<Section>,
        columns: usize,
        sums: RowSums<&mut [f32]>,
        add: impl Fn(Range<usize>, usize, &mut [f32]) + Sync,
    ) {
        let (section, arrays) = (sums.rows, sums.arrays(columns));
        let len = positions.map_or(1, |positions| positions.len());
        self.by_columns(columns, section.len() * len * columns, arrays, |own, mut arrays| match positions {
            None => add_up(section, &mut arrays, |rows, sums| add(rows, own.start, sums)),
            Some(positions) => with_channels(own.len(), |of_sample| {
                add_up(section, &mut arrays, |samples, sums| {
                    for first in samples.map(|sample| sample * len) {
                        add_up(positions, &mut [&mut *of_sample], |rows, sums| {
                            add(first + rows.start..first + rows.end, own.start, sums);
                        });
                        sums.iter_mut().zip(&*of_sample).for_each(|(sum, value)| *sum += value);
                    }
                });
            }),
        });
    }
}
