//! Activations, losses, optimizers and what else goes through arrays once.

use super::Cuda;
use super::memory::{CudaView, CudaViewMut, Format};
use super::shared::{Argument, BLOCK, Launch, launch};
use crate::device::{Activation, AdamStep, BlockShape, LossShape, SgdStep, totals};

/// Columns of a block of the kernels which sum over rows, and rows that it takes at a time.
const SUM_COLUMNS: u32 = 32;
const SUM_ROWS: u32 = BLOCK / SUM_COLUMNS;

/// Parts that a sum over rows is formed in at most.
const MOST_PARTS: usize = 64;

/// `struct SgdStep` of the kernels.
#[derive(Clone, Copy)]
#[repr(C)]
struct SgdConstants {
    momentum: f32,
    weight_decay: f32,
    nesterov: i32,
}

/// `struct AdamStep` of the kernels.
#[derive(Clone, Copy)]
#[repr(C)]
struct AdamConstants {
    beta1: f32,
    beta2: f32,
    share1: f32,
    share2: f32,
    epsilon: f32,
    weight_decay: f32,
    decoupled: i32,
}

impl Argument for SgdConstants {}
impl Argument for AdamConstants {}

/// The number that kernels know an activation by.
fn number(activation: Activation) -> i32 {
    match activation {
        Activation::Identity => 0,
        Activation::Relu => 1,
        Activation::Gelu => 2,
        Activation::Tanh => 3,
    }
}

/// Where in a step's sums `total` is.
fn sum_place(sums: &CudaViewMut<'_>, total: usize) -> u64 {
    sums.pointer + 4 * total as u64
}

impl Cuda {
    pub(super) fn fill_all(&self, into: &CudaViewMut<'_>, value: f32) {
        let launch = self.shared.over(into.len, 1);
        if into.len > 0 {
            let kernel = self.shared.kernels.fill.of(into.format);
            launch!(self.shared, kernel, launch, into.len as u64, value, into.pointer);
        }
        if into.len > 0 && into.copy != 0 {
            let kernel = self.shared.kernels.fill.of(Format::Bf16);
            launch!(self.shared, kernel, launch, into.len as u64, value, into.copy);
        }
    }

    pub(super) fn copy_values(&self, from: CudaView<'_>, into: &CudaViewMut<'_>) {
        assert_eq!(from.len, into.len, "arrays that are copied have one length");
        let (kernels, launch, len) = (&self.shared.kernels, self.shared.over(from.len, 1), from.len as u64);
        match (from.format, into.format) {
            _ if from.len == 0 => {}
            (Format::F32, Format::Bf16) => {
                launch!(self.shared, &kernels.cast_to_bf16, launch, len, from.pointer, into.pointer);
            }
            (Format::Bf16, Format::F32) => {
                launch!(self.shared, &kernels.cast_to_f32, launch, len, from.pointer, into.pointer);
            }
            // SAFETY: both hold that many values of one format.
            _ => unsafe { self.shared.copy(from.pointer, into.pointer, from.len * from.format.bytes()) },
        }
        if from.len > 0 && into.copy != 0 {
            launch!(self.shared, &kernels.cast_to_bf16, launch, len, into.pointer, into.copy);
        }
    }

    pub(super) fn copy_rows(&self, shape: &BlockShape, from: CudaView<'_>, into: &CudaViewMut<'_>) {
        let BlockShape { rows, columns, from_stride, into_stride } = *shape;
        if rows * columns == 0 {
            return;
        }
        assert!(
            (rows - 1) * from_stride + columns <= from.len && (rows - 1) * into_stride + columns <= into.len
        );
        assert!(from.format == into.format && into.copy == 0, "blocks of activations are moved as they are");
        let kernel = self.shared.kernels.copy_block.of(from.format);
        let launch = self.shared.over(rows * columns, 1);
        let [rows, columns, from_stride, into_stride] =
            [rows, columns, from_stride, into_stride].map(|size| size as u32);
        launch!(
            self.shared,
            kernel,
            launch,
            rows,
            columns,
            from_stride,
            into_stride,
            from.pointer,
            into.pointer
        );
    }

    pub(super) fn gather(
        &self,
        columns: usize,
        table: CudaView<'_>,
        numbers: CudaView<'_>,
        into: &CudaViewMut<'_>,
    ) {
        if into.len == 0 {
            return;
        }
        assert!(
            into.len == numbers.len * columns
                && table.format == Format::F32
                && table.len.is_multiple_of(columns)
        );
        let kernel = self.shared.kernels.gather_rows.of(into.format);
        let (launch, len) = (self.shared.over(into.len, 1), into.len as u64);
        launch!(
            self.shared,
            kernel,
            launch,
            len,
            columns as u32,
            table.pointer,
            numbers.pointer,
            into.pointer
        );
    }

