//! Normalisations.

use super::activation::RowsToSum;
use super::runtime::buffer::{CudaView, CudaViewMut};
use super::runtime::format::Format;
use super::runtime::gpu::Cuda;
use super::runtime::kernels::{Kernel, kernel_table};
use super::runtime::launch::{KernelArgument, Launch, launch, size32};
use crate::device::{CopyOperations, GroupNormShape, NormOperations, NormShape, RowSums};

kernel_table!(NormKernels in "norm.cu" {
    layer_norm_forward: KernelPair,
    layer_norm_backward_input: KernelPair,
    layer_norm_backward_weight: KernelPair,
    group_norm_forward: KernelPair,
    group_norm_backward_input: KernelPair,
    group_norm_position_sums: KernelPair,
    scale_columns: KernelPair,
    scale_columns_backward_weight: KernelPair,
});

/// `struct GroupNormShape` of the kernels.
#[derive(Clone, Copy)]
#[repr(C)]
struct GroupNormSizes {
    rows: u32,
    positions: u32,
    channels: u32,
    groups: u32,
    epsilon: f32,
    relu: u32,
}

impl KernelArgument for GroupNormSizes {}

impl GroupNormSizes {
    fn new(shape: &GroupNormShape) -> GroupNormSizes {
        let GroupNormShape { rows, positions, channels, groups, epsilon, relu } = *shape;
        let [rows, positions, channels, groups] = [rows, positions, channels, groups].map(size32);
        GroupNormSizes { rows, positions, channels, groups, epsilon, relu: u32::from(relu) }
    }
}

/// Vectors of a block, a warp each.
const ROWS_PER_BLOCK: usize = 4;

/// Largest number of partial sums that a sum over vectors is split into.
const MOST_PARTIAL_SUMS: usize = 512;

/// Most columns of a block that sums over vectors.
const MOST_COLUMNS: usize = 1024;

/// Returns a launch with a warp for each of `rows` vectors.
fn over_rows(rows: usize) -> Launch {
    let (blocks, threads) = (rows.div_ceil(ROWS_PER_BLOCK), 32 * ROWS_PER_BLOCK);
    Launch { blocks: (size32(blocks), 1), threads: (size32(threads), 1), shared_bytes: 0 }
}

/// Returns a launch with a block for each group of channels of an image.
fn over_groups(shape: &GroupNormShape) -> Launch {
    let len = shape.positions * shape.group_len();
    let threads = len.next_multiple_of(32).clamp(32, 256);
    Launch {
        blocks: (size32(shape.rows), size32(shape.groups)),
        threads: (size32(threads), 1),
        shared_bytes: 0,
    }
}

impl NormOperations for Cuda {
    fn layer_norm_forward(
        &self,
        shape: &NormShape,
        input: CudaView<'_>,
        weight: CudaView<'_>,
        bias: Option<CudaView<'_>>,
        _saved: CudaViewMut<'_>,
        output: CudaViewMut<'_>,
    ) {
        let NormShape { rows, columns, epsilon, is_centred, .. } = *shape;
        assert!(input.len == rows * columns && output.len == input.len && output.format == input.format);
        assert!(weight.len == columns && bias.is_none_or(|bias| bias.len == columns));
        let kernel = self.kernels.of::<NormKernels>().layer_norm_forward.of(input.format);
        launch!(
            self.streams,
            kernel,
            over_rows(rows),
            size32(rows),
            size32(columns),
            epsilon,
            i32::from(is_centred),
            input.pointer,
            weight.pointer,
            bias.map_or(0, |bias| bias.pointer),
            output.pointer,
        );
    }

    fn layer_norm_backward_weight(
        &self,
        shape: &NormShape,
        input: CudaView<'_>,
        _saved: CudaView<'_>,
        gradient: CudaView<'_>,
        weight_gradient: RowSums<CudaViewMut<'_>>,
    ) {
        let kernel = self.kernels.of::<NormKernels>().layer_norm_backward_weight.of(input.format);
        self.add_products(kernel, shape, [input, gradient], weight_gradient);
    }

