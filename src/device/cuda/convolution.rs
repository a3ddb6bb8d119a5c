//! Convolution with pooling and ReLU.

use std::rc::Rc;

use super::runtime::buffer::{CudaView, CudaViewMut};
use super::runtime::compile::{Constants, KernelSource};
use super::runtime::format::Format;
use super::runtime::gpu::Cuda;
use super::runtime::kernels::{KernelTable, kernel_table};
use super::runtime::launch::{DEFAULT_SHARED_BYTES, KernelArgument, Launch, launch, size32};
use crate::device::{
    Activation, ActivationOperations, ConvolutionOperations, ConvolutionShape, ParameterSums,
};

/// The most threads of a block that is divided into slices.
const MOST_THREADS: usize = 1024;

/// The most weights whose gradients a thread sums: `MOST_WEIGHTS` of the kernels.
const MOST_WEIGHTS: usize = 5;

/// The outputs that a thread computes at once: `OUTPUTS` of the kernels.
const OUTPUTS_AT_ONCE: usize = 4;

/// The columns of an image whose gradients a thread computes, and the largest kernel, if the gradients of the
/// outputs are spread out in shared memory.
const DENSE_COLUMNS: usize = 4;
const LARGEST_DENSE_KERNEL: usize = 7;

/// Largest number of groups of images whose weight gradients are summed apart first.
const MAX_GROUPS: usize = 128;

kernel_table!(ConvolutionKernels in "convolution.cu" {
    convolution_forward: Kernel,
    convolution_backward_weight: Kernel,
    convolution_backward_input: Kernel,
    convolution_backward_input_dense: Kernel,
});

/// `struct ConvolutionShape` of the kernels.
#[derive(Clone, Copy)]
#[repr(C)]
struct ConvolutionSizes {
    rows: u32,
    channels: u32,
    height: u32,
    width: u32,
    outputs: u32,
    kernel: u32,
    stride: u32,
    padding: u32,
    window: u32,
    flattens: u32,
    relu: u32,
}

impl KernelArgument for ConvolutionSizes {}

impl ConvolutionSizes {
    fn new(shape: &ConvolutionShape) -> ConvolutionSizes {
        ConvolutionSizes {
            rows: size32(shape.rows),
            channels: size32(shape.channels),
            height: size32(shape.height),
            width: size32(shape.width),
            outputs: size32(shape.outputs),
            kernel: size32(shape.kernel),
            stride: size32(shape.stride),
            padding: size32(shape.padding),
            window: size32(shape.window()),
            flattens: u32::from(shape.flattens),
            relu: u32::from(shape.relu),
        }
    }

    /// Returns the numbers that kernels are compiled for: `SHAPE` of the kernels.
    fn constant(&self) -> [u32; 9] {
        let ConvolutionSizes {
            channels,
            height,
            width,
            outputs,
            kernel,
            stride,
            padding,
            window,
            flattens,
            ..
        } = *self;
        [channels, height, width, outputs, kernel, stride, padding, window, flattens]
    }
}

/// The kernels of convolutions, which are compiled for [`variants`].
pub const SOURCE: KernelSource = ConvolutionKernels::SOURCE;

/// Returns the constants that the kernels for a layer of this shape are compiled for, in each format.
pub fn variants(shape: &ConvolutionShape) -> [Constants; 2] {
    [Format::F32, Format::Bf16].map(|format| constants(shape, format))
}

fn constants(shape: &ConvolutionShape, format: Format) -> Constants {
    let sizes = ConvolutionSizes::new(shape).constant().map(|size| size.to_string()).join(",");
    let format = format.name();
    let macros = vec![("FORMAT", format.to_owned()), ("SHAPE", sizes)];
    Constants { macros, suffix: format!("_{format}") }
}

impl Cuda {
    /// Returns the kernels for a layer of this shape, or `None` after a failure.
    fn convolution_kernels(
        &self,
        shape: &ConvolutionShape,
        format: Format,
    ) -> Option<Rc<ConvolutionKernels>> {
        let [a, b, c, d, e, f, g, h, i] = ConvolutionSizes::new(shape).constant();
        let key = [a, b, c, d, e, f, g, h, i, size32(format.bytes())];
        self.specialised.of(&self.streams, &key, || constants(shape, format))
    }
}

/// A launch of kernels that stage their inputs in shared memory, where they fit.
struct StagedLaunch {
    launch: Launch,
    /// 1 if the inputs fit into shared memory, otherwise 0.
    staged: i32,
}

