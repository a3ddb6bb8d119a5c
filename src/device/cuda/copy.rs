//! Fills, copies, sums, transposition and gathered rows in device memory. Only fills and whole copies also
//! write a buffer's copy in bf16.

use super::runtime::buffer::{CudaView, CudaViewMut};
use super::runtime::format::Format;
use super::runtime::gpu::Cuda;
use super::runtime::kernels::kernel_table;
use super::runtime::launch::{BLOCK, Launch, launch, size32};
use crate::device::{BlockShape, CopyOperations, GatheredRows};

kernel_table!(CopyKernels in "copy.cu" {
    fill: KernelPair,
    add: KernelPair,
    sum: KernelPair,
    copy_block: KernelPair,
    transpose_each: KernelPair,
    gather_rows: KernelPair,
});

/// The fewest rows and columns of the tiles of a transposition.
const TILE: usize = 32;

impl CopyOperations for Cuda {
    fn fill(&self, into: CudaViewMut<'_>, value: f32) {
        let (launch, len) = (self.streams.over(into.len, 8), into.len as u64);
        if len > 0 {
            let kernel = self.kernels.of::<CopyKernels>().fill.of(into.format);
            launch!(self.streams, kernel, launch, len, value, into.pointer);
        }
        if len > 0 && into.copy != 0 {
            let kernel = self.kernels.of::<CopyKernels>().fill.of(Format::Bf16);
            launch!(self.streams, kernel, launch, len, value, into.copy);
        }
    }

    fn copy(&self, from: CudaView<'_>, into: CudaViewMut<'_>) {
        assert_eq!(from.len, into.len, "arrays that are copied have one length");
        let (kernels, launch, len) = (&self.streams.kernels, self.streams.over(from.len, 8), from.len as u64);
        match (from.format, into.format) {
            _ if len == 0 => {}
            (Format::F32, Format::Bf16) => {
                launch!(self.streams, &kernels.cast_to_bf16, launch, len, from.pointer, into.pointer);
            }
            (Format::Bf16, Format::F32) => {
                launch!(self.streams, &kernels.cast_to_f32, launch, len, from.pointer, into.pointer);
            }
            // SAFETY: both views are of `from.len` values of one format.
            _ => unsafe { self.streams.copy(from.pointer, into.pointer, from.len * from.format.bytes()) },
        }
        if len > 0 && into.copy != 0 {
            launch!(self.streams, &kernels.cast_to_bf16, launch, len, into.pointer, into.copy);
        }
    }

    fn add(&self, from: CudaView<'_>, into: CudaViewMut<'_>) {
        assert_eq!(from.len, into.len, "arrays that are added have one length");
        assert!(from.format == into.format && into.copy == 0, "arrays that are added have one role");
        if from.len > 0 {
            let (launch, len) = (self.streams.over(from.len, 8), from.len as u64);
            let kernel = self.kernels.of::<CopyKernels>().add.of(from.format);
            launch!(self.streams, kernel, launch, len, from.pointer, into.pointer);
        }
    }

    fn sum(&self, first: CudaView<'_>, second: CudaView<'_>, relu: bool, output: CudaViewMut<'_>) {
        assert!(first.len == output.len && second.len == output.len, "arrays that are added have one length");
        let is_alike = first.format == output.format && second.format == output.format && output.copy == 0;
        assert!(is_alike, "arrays that are added have one role");
        if output.len > 0 {
            let (launch, len) = (self.streams.over(output.len, 8), output.len as u64);
            let kernel = self.kernels.of::<CopyKernels>().sum.of(output.format);
            let (first, second, relu) = (first.pointer, second.pointer, i32::from(relu));
            launch!(self.streams, kernel, launch, len, first, second, relu, output.pointer);
        }
    }

    fn copy_block(&self, shape: &BlockShape, from: CudaView<'_>, into: CudaViewMut<'_>) {
        let BlockShape { rows, columns, from_stride, into_stride } = *shape;
        if rows * columns == 0 {
            return;
        }
        let end = |stride: usize| (rows - 1) * stride + columns;
        assert!(end(from_stride) <= from.len && end(into_stride) <= into.len);
        assert!(from.format == into.format && into.copy == 0, "blocks of activations are moved as they are");
        let kernel = self.kernels.of::<CopyKernels>().copy_block.of(from.format);
        let launch = self.streams.over(rows * columns, 8);
        let [rows, columns, from_stride, into_stride] = [rows, columns, from_stride, into_stride].map(size32);
        let (from, into) = (from.pointer, into.pointer);
        launch!(self.streams, kernel, launch, rows, columns, from_stride, into_stride, from, into);
    }

    fn transpose_each(&self, rows: usize, columns: usize, input: CudaView<'_>, output: CudaViewMut<'_>) {
        assert!(input.len == output.len && input.format == output.format);
        assert!(u32::try_from(rows * columns).is_ok(), "the places of a matrix have numbers of 32 bits");
        let kernel = self.kernels.of::<CopyKernels>().transpose_each.of(input.format);
        let tiles = input.len / (rows * columns) * rows.div_ceil(TILE) * columns.div_ceil(TILE);
        let blocks = size32(tiles.clamp(1, self.streams.max_blocks()));
        let launch = Launch { blocks: (blocks, 1), threads: (BLOCK, 1), shared_bytes: 0 };
        let (len, rows, columns) = (input.len as u64, size32(rows), size32(columns));
        launch!(self.streams, kernel, launch, len, rows, columns, input.pointer, output.pointer);
    }

    fn gather_rows(
        &self,
        numbers: CudaView<'_>,
        first: GatheredRows<CudaView<'_>, CudaViewMut<'_>>,
        second: GatheredRows<CudaView<'_>, CudaViewMut<'_>>,
    ) {
        let columns_of =
            |GatheredRows { columns, table, into }: &GatheredRows<CudaView<'_>, CudaViewMut<'_>>| {
                let columns = if into.len == 0 { 0 } else { *columns };
                assert!(into.len == numbers.len * columns && table.format == Format::F32);
                size32(columns)
            };
        let [columns, others] = [&first, &second].map(columns_of);
        assert_eq!(second.into.format, Format::F32, "no format rounds the second rows");
        if first.into.len + second.into.len == 0 {
            return;
        }
        let launch = self.streams.over(first.into.len.max(second.into.len), 8);
        let kernel = self.kernels.of::<CopyKernels>().gather_rows.of(first.into.format);
        let (rows, numbers) = (size32(numbers.len), numbers.pointer);
        let (table, into) = (first.table.pointer, first.into.pointer);
        let (other_table, other_into) = (second.table.pointer, second.into.pointer);
        launch!(
            self.streams,
            kernel,
            launch,
            rows,
            numbers,
            columns,
            table,
            into,
            others,
            other_table,
            other_into
        );
    }
}