    pub(super) fn transpose(
        &self,
        rows: usize,
        columns: usize,
        input: CudaView<'_>,
        output: &CudaViewMut<'_>,
    ) {
        assert!(input.len == output.len && input.format == output.format);
        let kernel = self.shared.kernels.transpose_each.of(input.format);
        let launch = self.shared.over(input.len, 1);
        let (len, rows, columns) = (input.len as u64, rows as u32, columns as u32);
        launch!(self.shared, kernel, launch, len, rows, columns, input.pointer, output.pointer);
    }

    /// `output = activation(input + bias)`; `output` may be `input`.
    pub(super) fn activate(
        &self,
        activation: Activation,
        columns: usize,
        input: CudaView<'_>,
        bias: Option<CudaView<'_>>,
        saved: &CudaViewMut<'_>,
        output: &CudaViewMut<'_>,
    ) {
        assert!(input.len == output.len && input.format == output.format);
        assert!(!activation.saves() || saved.len == output.len && saved.format == output.format);
        let kernel = self.shared.kernels.bias_activation.of(input.format);
        let launch = self.shared.over(input.len, 4);
        let (len, columns, bias) = (input.len as u64, columns as u32, bias.map_or(0, |bias| bias.pointer));
        let activation = number(activation);
        launch!(
            self.shared,
            kernel,
            launch,
            activation,
            len,
            columns,
            input.pointer,
            bias,
            saved.pointer,
            output.pointer
        );
    }

    pub(super) fn unactivate(
        &self,
        activation: Activation,
        columns: usize,
        saved: CudaView<'_>,
        gradient: &CudaViewMut<'_>,
        bias_gradient: Option<CudaViewMut<'_>>,
        accumulate: bool,
    ) {
        assert!(
            activation == Activation::Identity
                || saved.len == gradient.len && saved.format == gradient.format
        );
        let (number, kernels) = (number(activation), &self.shared.kernels);
        let Some(sums) = bias_gradient else {
            if activation != Activation::Identity {
                let launch = self.shared.over(gradient.len, 4);
                let (kernel, len) = (kernels.unactivate.of(gradient.format), gradient.len as u64);
                launch!(self.shared, kernel, launch, number, len, saved.pointer, gradient.pointer);
            }
            return;
        };
        assert_eq!(sums.len, columns);
        let rows = gradient.len / columns;
        // enough blocks to fill the device, each with some rows
        let blocks = columns.div_ceil(SUM_COLUMNS as usize);
        // rows that a block takes at a time, more where columns are few
        let height = BLOCK as usize / columns.min(SUM_COLUMNS as usize);
        let wanted = self.shared.most_blocks().div_ceil(blocks).min(rows.div_ceil(4 * height));
        let num_parts = wanted.clamp(1, MOST_PARTS);
        let parts = if num_parts == 1 { Some(sums.pointer) } else { self.scratch(num_parts * columns) };
        let Some(parts) = parts else { return };
        let launch =
            Launch { blocks: (blocks as u32, num_parts as u32), threads: (BLOCK, 1), shared_bytes: 0 };
        let (rows, width) = (rows as u32, columns as u32);
        let adds = i32::from(accumulate && num_parts == 1);
        let kernel = kernels.unactivate_sum.of(gradient.format);
        launch!(
            self.shared,
            kernel,
            launch,
            number,
            rows,
            width,
            saved.pointer,
            gradient.pointer,
            parts,
            adds
        );
        if num_parts > 1 {
            self.add_parts(num_parts, parts, &sums, accumulate);
        }
    }

    /// `total (+)=` the sum of `num_parts` parts that follow each other at `parts`.
    pub(super) fn add_parts(&self, num_parts: usize, parts: u64, total: &CudaViewMut<'_>, accumulate: bool) {
        let blocks = total.len.div_ceil(SUM_COLUMNS as usize) as u32;
        let launch = Launch { blocks: (blocks, 1), threads: (SUM_COLUMNS, SUM_ROWS), shared_bytes: 0 };
        let (num_parts, len, accumulate) = (num_parts as u32, total.len as u32, i32::from(accumulate));
        let kernel = &self.shared.kernels.sum_parts;
        launch!(self.shared, kernel, launch, num_parts, len, parts, total.pointer, accumulate);
    }

