//! Attention.

use super::runtime::buffer::{CudaView, CudaViewMut};
use super::runtime::gpu::Cuda;
use super::runtime::kernels::kernel_table;
use super::runtime::launch::{Launch, launch};
use crate::device::{AttentionOperations, AttentionShape, Rotation};

kernel_table!(AttentionKernels in "attention.cu" {
    attention_forward: KernelPair,
    attention_backward_queries: KernelPair,
    attention_backward_keys: KernelPair,
    rotate: KernelPair,
});

/// Warps of a block.
const WARPS: usize = 4;

/// Returns a launch of `num` warps.
fn warps(num: usize) -> Launch {
    let (blocks, threads) = (num.div_ceil(WARPS), 32 * WARPS);
    Launch { blocks: (blocks as u32, 1), threads: (threads as u32, 1), shared_bytes: 0 }
}

/// Returns the number of queries, and that of keys.
fn counts(shape: &AttentionShape) -> (usize, usize) {
    let sequences = shape.rows * shape.positions;
    (sequences * shape.num_heads(), sequences * shape.groups)
}

impl AttentionOperations for Cuda {
    fn attention_forward(
        &self,
        shape: &AttentionShape,
        input: CudaView<'_>,
        _saved: CudaViewMut<'_>,
        output: CudaViewMut<'_>,
    ) {
        self.attention_next(shape, 0, input, output);
    }

    fn attention_next(
        &self,
        shape: &AttentionShape,
        first: usize,
        input: CudaView<'_>,
        output: CudaViewMut<'_>,
    ) {
        let AttentionShape { rows, positions, groups, heads, width, causal } = *shape;
        let num_outputs = rows * (positions - first);
        assert_eq!(input.len, rows * positions * shape.input_width());
        assert!(output.len == num_outputs * shape.output_width() && output.format == input.format);
        let num_queries = num_outputs * shape.num_heads();
        let kernel = self.kernels.of::<AttentionKernels>().attention_forward.of(input.format);
        launch!(
            self.streams,
            kernel,
            warps(num_queries),
            num_queries as u64,
            first as u32,
            positions as u32,
            groups as u32,
            heads as u32,
            width as u32,
            i32::from(causal),
            shape.scale(),
            input.pointer,
            output.pointer,
        );
    }

    fn attention_backward(
        &self,
        shape: &AttentionShape,
        input: CudaView<'_>,
        _saved: CudaView<'_>,
        output: CudaView<'_>,
        gradient: CudaView<'_>,
        input_gradient: CudaViewMut<'_>,
    ) {
        let AttentionShape { rows, positions, groups, heads, width, causal } = *shape;
        assert!(input.len >= rows * positions * shape.input_width() && input_gradient.len == input.len);
        assert!(output.len >= rows * positions * shape.output_width() && gradient.len == output.len);
        assert!(output.format == input.format && gradient.format == input.format);
        assert_eq!(input_gradient.format, input.format);
        let (num_queries, num_keys) = counts(shape);
        let Some(sums) = self.partial_sums.reserve(2 * num_queries) else { return };
        let kernels = self.kernels.of::<AttentionKernels>();
        launch!(
            self.streams,
            kernels.attention_backward_queries.of(input.format),
            warps(num_queries),
            num_queries as u64,
            positions as u32,
            groups as u32,
            heads as u32,
            width as u32,
            i32::from(causal),
            shape.scale(),
            input.pointer,
            output.pointer,
            gradient.pointer,
            sums,
            input_gradient.pointer,
        );
        launch!(
            self.streams,
            kernels.attention_backward_keys.of(input.format),
            warps(num_keys),
            num_keys as u64,
            positions as u32,
            groups as u32,
            heads as u32,
            width as u32,
            i32::from(causal),
            shape.scale(),
            input.pointer,
            gradient.pointer,
            sums,
            input_gradient.pointer,
        );
    }

    fn rotate(
        &self,
        shape: &AttentionShape,
        Rotation { base, first, inverse }: Rotation,
        from: Option<CudaView<'_>>,
        values: CudaViewMut<'_>,
    ) {
        let AttentionShape { positions, groups, heads, width, .. } = *shape;
        let from = from.unwrap_or(values.as_view());
        assert!(from.len == values.len && from.format == values.format);
        let num_vectors = values.len / width;
        let kernel = self.kernels.of::<AttentionKernels>().rotate.of(values.format);
        launch!(
            self.streams,
            kernel,
            self.streams.over(num_vectors * width, 1),
            num_vectors as u64,
            positions as u32,
            first as u32,
            groups as u32,
            heads as u32,
            width as u32,
            base,
            i32::from(inverse),
            from.pointer,
            values.pointer,
        );
    }
}