impl StagedLaunch {
    /// Returns a launch of `blocks`, each with threads for `items` and shared memory for `floats`.
    fn new(blocks: (usize, usize), items: usize, floats: usize) -> StagedLaunch {
        let fits = 4 * floats <= DEFAULT_SHARED_BYTES as usize;
        // as few rounds as blocks of up to 512 threads allow, all about equally full
        let rounds = items.div_ceil(512).max(1);
        let threads = items.div_ceil(rounds).next_multiple_of(32).max(32);
        let launch = Launch {
            blocks: (size32(blocks.0), size32(blocks.1)),
            threads: (size32(threads), 1),
            shared_bytes: if fits { 4 * size32(floats) } else { 0 },
        };
        StagedLaunch { launch, staged: i32::from(fits) }
    }

    /// Returns a launch of `blocks` of `width` threads for each slice, with shared memory for
    /// `floats(slices)`: with as many slices as fit, up to `most`, or with one.
    fn sliced(
        blocks: (usize, usize),
        width: usize,
        most: usize,
        floats: impl Fn(usize) -> usize,
    ) -> StagedLaunch {
        let of = |slices: usize| {
            let mut made = StagedLaunch::new(blocks, 0, floats(slices));
            made.launch.threads.0 = size32(slices * width);
            made
        };
        (2..=most).rev().map(of).find(|made| made.staged == 1).unwrap_or_else(|| of(1))
    }

    /// Returns a launch of `blocks` with a thread for each of `items`, and the threads of a slice. If one
    /// round takes all items, up to `most` slices share their terms. Shared memory has `floats(sums)`, where
    /// slices leave `sums` values: `each` of every thread, or none if there is one slice.
    fn of_items(
        blocks: (usize, usize),
        items: usize,
        most: usize,
        each: usize,
        floats: impl Fn(usize) -> usize,
    ) -> (StagedLaunch, u32) {
        let width = StagedLaunch::new(blocks, items, 0).launch.threads.0 as usize;
        let slices = if items <= width { most.min(MOST_THREADS / width) } else { 1 };
        let sums = |slices: usize| if slices > 1 { each * slices * width } else { 0 };
        (StagedLaunch::sliced(blocks, width, slices, |slices| floats(sums(slices))), size32(width))
    }
}

/// Returns the length of the weights in shared memory, where outputs are in whole groups.
fn padded_weight_len(shape: &ConvolutionShape) -> usize {
    shape.kernel * shape.kernel * shape.channels * shape.outputs.next_multiple_of(OUTPUTS_AT_ONCE)
}

/// Returns the launch of the forward pass, and the threads of a slice: where there are few outputs, slices
/// share the rows of the kernel, if their sums fit into shared memory, in the place of the weights.
fn forward_launch(shape: &ConvolutionShape) -> (StagedLaunch, u32) {
    let image = shape.padded_len().next_multiple_of(4);
    let groups = shape.output_height() * shape.output_width() * shape.outputs.div_ceil(OUTPUTS_AT_ONCE);
    let each = OUTPUTS_AT_ONCE * shape.window() * shape.window();
    let floats = |sums: usize| image + padded_weight_len(shape).max(sums);
    StagedLaunch::of_items((shape.rows, 1), groups, shape.kernel, each, floats)
}

/// Returns the launch of the backward pass by gradients that are spread out in shared memory, and the threads
/// of a slice, if the kernel has no stride and they fit. Slices share the outputs where one has a thread for
/// every group of columns.
fn dense_launch(shape: &ConvolutionShape) -> Option<(Launch, u32)> {
    let reach = shape.kernel - 1;
    let (height, width) = (shape.height + 2 * shape.padding, shape.width + 2 * shape.padding);
    let depth = shape.outputs.next_multiple_of(OUTPUTS_AT_ONCE);
    let floats = (height + reach) * (width + reach) * depth + padded_weight_len(shape);
    let groups = shape.height * shape.width.div_ceil(DENSE_COLUMNS) * shape.channels;
    let most = depth / OUTPUTS_AT_ONCE;
    let (StagedLaunch { launch, staged }, threads) =
        StagedLaunch::of_items((shape.rows, 1), groups, most, DENSE_COLUMNS, |sums| floats.max(sums));
    let is_dense = shape.stride == 1 && shape.kernel <= LARGEST_DENSE_KERNEL && staged == 1;
    is_dense.then_some((launch, threads))
}

impl ConvolutionOperations for Cuda {
    fn convolution_forward(
        &self,
        shape: &ConvolutionShape,
        input: CudaView<'_>,
        weight: CudaView<'_>,
        bias: Option<CudaView<'_>>,
        argmax: CudaViewMut<'_>,
        output: CudaViewMut<'_>,
    ) {
        let (image_len, output_len) = (shape.image_len(), shape.output_len());
        assert!(input.len == shape.rows * image_len && output.len == shape.rows * output_len);
        assert!(argmax.len == shape.rows * shape.argmax_len() && weight.len == shape.weight_len());
        assert!(bias.is_none_or(|bias| bias.len == shape.outputs));
        let (StagedLaunch { launch, staged }, width) = forward_launch(shape);
        let Some(kernels) = self.convolution_kernels(shape, input.format) else { return };
        let kernel = &kernels.convolution_forward;
        let (sizes, input, weight) = (ConvolutionSizes::new(shape), input.pointer, weight.pointer);
        let bias = bias.map_or(0, |bias| bias.pointer);
        let (argmax, output) = (argmax.pointer, output.pointer);
        launch!(self.streams, kernel, launch, sizes, input, weight, bias, argmax, output, width, staged);
    }