    pub(super) fn cross_entropy_loss(
        &self,
        shape: &LossShape,
        logits: CudaView<'_>,
        labels: CudaView<'_>,
        gradient: &CudaViewMut<'_>,
        sums: &CudaViewMut<'_>,
    ) {
        let LossShape { rows, columns, scale } = *shape;
        assert!(logits.len == rows * columns && gradient.len == logits.len && labels.len >= rows);
        let kernel = self.shared.kernels.cross_entropy.of(logits.format);
        let warps = 4;
        let blocks = rows.div_ceil(warps);
        let Some(partials) = self.scratch(2 * blocks) else { return };
        let launch = Launch { blocks: (blocks as u32, 1), threads: (32 * warps as u32, 1), shared_bytes: 0 };
        let (rows, columns) = (rows as u32, columns as u32);
        let loss = sum_place(sums, totals::LOSS);
        const { assert!(totals::LOSS == 0 && totals::CORRECT == 1, "kernels know where the sums are") };
        launch!(
            self.shared,
            kernel,
            launch,
            rows,
            columns,
            scale,
            logits.pointer,
            labels.pointer,
            gradient.pointer,
            partials,
            self.arrived.pointer(),
            loss,
        );
    }

    pub(super) fn squared_error(
        &self,
        shape: &LossShape,
        output: CudaView<'_>,
        targets: Option<CudaView<'_>>,
        gradient: &CudaViewMut<'_>,
        sums: &CudaViewMut<'_>,
    ) {
        assert!(output.len == gradient.len && output.format == gradient.format);
        let kernel = self.shared.kernels.squared_error.of(output.format);
        let launch = self.shared.over(output.len, 4);
        let partials = self.partials();
        let (len, columns) = (output.len as u64, shape.columns as u32);
        let targets = targets.map_or(0, |targets| targets.pointer);
        launch!(
            self.shared,
            kernel,
            launch,
            len,
            columns,
            shape.scale,
            output.pointer,
            targets,
            gradient.pointer,
            partials,
            self.arrived.pointer(),
            sum_place(sums, totals::LOSS),
        );
    }

    pub(super) fn sgd(
        &self,
        (step, update): (&SgdStep, CudaView<'_>),
        parameters: &CudaViewMut<'_>,
        gradients: CudaView<'_>,
        momentum: &CudaViewMut<'_>,
        sums: &CudaViewMut<'_>,
    ) {
        let SgdStep { momentum: decay, nesterov, weight_decay } = *step;
        assert!(gradients.len == parameters.len && (decay == 0.0 || momentum.len == parameters.len));
        let constants = SgdConstants { momentum: decay, weight_decay, nesterov: i32::from(nesterov) };
        let partials = self.partials();
        let (launch, len) = (self.shared.over(parameters.len, 4), parameters.len as u64);
        launch!(
            self.shared,
            &self.shared.kernels.sgd_step,
            launch,
            constants,
            update.pointer,
            len,
            parameters.pointer,
            parameters.copy,
            gradients.pointer,
            momentum.pointer,
            partials,
            self.arrived.pointer(),
            sum_place(sums, totals::GRADIENT_SQUARES),
        );
    }

    pub(super) fn adam(
        &self,
        (step, update): (&AdamStep, CudaView<'_>),
        parameters: &CudaViewMut<'_>,
        gradients: CudaView<'_>,
        [first, second]: [CudaViewMut<'_>; 2],
        sums: &CudaViewMut<'_>,
    ) {
        assert!([gradients.len, first.len, second.len] == [parameters.len; 3]);
        let AdamStep { beta1, beta2, epsilon, weight_decay, decoupled } = *step;
        let constants = AdamConstants {
            beta1: beta1 as f32,
            beta2: beta2 as f32,
            // 1 − β rounded once: 1 − 0.999 in f32 would be off by 5·10⁻⁵
            share1: (1.0 - beta1) as f32,
            share2: (1.0 - beta2) as f32,
            epsilon,
            weight_decay,
            decoupled: i32::from(decoupled),
        };
        let partials = self.partials();
        let (launch, len) = (self.shared.over(parameters.len, 4), parameters.len as u64);
        launch!(
            self.shared,
            &self.shared.kernels.adam_step,
            launch,
            constants,
            update.pointer,
            len,
            parameters.pointer,
            parameters.copy,
            gradients.pointer,
            first.pointer,
            second.pointer,
            partials,
            self.arrived.pointer(),
            sum_place(sums, totals::GRADIENT_SQUARES),
        );
    }

    pub(super) fn squares(&self, values: CudaView<'_>, sums: &CudaViewMut<'_>) {
        let partials = self.partials();
        let (launch, len) = (self.shared.over(values.len, 4), values.len as u64);
        launch!(
            self.shared,
            &self.shared.kernels.sum_squares,
            launch,
            len,
            values.pointer,
            partials,
            self.arrived.pointer(),
            sum_place(sums, totals::GRADIENT_SQUARES),
        );
    }
}
