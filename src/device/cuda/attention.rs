//! Attention.

use std::rc::Rc;

use super::dropout::DropoutDraws;
use super::runtime::buffer::{CudaView, CudaViewMut};
use super::runtime::compile::{Constants, KernelSource};
use super::runtime::format::Format;
use super::runtime::gpu::Cuda;
use super::runtime::kernels::{KernelTable, kernel_table};
use super::runtime::launch::{KernelArgument, Launch, launch, size32};
use super::runtime::streams::Streams;
use crate::device::{AttentionOperations, AttentionShape, Rotation};

kernel_table!(AttentionKernels in "attention.cu" {
    attention_forward: Kernel,
    attention_backward_queries: Kernel,
    attention_backward_keys: Kernel,
});

kernel_table!(RotaryKernels in "rotary.cu" {
    rotate: KernelPair,
});

/// The widths of heads that kernels are compiled for: one that is less wide is as the next.
const WIDTHS: [usize; 4] = [32, 64, 128, 256];

/// The kernels of attention, which are compiled for [`variants`].
pub const SOURCE: KernelSource = AttentionKernels::SOURCE;

/// Returns all constants that the kernels of attention are compiled for.
pub fn variants() -> Vec<Constants> {
    let formats = |width| [Format::F32, Format::Bf16].map(|format| constants(width, format));
    WIDTHS.into_iter().flat_map(formats).collect()
}

fn constants(width: usize, format: Format) -> Constants {
    let (width, format) = (compiled_width(width).to_string(), format.name());
    let suffix = format!("_{width}_{format}");
    Constants { macros: vec![("HEAD_WIDTH", width), ("FORMAT", format.to_owned())], suffix }
}

/// Returns the width that the kernels for heads of `width` values are compiled for.
fn compiled_width(width: usize) -> usize {
    WIDTHS.into_iter().find(|most| width <= *most).expect("no head is wider")
}

/// `struct Sizes` of the kernels.
#[derive(Clone, Copy)]
#[repr(C)]
struct Sizes {
    positions: u32,
    groups: u32,
    heads: u32,
    width: u32,
    causal: i32,
    scale: f32,
    draws: DropoutDraws,
    first_weight: u64,
    row_stride: u64,
}

impl KernelArgument for Sizes {}

impl Sizes {
    fn of(shape: &AttentionShape, streams: &Streams) -> Sizes {
        let AttentionShape { positions, groups, heads, width, causal, .. } = *shape;
        let [positions, groups, heads, width] = [positions, groups, heads, width].map(size32);
        let dropout = shape.dropout.as_ref();
        Sizes {
            positions,
            groups,
            heads,
            width,
            causal: i32::from(causal),
            scale: shape.scale(),
            draws: dropout.map(|dropout| DropoutDraws::of(&dropout.mask, streams)).unwrap_or_default(),
            first_weight: dropout.map_or(0, |dropout| dropout.first),
            row_stride: dropout.map_or(0, |dropout| dropout.row_stride),
        }
    }
}

/// Rows of a warp.
const WARP_ROWS: usize = 16;

/// The most warps of a block.
const MOST_WARPS: usize = 4;

/// Shared memory that a block has at most: all that the least of the devices since Volta allows.
const SHARED_BYTES: usize = 64 << 10;

/// The division of rows, queries or keys, among the blocks of a kernel.
struct Tiling {
    /// Warps of a block.
    warps: usize,
    shared_bytes: usize,
}

impl Tiling {
    /// Returns the largest blocks for `num_rows` rows of heads of `width` values whose tiles fit into shared
    /// memory: `own` of the block's rows, and two of others.
    fn new(num_rows: usize, own: usize, width: usize, format: Format) -> Tiling {
        let (width, bytes) = (compiled_width(width), format.bytes());
        // as `TILE_ROWS` and `STRIDE` of the kernels
        let tile_rows = match format {
            _ if width <= 128 => 32,
            Format::Bf16 => 16,
            Format::F32 => 8,
        };
        let stride = |columns: usize| columns * bytes + 16;
        let shared_bytes = |warps: usize| {
            let rows = warps * WARP_ROWS;
            (own * rows + 2 * tile_rows) * stride(width) + rows * stride(tile_rows)
        };
        let mut warps = num_rows.div_ceil(WARP_ROWS).next_power_of_two().min(MOST_WARPS);
        while warps > 1 && shared_bytes(warps) > SHARED_BYTES {
            warps /= 2;
        }
        Tiling { warps, shared_bytes: shared_bytes(warps) }
    }