    fn layer_norm_backward_bias(
        &self,
        shape: &NormShape,
        gradient: CudaView<'_>,
        bias_gradient: RowSums<CudaViewMut<'_>>,
    ) {
        self.add_rows(&RowsToSum::of_values(shape.rows, shape.columns, &gradient), bias_gradient);
    }

    fn layer_norm_position_sums(
        &self,
        shape: &NormShape,
        input: CudaView<'_>,
        _saved: CudaView<'_>,
        gradient: CudaView<'_>,
        has_bias: bool,
        sums: CudaViewMut<'_>,
    ) {
        let num_samples = sums.len / (shape.columns * (1 + usize::from(has_bias)));
        if shape.rows == 0 {
            return self.fill(sums, 0.0);
        }
        let kernel = self.kernels.of::<NormKernels>().layer_norm_backward_weight.of(input.format);
        self.sum_vectors(kernel, shape, [input, gradient], num_samples, sums.pointer, false);
        if has_bias {
            let bias_sums = sums.pointer + (num_samples * shape.columns * size_of::<f32>()) as u64;
            let rows = RowsToSum::of_values(shape.rows, shape.columns, &gradient);
            self.sum_rows(&rows, num_samples, bias_sums, false, 0);
        }
    }

    fn layer_norm_backward_input(
        &self,
        shape: &NormShape,
        input: CudaView<'_>,
        weight: CudaView<'_>,
        _saved: CudaView<'_>,
        gradient: CudaView<'_>,
        input_gradient: CudaViewMut<'_>,
    ) {
        let NormShape { rows, columns, epsilon, is_centred, .. } = *shape;
        assert!(input.len == rows * columns && gradient.len == input.len);
        assert!(input_gradient.len == input.len && weight.len == columns);
        assert!(gradient.format == input.format && input_gradient.format == input.format);
        let kernel = self.kernels.of::<NormKernels>().layer_norm_backward_input.of(input.format);
        launch!(
            self.streams,
            kernel,
            over_rows(rows),
            size32(rows),
            size32(columns),
            epsilon,
            i32::from(is_centred),
            input.pointer,
            weight.pointer,
            gradient.pointer,
            input_gradient.pointer,
        );
    }

    fn group_norm_forward(
        &self,
        shape: &GroupNormShape,
        input: CudaView<'_>,
        weight: CudaView<'_>,
        bias: CudaView<'_>,
        added: Option<CudaView<'_>>,
        _saved: CudaViewMut<'_>,
        output: CudaViewMut<'_>,
    ) {
        assert!(input.len == shape.rows * shape.image_len() && output.len == input.len);
        assert!(weight.len == shape.channels && bias.len == shape.channels);
        assert_eq!(output.format, input.format);
        assert!(added.is_none_or(|added| added.len == input.len && added.format == input.format));
        let kernel = self.kernels.of::<NormKernels>().group_norm_forward.of(input.format);
        let (sizes, launch) = (GroupNormSizes::new(shape), over_groups(shape));
        let added = added.map_or(0, |added| added.pointer);
        let [weight, bias, output] = [weight.pointer, bias.pointer, output.pointer];
        launch!(self.streams, kernel, launch, sizes, input.pointer, weight, bias, added, output);
    }

    fn group_norm_position_sums(
        &self,
        shape: &GroupNormShape,
        input: CudaView<'_>,
        _saved: CudaView<'_>,
        gradient: CudaView<'_>,
        sums: CudaViewMut<'_>,
    ) {
        assert!(input.len == shape.rows * shape.image_len() && gradient.len == input.len);
        assert!(gradient.format == input.format && sums.format == Format::F32);
        assert_eq!(sums.len, shape.rows * shape.position_sums_len());
        let kernel = self.kernels.of::<NormKernels>().group_norm_position_sums.of(input.format);
        let (sizes, launch) = (GroupNormSizes::new(shape), over_groups(shape));
        launch!(self.streams, kernel, launch, sizes, input.pointer, gradient.pointer, sums.pointer);
    }

