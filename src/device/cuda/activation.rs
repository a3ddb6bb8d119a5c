//! Activations, forward and backward.

use super::dropout::DropoutDraws;
use super::runtime::buffer::{CudaView, CudaViewMut};
use super::runtime::format::Format;
use super::runtime::gpu::Cuda;
use super::runtime::kernels::kernel_table;
use super::runtime::launch::{BLOCK, KernelArgument, Launch, launch, size32};
use super::runtime::partial_sums::{COLUMN_COUNTERS, SUM_COLUMNS};
use crate::device::{Activation, ActivationOperations, BiasShape, DropoutShape, Gate, RowSums};

/// The most rows that a block adds up without others beside it.
pub(super) const MOST_ROWS_AT_ONCE: usize = 256;

/// Largest number of partial sums that a sum over rows is split into.
const MAX_PARTIAL_SUMS: usize = 128;

kernel_table!(ActivationKernels in "activation.cu" {
    bias_activation_forward: KernelPair,
    activation_backward: KernelPair,
    activation_backward_bias: KernelPair,
    gated_forward: KernelPair,
    gated_backward: KernelPair,
    dropout: KernelPair,
});

/// `struct DropoutShape` of the kernels.
#[derive(Clone, Copy)]
#[repr(C)]
struct DropoutRows {
    draws: DropoutDraws,
    first: u64,
    row_len: u64,
    row_stride: u64,
}

impl KernelArgument for DropoutRows {}

/// Returns the kernels' number of a gate.
fn gate_number(gate: Gate) -> i32 {
    match gate {
        Gate::Sigmoid => 0,
        Gate::Silu => 1,
        Gate::Gelu => 2,
    }
}

/// Returns the kernels' number of an activation.
pub(super) fn number(activation: Activation) -> i32 {
    match activation {
        Activation::Identity => 0,
        Activation::Relu => 1,
        Activation::Gelu => 2,
        Activation::Tanh => 3,
        Activation::GeluTanh => 4,
        Activation::Silu => 5,
    }
}

impl ActivationOperations for Cuda {
    fn activation_forward(
        &self,
        activation: Activation,
        input: CudaView<'_>,
        saved: CudaViewMut<'_>,
        output: CudaViewMut<'_>,
    ) {
        self.bias_and_activation(activation, None, input, &saved, &output);
    }

    fn activation_backward(
        &self,
        activation: Activation,
        BiasShape { columns, .. }: BiasShape,
        saved: CudaView<'_>,
        gradient: CudaViewMut<'_>,
        bias_gradient: Option<RowSums<CudaViewMut<'_>>>,
    ) {
        let is_identity = activation == Activation::Identity;
        assert!(is_identity || saved.len == gradient.len && saved.format == gradient.format);
        let (number, kernels) = (number(activation), self.kernels.of::<ActivationKernels>());
        let Some(bias_gradient) = bias_gradient else {
            if !is_identity {
                let (kernel, len) = (kernels.activation_backward.of(gradient.format), gradient.len as u64);
                let launch = self.streams.over(gradient.len, 4);
                launch!(self.streams, kernel, launch, number, len, saved.pointer, gradient.pointer);
            }
            return;
        };
        let rows = RowsToSum {
            activation: number,
            rows: gradient.len / columns,
            columns,
            format: gradient.format,
            saved: saved.pointer,
            gradient: gradient.pointer,
        };
        self.add_rows(&rows, bias_gradient);
    }

    fn gated_forward(&self, gate: Gate, columns: usize, input: CudaView<'_>, output: CudaViewMut<'_>) {
        assert!(input.len == 2 * output.len && input.format == output.format);
        let kernel = self.kernels.of::<ActivationKernels>().gated_forward.of(input.format);
        let (launch, len, columns) = (self.streams.over(output.len, 4), output.len as u64, size32(columns));
        launch!(self.streams, kernel, launch, gate_number(gate), len, columns, input.pointer, output.pointer);
    }

    fn gated_backward(
        &self,
        gate: Gate,
        columns: usize,
        input: CudaView<'_>,
        gradient: CudaView<'_>,
        input_gradient: CudaViewMut<'_>,
    ) {
        assert!(input.len == 2 * gradient.len && input_gradient.len == input.len);
        assert!(input.format == gradient.format && input_gradient.format == input.format);
        let kernel = self.kernels.of::<ActivationKernels>().gated_backward.of(input.format);
        let (launch, number) = (self.streams.over(gradient.len, 4), gate_number(gate));
        let (len, columns, input) = (gradient.len as u64, size32(columns), input.pointer);
        let (gradient, input_gradient) = (gradient.pointer, input_gradient.pointer);
        launch!(self.streams, kernel, launch, number, len, columns, input, gradient, input_gradient);
    }

