//! Losses with their gradients.

use super::activation::number;
use super::runtime::buffer::{CudaView, CudaViewMut};
use super::runtime::gpu::Cuda;
use super::runtime::kernels::kernel_table;
use super::runtime::launch::{Launch, launch, size32};
use crate::device::{
    Activation, CrossEntropyOperands, LossOperations, LossOutputs, LossShape, logit_statistics, totals,
};

kernel_table!(LossKernels in "loss.cu" {
    cross_entropy: KernelPair,
    find_logit_statistics: KernelPair,
    sum_exponentials: KernelPair,
    finish_cross_entropy: KernelPair,
    mean_squared_error: KernelPair,
});

/// Rows of a block of the cross-entropy, a warp each.
const ROWS_PER_BLOCK: usize = 4;

const _: () = {
    use logit_statistics::{BEST, LARGEST, LEN, OF_LABEL};
    assert!(totals::LOSS == 0 && totals::CORRECT == 1, "loss.cu has these indices too");
    assert!(LARGEST == 0 && BEST == 1 && OF_LABEL == 2 && LEN == 3, "loss.cu has these indices too");
};

/// Returns the launch of a kernel with a warp for each of `rows` rows.
fn warps(rows: usize) -> Launch {
    let (blocks, threads) = (rows.div_ceil(ROWS_PER_BLOCK), 32 * ROWS_PER_BLOCK);
    Launch { blocks: (size32(blocks), 1), threads: (size32(threads), 1), shared_bytes: 0 }
}

impl LossOperations for Cuda {
    fn cross_entropy(
        &self,
        shape: &LossShape,
        logits: CudaView<'_>,
        labels: CudaView<'_>,
        gradient: CudaViewMut<'_>,
        sums: CudaViewMut<'_>,
    ) {
        let LossShape { rows, columns, scale, .. } = *shape;
        assert!(logits.len == rows * columns && gradient.len == logits.len && labels.len >= rows);
        assert_eq!(sums.len, totals::LEN);
        let kernel = self.kernels.of::<LossKernels>().cross_entropy.of(logits.format);
        let Some(partials) = self.partial_sums.reserve(2 * rows.div_ceil(ROWS_PER_BLOCK)) else { return };
        launch!(
            self.streams,
            kernel,
            warps(rows),
            size32(rows),
            size32(columns),
            scale,
            logits.pointer,
            labels.pointer,
            gradient.pointer,
            partials,
            self.partial_sums.blocks_done(),
            sums.pointer,
        );
    }

    fn find_logit_statistics(
        &self,
        shape: &LossShape,
        logits: CudaView<'_>,
        labels: CudaView<'_>,
        statistics: CudaViewMut<'_>,
    ) {
        let LossShape { rows, columns, classes, .. } = *shape;
        assert!(logits.len == rows * columns && labels.len >= rows);
        assert_eq!(statistics.len, logit_statistics::LEN * rows);
        launch!(
            self.streams,
            self.kernels.of::<LossKernels>().find_logit_statistics.of(logits.format),
            warps(rows),
            size32(rows),
            size32(columns),
            size32(classes.terms().start),
            logits.pointer,
            labels.pointer,
            statistics.pointer,
        );
    }

    fn sum_exponentials(
        &self,
        shape: &LossShape,
        logits: CudaView<'_>,
        statistics: CudaView<'_>,
        _gradient: CudaViewMut<'_>,
        exponentials: CudaViewMut<'_>,
    ) {
        let LossShape { rows, columns, .. } = *shape;
        assert!(logits.len == rows * columns && exponentials.len == rows, "a GPU adds up one array");
        launch!(
            self.streams,
            self.kernels.of::<LossKernels>().sum_exponentials.of(logits.format),
            warps(rows),
            size32(rows),
            size32(columns),
            size32(statistics.len / (logit_statistics::LEN * rows)),
            logits.pointer,
            statistics.pointer,
            exponentials.pointer,
        );
    }

    fn finish_cross_entropy(
        &self,
        shape: &LossShape,
        operands: &CrossEntropyOperands<CudaView<'_>>,
        gradient: CudaViewMut<'_>,
        sums: CudaViewMut<'_>,
    ) {
        let LossShape { rows, columns, scale, classes } = *shape;
        let CrossEntropyOperands { logits, labels, statistics, exponentials } = *operands;
        assert!(logits.len == rows * columns && gradient.len == logits.len && labels.len >= rows);
        assert!(sums.len == totals::LEN && exponentials.len == rows);
        let kernel = self.kernels.of::<LossKernels>().finish_cross_entropy.of(logits.format);
        let Some(partials) = self.partial_sums.reserve(2 * rows.div_ceil(ROWS_PER_BLOCK)) else { return };
        launch!(
            self.streams,
            kernel,
            warps(rows),
            size32(rows),
            size32(columns),
            size32(classes.terms().start),
            size32(statistics.len / (logit_statistics::LEN * rows)),
            scale,
            logits.pointer,
            labels.pointer,
            statistics.pointer,
            exponentials.pointer,
            gradient.pointer,
            partials,
            self.partial_sums.blocks_done(),
            sums.pointer,
        );
    }

    fn mean_squared_error(
        &self,
        shape: &LossShape,
        outputs: LossOutputs<CudaView<'_>>,
        targets: Option<CudaView<'_>>,
        gradient: CudaViewMut<'_>,
        sums: CudaViewMut<'_>,
    ) {
        let output = outputs.values;
        let (activation, saved) = outputs.activation.unwrap_or((Activation::Identity, output));
        assert!(saved.len == output.len && saved.format == output.format);
        assert!(output.len == gradient.len && output.format == gradient.format);
        assert!(targets.as_ref().is_none_or(|targets| targets.len >= output.len));
        assert_eq!(sums.len, totals::LEN);
        launch!(
            self.streams,
            self.kernels.of::<LossKernels>().mean_squared_error.of(output.format),
            self.streams.over(output.len, 8),
            output.len as u64,
            size32(shape.columns),
            shape.scale,
            output.pointer,
            targets.map_or(0, |targets| targets.pointer),
            number(activation),
            saved.pointer,
            gradient.pointer,
            self.partial_sums.of_blocks(),
            self.partial_sums.blocks_done(),
            sums.pointer,
        );
    }
}