    fn group_norm_backward_input(
        &self,
        shape: &GroupNormShape,
        input: CudaView<'_>,
        weight: CudaView<'_>,
        _saved: CudaView<'_>,
        gradient: CudaView<'_>,
        input_gradient: CudaViewMut<'_>,
    ) {
        assert!(input.len == shape.rows * shape.image_len() && gradient.len == input.len);
        assert!(input_gradient.len == input.len && weight.len == shape.channels);
        assert!(gradient.format == input.format && input_gradient.format == input.format);
        let kernel = self.kernels.of::<NormKernels>().group_norm_backward_input.of(input.format);
        let (sizes, launch) = (GroupNormSizes::new(shape), over_groups(shape));
        let (gradient, input_gradient) = (gradient.pointer, input_gradient.pointer);
        launch!(self.streams, kernel, launch, sizes, input.pointer, weight.pointer, gradient, input_gradient);
    }

    fn scale_columns(&self, input: CudaView<'_>, weight: CudaView<'_>, output: CudaViewMut<'_>) {
        assert!(input.len == output.len && input.len.is_multiple_of(weight.len));
        assert_eq!(input.format, output.format);
        let kernel = self.kernels.of::<NormKernels>().scale_columns.of(input.format);
        let (launch, len, columns) = (self.streams.over(input.len, 1), input.len as u64, size32(weight.len));
        let (input, weight, output) = (input.pointer, weight.pointer, output.pointer);
        launch!(self.streams, kernel, launch, len, columns, input, weight, output);
    }

    fn scale_columns_backward_weight(
        &self,
        columns: usize,
        input: CudaView<'_>,
        gradient: CudaView<'_>,
        weight_gradient: RowSums<CudaViewMut<'_>>,
    ) {
        let kernel = self.kernels.of::<NormKernels>().scale_columns_backward_weight.of(input.format);
        let shape = NormShape {
            rows: weight_gradient.rows.len(),
            columns,
            positions: None,
            epsilon: 0.0,
            is_centred: false,
        };
        self.add_products(kernel, &shape, [input, gradient], weight_gradient);
    }
}

impl Cuda {
    /// Adds up products of inputs and gradients over vectors, with a kernel that has the parameters of
    /// `layer_norm_backward_weight`.
    fn add_products(
        &self,
        kernel: &Kernel,
        shape: &NormShape,
        [input, gradient]: [CudaView<'_>; 2],
        weight_gradient: RowSums<CudaViewMut<'_>>,
    ) {
        let NormShape { rows, columns, .. } = *shape;
        assert!(input.len >= rows * columns && gradient.len >= rows * columns);
        assert_eq!(gradient.format, input.format);
        let Some((weight_gradient, accumulate)) = self.single_sum(weight_gradient, columns) else { return };
        let num_sums = rows.div_ceil(4 * ROWS_PER_BLOCK).clamp(1, MOST_PARTIAL_SUMS);
        let start = |sums, adds| self.sum_vectors(kernel, shape, [input, gradient], num_sums, sums, adds);
        self.partial_sums.sum_parts(&weight_gradient, num_sums, accumulate, start);
    }

    /// Writes the gradients of the weight of `num_sums` equal runs of vectors to the rows of `sums`, or adds
    /// them.
    fn sum_vectors(
        &self,
        kernel: &Kernel,
        shape: &NormShape,
        [input, gradient]: [CudaView<'_>; 2],
        num_sums: usize,
        sums: u64,
        accumulate: bool,
    ) {
        let NormShape { rows, columns, epsilon, is_centred, .. } = *shape;
        let width = columns.min(MOST_COLUMNS);
        let launch = Launch {
            blocks: (size32(num_sums), size32(columns.div_ceil(width))),
            shared_bytes: size32(ROWS_PER_BLOCK * width * size_of::<f32>()),
            ..over_rows(rows)
        };
        launch!(
            self.streams,
            kernel,
            launch,
            size32(rows),
            size32(columns),
            size32(width),
            epsilon,
            i32::from(is_centred),
            input.pointer,
            gradient.pointer,
            sums,
            i32::from(accumulate),
        );
    }
}
