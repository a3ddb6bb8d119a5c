//! The processor: one thread or several, the widest vectors that it has, `f32`.
//!
//! Results do not depend on the processor's mood: sums have a fixed order for a given number of threads. Subnormal
//! numbers are flushed to zero inside [`flush_subnormals`].

mod convolution;
mod convolution_backward;
mod elementwise;
mod few_rows;
mod math;
mod matmul;
mod pool;
mod subnormal;

#[cfg(test)]
mod tests;

use std::cell::RefCell;
use std::ops::Range;
use std::sync::OnceLock;

use super::{
    Activation, AdamStep, BlockShape, ConvolutionShape, Device, LinearShape, LossShape, PoolShape, Role,
    SgdStep, WeightLayout, totals,
};
use crate::memory::Memory;
use crate::{Error, Result};
pub use subnormal::flush_subnormals;

use convolution_backward::Entry;
use matmul::Matrix;

/// The processor as a [`Device`].
#[derive(Debug)]
pub struct Cpu {
    threads: usize,
    arch: pulp::Arch,
}

/// Memory that operations use again and again.
#[derive(Default)]
struct Scratch {
    first: Vec<f32>,
    second: Vec<f32>,
    entries: Vec<Entry>,
    lengths: Vec<usize>,
}

fn with_scratch(work: impl FnOnce(&mut Scratch)) {
    thread_local! {
        static SCRATCH: RefCell<Scratch> = RefCell::default();
    }
    SCRATCH.with_borrow_mut(work);
}

impl Cpu {
    /// The processor with `threads` threads for this process; the first call in a process fixes the number.
    ///
    /// # Errors
    /// `threads` is 0, or the threads cannot be started.
    pub fn new(threads: usize) -> Result<Cpu> {
        let doing = "starting the threads of a rank";
        if threads == 0 {
            return Err(Error::input(doing, "it takes at least one"));
        }
        if threads > 1 {
            static POOL: OnceLock<std::result::Result<(), String>> = OnceLock::new();
            let start = || rayon::ThreadPoolBuilder::new().num_threads(threads).build_global();
            let outcome = POOL.get_or_init(|| start().map_err(|error| error.to_string()));
            outcome.clone().map_err(|error| Error::failed(doing, format!("{threads} threads: {error}")))?;
        }
        Ok(Cpu { threads, arch: pulp::Arch::new() })
    }

    /// Runs a loop compiled for the widest vectors of this processor. `work` must be marked `#[inline(always)]`; it is called
    /// as `FnMut`, for the shim that `FnOnce` would put between is inlined only where the loop is small.
    #[inline(always)]
    fn vectorised(&self, mut work: impl FnMut()) {
        struct Loop<'a, F>(&'a mut F);

        impl<F: FnMut()> pulp::WithSimd for Loop<'_, F> {
            type Output = ();

            #[inline(always)]
            fn with_simd<S: pulp::Simd>(self, _: S) {
                (self.0)();
            }
        }

        self.arch.dispatch(Loop(&mut work));
    }

    /// How many rows of a batch each thread takes, so that all have about the same.
    fn rows_per_thread(&self, rows: usize) -> usize {
        rows.div_ceil(self.threads).max(1)
    }

    /// Runs `work` on every item, on the threads if there are several.
    fn for_each<I: Send>(&self, items: impl Iterator<Item = I>, work: impl Fn(I) + Sync) {
        if self.threads == 1 {
            return items.for_each(work);
        }
        let work = &work;
        rayon::in_place_scope(|scope| items.for_each(|item| scope.spawn(move |_| work(item))));
    }
}

impl Device for Cpu {
    type Buffer = Memory<f32>;
    type View<'a> = &'a [f32];
    type ViewMut<'a> = &'a mut [f32];
    type Totals = [f32; totals::LEN];
    type Recording = ();

    fn allocate(&self, len: usize, _: Role) -> Result<Memory<f32>> {
        Memory::zeroed(len)
    }

