//! Pooling on its own.

use super::runtime::buffer::{CudaView, CudaViewMut};
use super::runtime::format::Format;
use super::runtime::gpu::Cuda;
use super::runtime::kernels::kernel_table;
use super::runtime::launch::{KernelArgument, launch, size32};
use crate::device::{PoolOperations, PoolShape};

/// The most elements of a window whose places fit the 16 bits of bfloat16 memory.
const MOST_BF16_PLACES: usize = 1 << 16;

kernel_table!(PoolKernels in "pool.cu" {
    max_pool_forward: KernelPair,
    max_pool_backward: KernelPair,
    average_pool_forward: KernelPair,
    average_pool_backward: KernelPair,
});

/// `struct PoolShape` of the kernels.
#[derive(Clone, Copy)]
#[repr(C)]
struct PoolSizes {
    rows: u32,
    height: u32,
    width: u32,
    channels: u32,
    window_height: u32,
    window_width: u32,
    stride_height: u32,
    stride_width: u32,
    padding: u32,
}

impl KernelArgument for PoolSizes {}

impl PoolSizes {
    fn new(shape: &PoolShape) -> PoolSizes {
        PoolSizes {
            rows: size32(shape.rows),
            height: size32(shape.height),
            width: size32(shape.width),
            channels: size32(shape.channels),
            window_height: size32(shape.window_height),
            window_width: size32(shape.window_width),
            stride_height: size32(shape.stride_height),
            stride_width: size32(shape.stride_width),
            padding: size32(shape.padding),
        }
    }
}

impl PoolOperations for Cuda {
    fn max_pool_forward(
        &self,
        shape: &PoolShape,
        input: CudaView<'_>,
        argmax: CudaViewMut<'_>,
        output: CudaViewMut<'_>,
    ) {
        assert!(argmax.len == output.len && input.format == output.format);
        assert!(input.len == shape.rows * shape.image_len() && output.len == shape.rows * shape.output_len());
        if input.format == Format::Bf16 && shape.window_len() > MOST_BF16_PLACES {
            let why =
                format!("a window has {} places, and {MOST_BF16_PLACES} fit 16 bits", shape.window_len());
            return self.streams.fail("max-pooling in bf16", why);
        }
        let kernel = self.kernels.of::<PoolKernels>().max_pool_forward.of(input.format);
        let (launch, sizes) =
            (self.streams.over(output.len, output.format.values_at_once()), PoolSizes::new(shape));
        launch!(self.streams, kernel, launch, sizes, input.pointer, argmax.pointer, output.pointer);
    }

    fn max_pool_backward(
        &self,
        shape: &PoolShape,
        argmax: CudaView<'_>,
        gradient: CudaView<'_>,
        input_gradient: CudaViewMut<'_>,
    ) {
        assert!(argmax.len == gradient.len && gradient.format == input_gradient.format);
        assert_eq!(gradient.len, shape.rows * shape.output_len());
        assert_eq!(input_gradient.len, shape.rows * shape.image_len());
        let kernel = self.kernels.of::<PoolKernels>().max_pool_backward.of(gradient.format);
        let (launch, sizes) =
            (self.streams.over(input_gradient.len, gradient.format.values_at_once()), PoolSizes::new(shape));
        let (argmax, gradient) = (argmax.pointer, gradient.pointer);
        launch!(self.streams, kernel, launch, sizes, argmax, gradient, input_gradient.pointer);
    }

    fn average_pool_forward(&self, shape: &PoolShape, input: CudaView<'_>, output: CudaViewMut<'_>) {
        assert!(output.len == shape.rows * shape.output_len() && input.format == output.format);
        assert_eq!(input.len, shape.rows * shape.image_len());
        let kernel = self.kernels.of::<PoolKernels>().average_pool_forward.of(input.format);
        let (launch, sizes) =
            (self.streams.over(output.len, output.format.values_at_once()), PoolSizes::new(shape));
        launch!(self.streams, kernel, launch, sizes, input.pointer, output.pointer);
    }

    fn average_pool_backward(
        &self,
        shape: &PoolShape,
        gradient: CudaView<'_>,
        input_gradient: CudaViewMut<'_>,
    ) {
        assert!(gradient.len == shape.rows * shape.output_len() && gradient.format == input_gradient.format);
        assert_eq!(input_gradient.len, shape.rows * shape.image_len());
        let kernel = self.kernels.of::<PoolKernels>().average_pool_backward.of(gradient.format);
        let (launch, sizes) =
            (self.streams.over(input_gradient.len, gradient.format.values_at_once()), PoolSizes::new(shape));
        launch!(self.streams, kernel, launch, sizes, gradient.pointer, input_gradient.pointer);
    }
}