    fn dropout(&self, dropout: &DropoutShape, from: Option<CudaView<'_>>, values: CudaViewMut<'_>) {
        let from = from.unwrap_or(values.as_view());
        assert!(from.len == values.len && from.format == values.format);
        let DropoutShape { mask, first, row_len, row_stride } = *dropout;
        let rows = DropoutRows { draws: DropoutDraws::of(&mask, &self.streams), first, row_len, row_stride };
        let kernel = self.kernels.of::<ActivationKernels>().dropout.of(values.format);
        let (launch, len) = (self.streams.over(values.len, 4), values.len as u64);
        launch!(self.streams, kernel, launch, rows, len, from.pointer, values.pointer);
    }
}

/// Rows of a gradient that are added up, after an activation.
pub(super) struct RowsToSum {
    activation: i32,
    rows: usize,
    columns: usize,
    format: Format,
    saved: u64,
    gradient: u64,
}

impl RowsToSum {
    /// Returns the first `rows` rows of `values`, which stay as they are.
    pub(super) fn of_values(rows: usize, columns: usize, values: &CudaView<'_>) -> RowsToSum {
        assert!(values.len >= rows * columns);
        let (activation, format, pointer) = (number(Activation::Identity), values.format, values.pointer);
        RowsToSum { activation, rows, columns, format, saved: pointer, gradient: pointer }
    }
}

impl Cuda {
    /// Adds up rows in `total`.
    pub(super) fn add_rows(&self, rows: &RowsToSum, total: RowSums<CudaViewMut<'_>>) {
        let columns = rows.columns;
        let Some((total, accumulate)) = self.single_sum(total, columns) else { return };
        // enough blocks to fill the device, each with some rows
        let blocks = columns.div_ceil(SUM_COLUMNS as usize);
        // rows that a block takes at a time: more where there are few columns
        let height = BLOCK as usize / columns.min(SUM_COLUMNS as usize);
        let wanted = self.streams.max_blocks().div_ceil(blocks).min(rows.rows.div_ceil(4 * height));
        let is_divided = blocks <= COLUMN_COUNTERS && rows.rows > MOST_ROWS_AT_ONCE;
        let num_sums = if is_divided { wanted.clamp(1, MAX_PARTIAL_SUMS) } else { 1 };
        if num_sums == 1 {
            return self.sum_rows(rows, 1, total.pointer, accumulate, 0);
        }
        let Some(sums) = self.partial_sums.reserve(num_sums * columns) else { return };
        self.sum_rows(rows, num_sums, sums, accumulate, total.pointer);
    }

    /// Writes the sums of `num_sums` equal runs of rows to `sums`, `[num_sums, columns]`, or adds them. If
    /// `total` is not 0, their sum is written there, or added, instead.
    pub(super) fn sum_rows(&self, rows: &RowsToSum, num_sums: usize, sums: u64, adds: bool, total: u64) {
        let RowsToSum { activation, rows, columns, format, saved, gradient } = *rows;
        let blocks = columns.div_ceil(SUM_COLUMNS as usize);
        // in one dimension, because the second has at most 65,535 blocks
        let launch = Launch { blocks: (size32(num_sums * blocks), 1), threads: (BLOCK, 1), shared_bytes: 0 };
        let kernel = self.kernels.of::<ActivationKernels>().activation_backward_bias.of(format);
        let (rows, columns, adds) = (size32(rows), size32(columns), i32::from(adds));
        let counters = self.partial_sums.column_counters();
        launch!(
            self.streams,
            kernel,
            launch,
            activation,
            rows,
            columns,
            saved,
            gradient,
            sums,
            adds,
            total,
            counters,
        );
    }

    /// Computes `output = activation(input + bias)`; `output` may be `input`.
    pub(super) fn bias_and_activation(
        &self,
        activation: Activation,
        bias: Option<CudaView<'_>>,
        input: CudaView<'_>,
        saved: &CudaViewMut<'_>,
        output: &CudaViewMut<'_>,
    ) {
        assert!(input.len == output.len && input.format == output.format);
        assert!(!activation.saves() || saved.len == output.len && saved.format == output.format);
        let kernel = self.kernels.of::<ActivationKernels>().bias_activation_forward.of(input.format);
        let (launch, number) = (self.streams.over(input.len, 4), number(activation));
        let (len, columns) = (input.len as u64, bias.map_or(1, |bias| size32(bias.len)));
        let (bias, input) = (bias.map_or(0, |bias| bias.pointer), input.pointer);
        let (saved, output) = (saved.pointer, output.pointer);
        launch!(self.streams, kernel, launch, number, len, columns, input, bias, saved, output);
    }
}