    /// Returns the number of tiles of `num_rows` rows, and a launch with a block for each of them and for
    /// each of `num` heads.
    fn over(&self, num_rows: usize, num: usize) -> (u32, Launch) {
        let tiles = num_rows.div_ceil(self.warps * WARP_ROWS);
        let (blocks, threads) = (size32(tiles * num), 32 * size32(self.warps));
        let shared_bytes = size32(self.shared_bytes);
        (size32(tiles), Launch { blocks: (blocks, 1), threads: (threads, 1), shared_bytes })
    }
}

impl Cuda {
    /// Returns the kernels for heads of `width` values, or `None` after a failure.
    fn attention_kernels(&self, width: usize, format: Format) -> Option<Rc<AttentionKernels>> {
        let key = [size32(compiled_width(width)), size32(format.bytes())];
        self.specialised.of(&self.streams, &key, || constants(width, format))
    }
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
        let AttentionShape { rows, positions, width, .. } = *shape;
        assert_eq!(input.len, rows * positions * shape.input_width());
        assert!(output.len == rows * (positions - first) * shape.output_width());
        assert_eq!(output.format, input.format);
        let Some(kernels) = self.attention_kernels(width, input.format) else { return };
        let num_rows = positions - first;
        let (tiles, launch) =
            Tiling::new(num_rows, 1, width, input.format).over(num_rows, rows * shape.num_heads());
        let (sizes, first) = (Sizes::of(shape, &self.streams), size32(first));
        let (kernel, input, output) = (&kernels.attention_forward, input.pointer, output.pointer);
        launch!(self.streams, kernel, launch, tiles, first, sizes, input, output);
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
        let AttentionShape { rows, positions, groups, width, .. } = *shape;
        assert!(input.len >= rows * positions * shape.input_width() && input_gradient.len == input.len);
        assert!(output.len >= rows * positions * shape.output_width() && gradient.len == output.len);
        assert!(output.format == input.format && gradient.format == input.format);
        assert_eq!(input_gradient.format, input.format);
        let num_queries = rows * positions * shape.num_heads();
        let Some(sums) = self.partial_sums.reserve(2 * num_queries) else { return };
        let format = input.format;
        let Some(kernels) = self.attention_kernels(width, format) else { return };
        let (sizes, into) = (Sizes::of(shape, &self.streams), input_gradient.pointer);
        let (input, output, gradient) = (input.pointer, output.pointer, gradient.pointer);

        let tiling = Tiling::new(positions, 2, width, format);
        let kernel = &kernels.attention_backward_queries;
        let (tiles, launch) = tiling.over(positions, rows * shape.num_heads());
        launch!(self.streams, kernel, launch, tiles, sizes, input, output, gradient, sums, into);

        let kernel = &kernels.attention_backward_keys;
        let (tiles, launch) = tiling.over(positions, rows * groups);
        launch!(self.streams, kernel, launch, tiles, sizes, input, gradient, sums, into);
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
        let kernel = self.kernels.of::<RotaryKernels>().rotate.of(values.format);
        launch!(
            self.streams,
            kernel,
            self.streams.over(num_vectors * width, 1),
            num_vectors as u64,
            size32(positions),
            size32(first),
            size32(groups),
            size32(heads),
            size32(width),
            base,
            i32::from(inverse),
            from.pointer,
            values.pointer,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_block_fits_the_shared_memory_of_every_device() {
        for width in 1..=256 {
            for format in [Format::F32, Format::Bf16] {
                for (num_rows, own) in [(1, 1), (1000, 1), (1, 2), (20, 2), (1000, 2)] {
                    let tiling = Tiling::new(num_rows, own, width, format);
                    assert!(tiling.shared_bytes <= SHARED_BYTES, "{width} {format:?} {own}");
                }
            }
        }
    }
}
