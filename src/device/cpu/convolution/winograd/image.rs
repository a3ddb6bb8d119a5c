//! Images, channels last, from which tiles are read and to which they are written.

use pulp::Simd;

use super::transform::{VectorSink, VectorSource};
use crate::device::cpu::matmul::fetch;

/// An image.
#[derive(Clone, Copy)]
pub(super) struct Image<'a> {
    pub(super) values: &'a [f32],
    pub(super) height: usize,
    pub(super) width: usize,
    pub(super) channels: usize,
}

/// A square of places of an image.
#[derive(Clone, Copy)]
pub(super) struct Patch<'a> {
    values: &'a [f32],
    /// Elements from a row to the next, and from a place to the next.
    row_stride: usize,
    channels: usize,
}

impl<'a> Image<'a> {
    /// Returns an image of a batch.
    #[inline(always)]
    pub(super) fn of(batch: &'a [f32], number: usize, [height, width, channels]: [usize; 3]) -> Image<'a> {
        let len = height * width * channels;
        Image { values: &batch[number * len..][..len], height, width, channels }
    }

    /// Returns the `SIDE × SIDE` places whose first is at `row` and `column`. If some are outside of the
    /// image, all are copied into `border`, with zeros for those.
    #[inline(always)]
    pub(super) fn patch<'b, const SIDE: usize>(
        &self,
        [row, column]: [isize; 2],
        border: &'b mut [f32],
    ) -> Patch<'b>
    where
        'a: 'b,
    {
        let Image { values, height, width, channels } = *self;
        let (row_stride, side) = (width * channels, SIDE as isize);
        let is_inside =
            row >= 0 && column >= 0 && row + side <= height as isize && column + side <= width as isize;
        if is_inside {
            let values = &values[row as usize * row_stride + column as usize * channels..];
            return Patch { values, row_stride, channels };
        }
        let border = &mut border[..SIDE * SIDE * channels];
        border.fill(0.0);
        // the columns of the patch that are inside
        let first = (-column).clamp(0, side) as usize;
        let end = (width as isize - column).clamp(first as isize, side) as usize;
        for (line, row) in border.chunks_exact_mut(SIDE * channels).zip(row..) {
            if (0..height as isize).contains(&row) && first < end {
                let from = row as usize * row_stride + (column + first as isize) as usize * channels;
                line[first * channels..end * channels]
                    .copy_from_slice(&values[from..][..(end - first) * channels]);
            }
        }
        Patch { values: border, row_stride: SIDE * channels, channels }
    }

    /// Asks for `side` places of as many rows from `row` and `column` on, as far as they exist: tiles are
    /// read and written in an order that the processor does not foresee.
    #[inline(always)]
    pub(super) fn fetch(&self, [row, column]: [usize; 2], side: usize) {
        let end = self.width.min(column + side);
        for row in row..self.height.min(row + side) {
            let start = row * self.width;
            fetch(&self.values[(start + column.min(end)) * self.channels..(start + end) * self.channels]);
        }
    }
}

impl<'a> Patch<'a> {
    /// Returns the patch from `channel` on.
    #[inline(always)]
    pub(super) fn channel(&self, channel: usize) -> Patch<'a> {
        Patch { values: &self.values[channel..], ..*self }
    }
}

impl<S: Simd> VectorSource<S> for Patch<'_> {
    #[inline(always)]
    fn get(&self, row: usize, column: usize) -> S::f32s {
        load::<S>(&self.values[row * self.row_stride + column * self.channels..])
    }
}

/// A tile of an image of outputs, to which `bias` is added.
pub(super) struct OutputTile<'a, S: Simd> {
    pub(super) simd: S,
    /// The image from the tile's first element on.
    pub(super) values: &'a mut [f32],
    pub(super) row_stride: usize,
    pub(super) channels: usize,
    /// The rows and columns of the tile that are inside the image.
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) bias: S::f32s,
}

impl<S: Simd> VectorSink<S> for OutputTile<'_, S> {
    #[inline(always)]
    fn put(&mut self, row: usize, column: usize, vector: S::f32s) {
        if row < self.rows && column < self.columns {
            let into = &mut self.values[row * self.row_stride + column * self.channels..];
            store::<S>(into, self.simd.add_f32s(vector, self.bias));
        }
    }
}

/// Loads the first vector of `values`.
#[inline(always)]
pub(super) fn load<S: Simd>(values: &[f32]) -> S::f32s {
    S::as_simd_f32s(&values[..S::F32_LANES]).0[0]
}

/// Writes the first vector of `values`.
#[inline(always)]
pub(super) fn store<S: Simd>(values: &mut [f32], vector: S::f32s) {
    S::as_mut_simd_f32s(&mut values[..S::F32_LANES]).0[0] = vector;
}
