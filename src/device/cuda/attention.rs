//! Attention.

use std::rc::Rc;

use super::runtime::buffer::{CudaView, CudaViewMut};
use super::runtime::compile::{Constants, KernelSource};
use super::runtime::format::Format;
use super::runtime::gpu::Cuda;
use super::runtime::kernels::{KernelTable, kernel_table};
use super::runtime::launch::{KernelArgument, Launch, launch};
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
    Constants(vec![("HEAD_WIDTH", compiled_width(width).to_string()), ("FORMAT", format.name().to_owned())])
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
}

impl KernelArgument for Sizes {}

impl Sizes {
    fn of(shape: &AttentionShape) -> Sizes {
        let AttentionShape { positions, groups, heads, width, causal, .. } = *shape;
        let [positions, groups, heads, width] = [positions, groups, heads, width].map(|size| size as u32);
        Sizes { positions, groups, heads, width, causal: i32::from(causal), scale: shape.scale() }
    }
}

/// Rows of a warp.
const WARP_ROWS: usize = 16;

/// The most warps of a block.
const MOST_WARPS: usize = 4;

/// Shared memory that a block should not exceed, so that a multiprocessor has room for several.
const SHARED_BYTES: usize = 64 << 10;

/// Returns the number of tiles of `num_rows` rows, queries or keys, and a launch with a block for each tile
/// of each of `num` heads of `width` values: the largest blocks whose tiles, two of their own rows and two
/// of others, fit into shared memory.
fn tiles(num_rows: usize, num: usize, width: usize, format: Format) -> (u32, Launch) {
    let (width, bytes) = (compiled_width(width), format.bytes());
    // as `TILE_ROWS` and `STRIDE` of the kernels
    let tile_rows = if width > 128 { 16 } else { 32 };
    let stride = |columns: usize| columns * bytes + 16;
    let shared_bytes = |warps: usize| {
        let rows = warps * WARP_ROWS;
        2 * (rows + tile_rows) * stride(width) + rows * stride(tile_rows)
    };
    let mut warps = num_rows.div_ceil(WARP_ROWS).next_power_of_two().min(MOST_WARPS);
    while warps > 1 && shared_bytes(warps) > SHARED_BYTES {
        warps /= 2;
    }
    let tiles = num_rows.div_ceil(warps * WARP_ROWS);
    let (blocks, threads) = ((tiles * num) as u32, 32 * warps as u32);
    let launch =
        Launch { blocks: (blocks, 1), threads: (threads, 1), shared_bytes: shared_bytes(warps) as u32 };
    (tiles as u32, launch)
}

impl Cuda {
    /// Returns the kernels for heads of `width` values, or `None` after a failure.
    fn attention_kernels(&self, width: usize, format: Format) -> Option<Rc<AttentionKernels>> {
        self.specialised.of(&self.streams, &constants(width, format))
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
        let (tiles, launch) = tiles(positions - first, rows * shape.num_heads(), width, input.format);
        let (sizes, first) = (Sizes::of(shape), first as u32);
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
        let (sizes, into) = (Sizes::of(shape), input_gradient.pointer);
        let (input, output, gradient) = (input.pointer, output.pointer, gradient.pointer);

        let kernel = &kernels.attention_backward_queries;
        let (num_tiles, launch) = tiles(positions, rows * shape.num_heads(), width, format);
        launch!(self.streams, kernel, launch, num_tiles, sizes, input, output, gradient, sums, into);

        let kernel = &kernels.attention_backward_keys;
        let (num_tiles, launch) = tiles(positions, rows * groups, width, format);
        launch!(self.streams, kernel, launch, num_tiles, sizes, input, gradient, sums, into);
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
