//! Images, channels last, from which tiles are read and to which they are written.

use pulp::Simd;

use super::transform::{Transform, VectorSink, VectorSource};
use super::{TILE, Tiles};
use crate::device::ConvolutionShape;
use crate::device::cpu::fetch::fetch;

/// The images of a batch.
#[derive(Clone, Copy)]
pub(super) struct Images<'a> {
    values: &'a [f32],
    height: usize,
    width: usize,
    channels: usize,
    tiles: Tiles,
}

impl<'a> Images<'a> {
    /// Returns the inputs of a convolution.
    #[inline(always)]
    pub(super) fn inputs(shape: &ConvolutionShape, values: &'a [f32]) -> Images<'a> {
        let ConvolutionShape { height, width, channels, .. } = *shape;
        Images { values, height, width, channels, tiles: Tiles::of(shape) }
    }

    /// Returns the outputs of a convolution, or their gradients.
    #[inline(always)]
    pub(super) fn outputs(shape: &ConvolutionShape, values: &'a [f32]) -> Images<'a> {
        let [height, width] = [shape.output_height(), shape.output_width()];
        Images { values, height, width, channels: shape.outputs, tiles: Tiles::of(shape) }
    }

    /// Returns the square of places of a tile, which begins `padding` rows and columns before the tile.
    #[inline(always)]
    pub(super) fn square<S: Simd>(&self, tile: usize, padding: usize) -> Square<'a, S> {
        let Images { height, width, .. } = *self;
        let (image, place) = self.tiles.place(tile);
        let [row, column] = place.map(|place| place.wrapping_sub(padding));
        let vectors = self.channels / S::F32_LANES;
        Square {
            values: S::as_simd_f32s(self.values).0,
            start: (image * height * width)
                .wrapping_add(row.wrapping_mul(width))
                .wrapping_add(column)
                .wrapping_mul(vectors),
            row_stride: width * vectors,
            column_stride: vectors,
            row,
            column,
            height,
            width,
        }
    }

    /// Asks for the places of a tile, as far as they exist: tiles are read and written in an order that
    /// the processor does not foresee.
    #[inline(always)]
    pub(super) fn fetch(&self, tile: usize) {
        let Images { values, height, width, channels, .. } = *self;
        let (image, [row, column]) = self.tiles.place(tile);
        let end = width.min(column + TILE);
        for row in row..height.min(row + TILE) {
            let start = (image * height + row) * width;
            fetch(&values[(start + column.min(end)) * channels..(start + end) * channels]);
        }
    }
}

/// A square of places of an image, some of which may be outside of it.
#[derive(Clone, Copy)]
pub(super) struct Square<'a, S: Simd> {
    /// The vectors of the batch.
    values: &'a [S::f32s],
    /// The first vector of the first place, which wraps around zero.
    start: usize,
    /// Vectors from a row to the next, and from a place to the next.
    row_stride: usize,
    column_stride: usize,
    /// The first place, which wraps around zero.
    row: usize,
    column: usize,
    /// Those of the image.
    height: usize,
    width: usize,
}

impl<S: Simd> Square<'_, S> {
    /// Transforms the vector number `vector` of each of `FROM × FROM` places.
    #[inline(always)]
    pub(super) fn transform<T, const FROM: usize, const INTO: usize>(
        self,
        simd: S,
        vector: usize,
        into: &mut impl VectorSink<S>,
    ) where
        T: Transform<FROM, INTO>,
    {
        let square = Square { start: self.start.wrapping_add(vector), ..self };
        let is_inside = |first: usize, len: usize| first < len && first + FROM <= len;
        if is_inside(self.row, self.height) && is_inside(self.column, self.width) {
            T::square(simd, &Inside(square), into);
        } else {
            T::square(simd, &Bordered(simd, square), into);
        }
    }

    /// Returns the number of a place's vector.
    #[inline(always)]
    fn at(&self, row: usize, column: usize) -> usize {
        self.start.wrapping_add(row * self.row_stride + column * self.column_stride)
    }

    /// Returns whether a place is inside the image.
    #[inline(always)]
    fn has(&self, row: usize, column: usize) -> bool {
        self.row.wrapping_add(row) < self.height && self.column.wrapping_add(column) < self.width
    }
}

/// A vector of each place of a square that is inside the image.
struct Inside<'a, S: Simd>(Square<'a, S>);

impl<S: Simd> VectorSource<S> for Inside<'_, S> {
    #[inline(always)]
    fn get(&self, row: usize, column: usize) -> S::f32s {
        self.0.values[self.0.at(row, column)]
    }
}

/// A vector of each place of a square, with zeros outside of the image.
struct Bordered<'a, S: Simd>(S, Square<'a, S>);

impl<S: Simd> VectorSource<S> for Bordered<'_, S> {
    #[inline(always)]
    fn get(&self, row: usize, column: usize) -> S::f32s {
        let Bordered(simd, square) = self;
        if square.has(row, column) { square.values[square.at(row, column)] } else { simd.splat_f32s(0.0) }
    }
}

/// A vector of each place of a tile of outputs, to which `bias` is added.
pub(super) struct OutputTile<'a, S: Simd> {
    pub(super) simd: S,
    /// The vectors of the batch.
    pub(super) values: &'a mut [S::f32s],
    /// That of the first place.
    pub(super) start: usize,
    /// Vectors from a row to the next, and from a place to the next.
    pub(super) row_stride: usize,
    pub(super) column_stride: usize,
    /// The rows and columns of the tile that are inside the image.
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) bias: S::f32s,
}

impl<S: Simd> VectorSink<S> for OutputTile<'_, S> {
    #[inline(always)]
    fn put(&mut self, row: usize, column: usize, vector: S::f32s) {
        if row < self.rows && column < self.columns {
            let at = self.start + row * self.row_stride + column * self.column_stride;
            self.values[at] = self.simd.add_f32s(vector, self.bias);
        }
    }
}
