//! Embeddings.

use super::runtime::buffer::{CudaView, CudaViewMut};
use super::runtime::format::Format;
use super::runtime::gpu::Cuda;
use super::runtime::kernels::kernel_table;
use super::runtime::launch::{BLOCK, Launch, launch, size32};
use crate::device::{EmbeddingOperations, EmbeddingShape, RowSums};

kernel_table!(EmbeddingKernels in "embedding.cu" {
    embed: KernelPair,
    embed_backward: KernelPair,
    add_table: KernelPair,
});

/// The most parts of the tokens whose gradients are added up apart.
const MOST_PARTIAL_SUMS: usize = 64;

impl EmbeddingOperations for Cuda {
    fn embed(
        &self,
        shape: &EmbeddingShape,
        tokens: CudaView<'_>,
        table: CudaView<'_>,
        output: CudaViewMut<'_>,
    ) {
        let EmbeddingShape { tokens: num_tokens, first, rows, columns } = *shape;
        assert!(tokens.len >= num_tokens && tokens.format == Format::F32, "tokens are exact");
        assert!(table.len == rows * columns && output.len == num_tokens * columns);
        let kernel = self.kernels.of::<EmbeddingKernels>().embed.of(output.format);
        launch!(
            self.streams,
            kernel,
            self.streams.over(output.len, 8),
            output.len as u64,
            size32(first),
            size32(rows),
            size32(columns),
            tokens.pointer,
            table.pointer,
            output.pointer,
        );
    }

    fn embed_backward(
        &self,
        shape: &EmbeddingShape,
        tokens: CudaView<'_>,
        gradient: CudaView<'_>,
        table_gradient: RowSums<CudaViewMut<'_>>,
    ) {
        let EmbeddingShape { tokens: num_tokens, first, rows, columns } = *shape;
        assert!(tokens.len >= num_tokens && tokens.format == Format::F32, "tokens are exact");
        assert!(gradient.len >= num_tokens * columns);
        let Some((table_gradient, accumulate)) = self.single_sum(table_gradient, rows * columns) else {
            return;
        };
        if rows == 0 {
            return;
        }
        // enough blocks to fill the device, each with some tokens
        let wanted = self.streams.max_blocks().div_ceil(rows).min(num_tokens.div_ceil(BLOCK as usize));
        let num_own = num_tokens.div_ceil(wanted.clamp(1, MOST_PARTIAL_SUMS));
        let num_sums = num_tokens.div_ceil(num_own);
        let blocks = (size32(rows), size32(num_sums));
        let launch = Launch { blocks, threads: (BLOCK, 1), shared_bytes: 0 };
        let kernel = self.kernels.of::<EmbeddingKernels>().embed_backward.of(gradient.format);
        let [num_tokens, num_own, first, columns] = [num_tokens, num_own, first, columns].map(size32);
        let (tokens, gradient, streams) = (tokens.pointer, gradient.pointer, &self.streams);
        self.partial_sums.sum_parts(&table_gradient, num_sums, accumulate, |sums, adds| {
            let adds = i32::from(adds);
            launch!(
                streams, kernel, launch, num_tokens, num_own, first, columns, tokens, gradient, sums, adds,
            );
        });
    }

    fn add_table(&self, input: CudaView<'_>, table: CudaView<'_>, output: CudaViewMut<'_>) {
        assert!(input.len == output.len && input.len.is_multiple_of(table.len));
        assert_eq!(input.format, output.format);
        let kernel = self.kernels.of::<EmbeddingKernels>().add_table.of(input.format);
        launch!(
            self.streams,
            kernel,
            self.streams.over(input.len, 8),
            input.len as u64,
            size32(table.len),
            input.pointer,
            table.pointer,
            output.pointer,
        );
    }
}