    fn view<'a>(&self, buffer: &'a Memory<f32>, range: Range<usize>) -> &'a [f32] {
        &buffer[range]
    }

    fn view_mut<'a>(&self, buffer: &'a mut Memory<f32>, range: Range<usize>) -> &'a mut [f32] {
        &mut buffer[range]
    }

    fn write(&self, into: &mut [f32], fill: &mut dyn FnMut(&mut [f32]) -> Result<()>) -> Result<()> {
        fill(into)
    }

    fn read(&self, from: &[f32], look: &mut dyn FnMut(&[f32]) -> Result<()>) -> Result<()> {
        look(from)
    }

    fn start_totals(&self, sums: &[f32]) -> Result<[f32; totals::LEN]> {
        Ok(std::array::from_fn(|total| sums[total]))
    }

    fn finish_totals(&self, reading: [f32; totals::LEN]) -> Result<[f32; totals::LEN]> {
        Ok(reading)
    }

    fn gather_rows(&self, columns: usize, table: &[f32], numbers: &[f32], into: &mut [f32]) {
        for (row, number) in into.chunks_exact_mut(columns).zip(numbers) {
            row.copy_from_slice(&table[number.to_bits() as usize * columns..][..columns]);
        }
    }

    fn fill(&self, into: &mut [f32], value: f32) {
        into.fill(value);
    }

    fn copy(&self, from: &[f32], into: &mut [f32]) {
        into.copy_from_slice(from);
    }

    fn copy_block(&self, shape: &BlockShape, from: &[f32], into: &mut [f32]) {
        let BlockShape { rows, columns, from_stride, into_stride } = *shape;
        for row in 0..rows {
            into[row * into_stride..][..columns].copy_from_slice(&from[row * from_stride..][..columns]);
        }
    }

    fn linear_forward(
        &self,
        shape: &LinearShape,
        input: &[f32],
        weight: &[f32],
        bias: Option<&[f32]>,
        activation: Activation,
        saved: &mut [f32],
        output: &mut [f32],
    ) {
        let LinearShape { rows, inputs, outputs, layout } = *shape;
        let right = match layout {
            WeightLayout::OutputsByInputs => Matrix::transposed(weight, inputs, outputs),
            WeightLayout::InputsByOutputs => Matrix::new(weight, inputs, outputs),
        };
        self.multiply(Matrix::new(input, rows, inputs), right, output, false);
        self.bias_and_activation(activation, bias, outputs, output, saved);
    }

    fn linear_backward_weight(
        &self,
        shape: &LinearShape,
        input: &[f32],
        gradient: &[f32],
        weight_gradient: &mut [f32],
        accumulate: bool,
    ) {
        let LinearShape { rows, inputs, outputs, layout } = *shape;
        match layout {
            WeightLayout::OutputsByInputs => {
                let left = Matrix::transposed(gradient, outputs, rows);
                self.multiply(left, Matrix::new(input, rows, inputs), weight_gradient, accumulate);
            }
            WeightLayout::InputsByOutputs => {
                let left = Matrix::transposed(input, inputs, rows);
                self.multiply(left, Matrix::new(gradient, rows, outputs), weight_gradient, accumulate);
            }
        }
    }

    fn linear_backward_input(
        &self,
        shape: &LinearShape,
        gradient: &[f32],
        weight: &[f32],
        input_gradient: &mut [f32],
        before: Option<(Activation, &[f32])>,
    ) {
        let LinearShape { rows, inputs, outputs, layout } = *shape;
        let right = match layout {
            WeightLayout::OutputsByInputs => Matrix::new(weight, outputs, inputs),
            WeightLayout::InputsByOutputs => Matrix::transposed(weight, outputs, inputs),
        };
        self.multiply(Matrix::new(gradient, rows, outputs), right, input_gradient, false);
        if let Some((activation, saved)) = before {
            self.unactivate(activation, inputs, saved, input_gradient, None, false);
        }
    }

    fn activation_forward(
        &self,
        activation: Activation,
        input: &[f32],
        saved: &mut [f32],
        output: &mut [f32],
    ) {
        output.copy_from_slice(input);
        self.activate(activation, output, saved);
    }

    fn backward_activation(
        &self,
        activation: Activation,
        columns: usize,
        saved: &[f32],
        gradient: &mut [f32],
        bias_gradient: Option<&mut [f32]>,
        accumulate: bool,
    ) {
        self.unactivate(activation, columns, saved, gradient, bias_gradient, accumulate);
    }

    fn convolution_forward(
        &self,
        shape: &ConvolutionShape,
        input: &[f32],
        weight: &[f32],
        bias: &[f32],
        route: &mut [f32],
        output: &mut [f32],
    ) {
        self.convolve(shape, input, [weight, bias], route, output);
    }

    fn convolution_backward_weight(
        &self,
        shape: &ConvolutionShape,
        input: &[f32],
        route: &[f32],
        gradient: &[f32],
        weight_gradient: &mut [f32],
        accumulate: bool,
    ) {
        self.convolve_backward_weight(shape, input, [route, gradient], weight_gradient, accumulate);
    }

    fn convolution_backward_input(
        &self,
        shape: &ConvolutionShape,
        weight: &[f32],
        route: &[f32],
        gradient: &[f32],
        input_gradient: &mut [f32],
    ) {
        self.convolve_backward_input(shape, weight, [route, gradient], input_gradient);
    }

    fn max_pool_forward(&self, shape: &PoolShape, input: &[f32], route: &mut [f32], output: &mut [f32]) {
        pool::forward(shape, input, route, output);
    }

    fn max_pool_backward(
        &self,
        shape: &PoolShape,
        route: &[f32],
        gradient: &[f32],
        input_gradient: &mut [f32],
    ) {
        pool::backward(shape, route, gradient, input_gradient);
    }

    fn transpose_each(&self, rows: usize, columns: usize, input: &[f32], output: &mut [f32]) {
        let matrices = input.chunks_exact(rows * columns).zip(output.chunks_exact_mut(rows * columns));
        matrices.for_each(|(input, output)| self.transpose_matrix(rows, columns, input, output));
    }

    fn cross_entropy(
        &self,
        shape: &LossShape,
        logits: &[f32],
        labels: &[f32],
        gradient: &mut [f32],
        sums: &mut [f32],
    ) {
        Cpu::softmax_cross_entropy(shape, logits, labels, gradient, sums);
    }

    fn mean_squared_error(
        &self,
        shape: &LossShape,
        output: &[f32],
        targets: Option<&[f32]>,
        gradient: &mut [f32],
        sums: &mut [f32],
    ) {
        self.squared_error(shape, output, targets, gradient, sums);
    }

    fn sgd_step(
        &self,
        step: &SgdStep,
        update: &[f32],
        parameters: &mut [f32],
        gradients: &[f32],
        momentum: &mut [f32],
        sums: &mut [f32],
    ) {
        sums[totals::GRADIENT_SQUARES] += self.sgd((step, update), parameters, gradients, momentum) as f32;
    }

    fn adam_step(
        &self,
        step: &AdamStep,
        update: &[f32],
        parameters: &mut [f32],
        gradients: &[f32],
        moments: [&mut [f32]; 2],
        sums: &mut [f32],
    ) {
        sums[totals::GRADIENT_SQUARES] += self.adam((step, update), parameters, gradients, moments) as f32;
    }

    fn sum_squares(&self, values: &[f32], sums: &mut [f32]) {
        sums[totals::GRADIENT_SQUARES] += self.squares(values) as f32;
    }
}
