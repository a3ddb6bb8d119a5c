//! Pooling on its own.

use super::runtime::buffer::{CudaView, CudaViewMut};
use super::runtime::gpu::Cuda;
use super::runtime::kernels::kernel_table;
use super::runtime::launch::{KernelArgument, launch};
use crate::device::{PoolOperations, PoolShape};

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
        let size = |size: usize| size as u32;
        PoolSizes {
            rows: size(shape.rows),
            height: size(shape.height),
            width: size(shape.width),
            channels: size(shape.channels),
            window_height: size(shape.window_height),
            window_width: size(shape.window_width),
            stride_height: size(shape.stride_height),
            stride_width: size(shape.stride_width),
            padding: size(shape.padding),
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
        let kernel = self.kernels.of::<PoolKernels>().max_pool_forward.of(input.format);
        let (launch, sizes) = (self.streams.over(output.len, 4), PoolSizes::new(shape));
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
        let kernel = self.kernels.of::<PoolKernels>().max_pool_backward.of(gradient.format);
        let (launch, sizes) = (self.streams.over(input_gradient.len, 4), PoolSizes::new(shape));
        let (argmax, gradient) = (argmax.pointer, gradient.pointer);
        launch!(self.streams, kernel, launch, sizes, argmax, gradient, input_gradient.pointer);
    }

    fn average_pool_forward(&self, shape: &PoolShape, input: CudaView<'_>, output: CudaViewMut<'_>) {
        assert!(output.len == shape.rows * shape.output_len() && input.format == output.format);
        let kernel = self.kernels.of::<PoolKernels>().average_pool_forward.of(input.format);
        let (launch, sizes) = (self.streams.over(output.len, 4), PoolSizes::new(shape));
        launch!(self.streams, kernel, launch, sizes, input.pointer, output.pointer);
    }

    fn average_pool_backward(
        &self,
        shape: &PoolShape,
        gradient: CudaView<'_>,
        input_gradient: CudaViewMut<'_>,
    ) {
        assert!(gradient.len == shape.rows * shape.output_len() && gradient.format == input_gradient.format);
        let kernel = self.kernels.of::<PoolKernels>().average_pool_backward.of(gradient.format);
        let (launch, sizes) = (self.streams.over(input_gradient.len, 4), PoolSizes::new(shape));
        launch!(self.streams, kernel, launch, sizes, gradient.pointer, input_gradient.pointer);
    }
}
