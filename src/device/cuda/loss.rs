//! Losses with their gradients.

use super::runtime::buffer::{CudaView, CudaViewMut};
use super::runtime::gpu::Cuda;
use super::runtime::kernels::kernel_table;
use super::runtime::launch::{Launch, launch};
use crate::device::{LossOperations, LossShape, totals};

kernel_table!(LossKernels in "loss.cu" {
    cross_entropy: KernelPair,
    mean_squared_error: KernelPair,
});

/// Rows of a block of the cross-entropy, a warp each.
const ROWS_PER_BLOCK: usize = 4;

const _: () = assert!(totals::LOSS == 0 && totals::CORRECT == 1, "loss.cu has these indices too");

impl LossOperations for Cuda {
    fn cross_entropy(
        &self,
        shape: &LossShape,
        logits: CudaView<'_>,
        labels: CudaView<'_>,
        gradient: CudaViewMut<'_>,
        sums: CudaViewMut<'_>,
    ) {
        let LossShape { rows, columns, scale } = *shape;
        assert!(logits.len == rows * columns && gradient.len == logits.len && labels.len >= rows);
        assert_eq!(sums.len, totals::LEN);
        let kernel = self.kernels.of::<LossKernels>().cross_entropy.of(logits.format);
        let blocks = rows.div_ceil(ROWS_PER_BLOCK);
        let Some(partials) = self.partial_sums.reserve(2 * blocks) else { return };
        let launch =
            Launch { blocks: (blocks as u32, 1), threads: (32 * ROWS_PER_BLOCK as u32, 1), shared_bytes: 0 };
        launch!(
            self.streams,
            kernel,
            launch,
            rows as u32,
            columns as u32,
            scale,
            logits.pointer,
            labels.pointer,
            gradient.pointer,
            partials,
            self.partial_sums.blocks_done(),
            sums.pointer,
        );
    }

    fn mean_squared_error(
        &self,
        shape: &LossShape,
        output: CudaView<'_>,
        targets: Option<CudaView<'_>>,
        gradient: CudaViewMut<'_>,
        sums: CudaViewMut<'_>,
    ) {
        assert!(output.len == gradient.len && output.format == gradient.format);
        assert_eq!(sums.len, totals::LEN);
        launch!(
            self.streams,
            self.kernels.of::<LossKernels>().mean_squared_error.of(output.format),
            self.streams.over(output.len, 4),
            output.len as u64,
            shape.columns as u32,
            shape.scale,
            output.pointer,
            targets.map_or(0, |targets| targets.pointer),
            gradient.pointer,
            self.partial_sums.of_blocks(),
            self.partial_sums.blocks_done(),
            sums.pointer,
        );
    }
}