    fn convolution_backward_relu(
        &self,
        shape: &ConvolutionShape,
        output: CudaView<'_>,
        gradient: CudaViewMut<'_>,
    ) {
        // with pooling, `argmax` says which outputs ReLU set to 0
        if !shape.pool {
            self.activation_backward(Activation::Relu, shape.output_rows(), output, gradient, None);
        }
    }

    fn convolution_backward_weight(
        &self,
        shape: &ConvolutionShape,
        input: CudaView<'_>,
        argmax: CudaView<'_>,
        gradient: CudaView<'_>,
        mut sums: impl ParameterSums<Cuda>,
    ) {
        let (image_len, output_len, weights) = (shape.image_len(), shape.output_len(), shape.weight_len());
        assert!(input.len == shape.rows * image_len && gradient.len == shape.rows * output_len);
        assert_eq!(argmax.len, shape.rows * shape.argmax_len());
        let weight = sums.weight(|sums| self.single_total(sums, weights));
        let bias = sums.bias(|sums| self.single_total(sums, shape.outputs)).flatten();
        let Some(weight) = weight else { return };
        let of_group = weight.len + bias.map_or(0, |bias| bias.len);
        let groups = shape.rows.clamp(1, MAX_GROUPS);
        let num_threads = (weights / shape.outputs).div_ceil(MOST_WEIGHTS) * shape.outputs;
        let width = num_threads.next_multiple_of(32).min(MOST_THREADS);
        let blocks = (groups, num_threads.div_ceil(width));
        // several slices of the places where there are few weights
        let slices = (MOST_THREADS / width).min(output_len / shape.outputs);
        let sums = |slices: usize| if slices > 1 { MOST_WEIGHTS * slices * width } else { 0 };
        let image = shape.padded_len().next_multiple_of(2);
        let floats = |slices: usize| image + 2 * output_len + sums(slices);
        let StagedLaunch { launch, staged } = StagedLaunch::sliced(blocks, width, slices, floats);
        let Some(kernels) = self.convolution_kernels(shape, input.format) else { return };
        let kernel = &kernels.convolution_backward_weight;
        let (sizes, input) = (ConvolutionSizes::new(shape), input.pointer);
        let (argmax, gradient, width) = (argmax.pointer, gradient.pointer, size32(width));
        let Some(sums) = self.partial_sums.reserve(groups * of_group) else { return };
        let has_bias = i32::from(bias.is_some());
        launch!(self.streams, kernel, launch, sizes, input, argmax, gradient, sums, width, has_bias, staged);
        self.partial_sums.add_to(weight, bias, groups, sums);
    }

    fn convolution_backward_input(
        &self,
        shape: &ConvolutionShape,
        weight: CudaView<'_>,
        argmax: CudaView<'_>,
        gradient: CudaView<'_>,
        input_gradient: CudaViewMut<'_>,
    ) {
        let (image_len, output_len, weights) = (shape.image_len(), shape.output_len(), shape.weight_len());
        assert!(input_gradient.len == shape.rows * image_len && gradient.len == shape.rows * output_len);
        assert!(argmax.len == shape.rows * shape.argmax_len() && weight.len == weights);
        let (sizes, weight, argmax) = (ConvolutionSizes::new(shape), weight.pointer, argmax.pointer);
        let (gradient_format, gradient) = (gradient.format, gradient.pointer);
        let Some(kernels) = self.convolution_kernels(shape, gradient_format) else { return };
        let input_gradient = input_gradient.pointer;
        if let Some((launch, width)) = dense_launch(shape) {
            let kernel = &kernels.convolution_backward_input_dense;
            launch!(self.streams, kernel, launch, sizes, weight, argmax, gradient, input_gradient, width);
            return;
        }
        // several blocks for each image where there are few images
        let blocks = (self.streams.max_blocks() / 4 / shape.rows.max(1)).clamp(1, 4);
        let StagedLaunch { launch, staged } =
            StagedLaunch::new((shape.rows, blocks), image_len.div_ceil(blocks), weights + 2 * output_len);
        let kernel = &kernels.convolution_backward_input;
        launch!(self.streams, kernel, launch, sizes, weight, argmax, gradient, input_gradient, staged);
    }
}
