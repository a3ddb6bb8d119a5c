//! Convolution with pooling and ReLU, and pooling on its own.

use super::Cuda;
use super::memory::{CudaView, CudaViewMut};
use super::shared::{Argument, BLOCK, Launch, launch};
use crate::device::{ConvolutionShape, PoolShape};

/// Dynamic shared memory that every device gives a block without being asked.
const SHARED_BYTES: usize = 48 << 10;

/// Weights that a thread sums the gradients of at a time.
const WEIGHTS_PER_THREAD: usize = 4;

/// Groups of images whose weight gradients are summed on their own first, at most.
const MOST_GROUPS: usize = 128;

/// `struct ConvolutionShape` of the kernels.
#[derive(Clone, Copy)]
#[repr(C)]
struct Sizes {
    rows: u32,
    channels: u32,
    height: u32,
    width: u32,
    outputs: u32,
    kernel: u32,
    window: u32,
    relu: u32,
}

/// `struct PoolShape` of the kernels.
#[derive(Clone, Copy)]
#[repr(C)]
struct PoolSizes {
    rows: u32,
    height: u32,
    width: u32,
    channels: u32,
    size: u32,
}

impl Argument for Sizes {}
impl Argument for PoolSizes {}

fn sizes(shape: &ConvolutionShape) -> Sizes {
    let ConvolutionShape { rows, channels, height, width, outputs, kernel, relu, .. } = *shape;
    let [rows, channels, height, width, outputs, kernel, window] =
        [rows, channels, height, width, outputs, kernel, shape.window()].map(|size| size as u32);
    Sizes { rows, channels, height, width, outputs, kernel, window, relu: u32::from(relu) }
}

fn pool_sizes(shape: &PoolShape) -> PoolSizes {
    let PoolShape { rows, height, width, channels, size } = *shape;
    let [rows, height, width, channels, size] = [rows, height, width, channels, size].map(|size| size as u32);
    PoolSizes { rows, height, width, channels, size }
}

/// A block for each of `blocks`, of enough threads for `items`, with `floats` in shared memory if they fit there; and whether they do.
fn staged(blocks: (usize, usize), items: usize, floats: usize) -> (Launch, i32) {
    let fits = 4 * floats <= SHARED_BYTES;
    // as few rounds as blocks of up to 512 threads allow, as even as they can be
    let rounds = items.div_ceil(512).max(1);
    let threads = items.div_ceil(rounds).next_multiple_of(32).max(32);
    let shared_bytes = if fits { 4 * floats as u32 } else { 0 };
    let launch =
        Launch { blocks: (blocks.0 as u32, blocks.1 as u32), threads: (threads as u32, 1), shared_bytes };
    (launch, i32::from(fits))
}

impl Cuda {
    pub(super) fn convolve(
        &self,
        shape: &ConvolutionShape,
        input: CudaView<'_>,
        [weight, bias]: [CudaView<'_>; 2],
        route: &CudaViewMut<'_>,
        output: &CudaViewMut<'_>,
    ) {
        let (image_len, output_len) = (shape.image_len(), shape.output_len());
        assert!(input.len == shape.rows * image_len && output.len == shape.rows * output_len);
        assert!(route.len == output.len && weight.len == shape.weight_len() && bias.len == shape.outputs);
        let (launch, fits) = staged((shape.rows, 1), output_len, image_len + shape.weight_len());
        let kernel = self.shared.kernels.convolution_forward.of(input.format);
        launch!(
            self.shared,
            kernel,
            launch,
            sizes(shape),
            input.pointer,
            weight.pointer,
            bias.pointer,
            route.pointer,
            output.pointer,
            fits,
        );
    }

    pub(super) fn convolve_backward_weight(
        &self,
        shape: &ConvolutionShape,
        input: CudaView<'_>,
        [route, gradient]: [CudaView<'_>; 2],
        weight_gradient: &CudaViewMut<'_>,
        accumulate: bool,
    ) {
        let (image_len, output_len, weights) = (shape.image_len(), shape.output_len(), shape.weight_len());
        assert!(input.len == shape.rows * image_len && gradient.len == shape.rows * output_len);
        assert!(route.len == gradient.len && weight_gradient.len == weights);
        let groups = shape.rows.clamp(1, MOST_GROUPS);
        let chunks = weights.div_ceil(WEIGHTS_PER_THREAD * BLOCK as usize);
        let (mut launch, fits) = staged((groups, chunks), 0, image_len + 2 * output_len);
        launch.threads = (BLOCK, 1);
        let Some(parts) = self.scratch(groups * weights) else { return };
        let kernel = self.shared.kernels.convolution_backward_weight.of(input.format);
        launch!(
            self.shared,
            kernel,
            launch,
            sizes(shape),
            input.pointer,
            route.pointer,
            gradient.pointer,
            parts,
            fits,
        );
        self.add_parts(groups, parts, weight_gradient, accumulate);
    }

    pub(super) fn convolve_backward_input(
        &self,
        shape: &ConvolutionShape,
        weight: CudaView<'_>,
        [route, gradient]: [CudaView<'_>; 2],
        input_gradient: &CudaViewMut<'_>,
    ) {
        let (image_len, output_len, weights) = (shape.image_len(), shape.output_len(), shape.weight_len());
        assert!(input_gradient.len == shape.rows * image_len && gradient.len == shape.rows * output_len);
        assert!(route.len == gradient.len && weight.len == weights);
        // a few blocks for each image where there are few images
        let shares = (self.shared.most_blocks() / 4 / shape.rows.max(1)).clamp(1, 4);
        let (launch, fits) =
            staged((shape.rows, shares), image_len.div_ceil(shares), weights + 2 * output_len);
        let kernel = self.shared.kernels.convolution_backward_input.of(gradient.format);
        launch!(
            self.shared,
            kernel,
            launch,
            sizes(shape),
            weight.pointer,
            route.pointer,
            gradient.pointer,
            input_gradient.pointer,
            fits,
        );
    }

    pub(super) fn pool(
        &self,
        shape: &PoolShape,
        input: CudaView<'_>,
        route: &CudaViewMut<'_>,
        output: &CudaViewMut<'_>,
    ) {
        assert!(route.len == output.len && input.format == output.format);
        let launch = self.shared.over(output.len, 1);
        let kernel = self.shared.kernels.max_pool_forward.of(input.format);
        let sizes = pool_sizes(shape);
        launch!(self.shared, kernel, launch, sizes, input.pointer, route.pointer, output.pointer);
    }

    pub(super) fn unpool(
        &self,
        shape: &PoolShape,
        [route, gradient]: [CudaView<'_>; 2],
        input_gradient: &CudaViewMut<'_>,
    ) {
        assert!(route.len == gradient.len && gradient.format == input_gradient.format);
        let launch = self.shared.over(input_gradient.len, 1);
        let kernel = self.shared.kernels.max_pool_backward.of(gradient.format);
        let sizes = pool_sizes(shape);
        launch!(self.shared, kernel, launch, sizes, route.pointer, gradient.pointer, input_gradient.pointer);
    }
}
