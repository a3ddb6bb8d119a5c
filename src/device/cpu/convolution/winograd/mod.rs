//! Convolution with 3 × 3 kernels by minimal filtering: F(4 × 4, 3 × 3) of Lavin & Gray, "Fast algorithms for
//! convolutional neural networks", CVPR 2016 (S. Winograd, 1980).
//!
//! The outputs are cut into tiles of 4 × 4, each of which needs 6 × 6 inputs. A tile is
//! Aᵀ ((G g Gᵀ) ⊙ (Bᵀ d B)) A, with kernel g and inputs d: 36 multiplications for each pair of channels in
//! place of 144. Over channels and tiles, each of the 36 coefficients is a matrix product:
//!
//! * forward, M = V · U, with the transformed inputs V `[tiles, channels]`, and the transformed weights U
//!   `[channels, outputs]`; the gradient of the inputs is the same with the kernel turned;
//! * for the gradient of the weights, Vᵀ · D with D = A (∂y) Aᵀ `[tiles, outputs]`, over the tiles of one
//!   image, and then Gᵀ · G of the result. Images are added up in the canonical order of weights.
//!
//! An output depends on its own image alone, and its bits on no division of the batch or among threads.
//! Rounding errors are two to three times those of the direct loops.

mod forward;
mod image;
mod products;
mod transform;
mod weight_gradient;

pub(super) use forward::WinogradForward;
pub(super) use weight_gradient::WinogradWeightGradient;

use super::backward::is_dense;
use crate::device::ConvolutionShape;

/// Height and width of a tile of outputs.
const TILE: usize = 4;

/// Height and width of the kernel.
const KERNEL: usize = 3;

/// Places of the kernel.
const PLACES: usize = KERNEL * KERNEL;

/// Height and width of the inputs of a tile, and of its coefficients.
const SIDE: usize = TILE + KERNEL - 1;

/// Coefficients of a tile.
const COEFFICIENTS: usize = SIDE * SIDE;

/// Numbers of channels have to be multiples of this: the most lanes of a vector, on every machine.
pub(super) const CHANNEL_MULTIPLE: usize = 16;

/// Returns true for a convolution to which this is applied: its transforms then cost less than they save.
pub(super) fn applies(shape: &ConvolutionShape) -> bool {
    let is_whole = |channels: usize| channels.is_multiple_of(CHANNEL_MULTIPLE);
    let num_outputs = shape.output_height() * shape.output_width();
    shape.kernel == KERNEL
        && shape.stride == 1
        && is_dense(shape)
        && is_whole(shape.channels)
        && is_whole(shape.outputs)
        && Tiles::of(shape).of_image() * TILE * TILE <= 2 * num_outputs
}

/// The tiles of an image, row by row.
#[derive(Clone, Copy)]
struct Tiles {
    /// Rows and columns of tiles of an image.
    rows: usize,
    columns: usize,
}

impl Tiles {
    fn of(shape: &ConvolutionShape) -> Tiles {
        Tiles { rows: shape.output_height().div_ceil(TILE), columns: shape.output_width().div_ceil(TILE) }
    }

    /// Returns the number of tiles of an image.
    fn of_image(self) -> usize {
        self.rows * self.columns
    }

    /// Returns a tile's image, and the row and column of its first output.
    #[inline(always)]
    fn place(self, tile: usize) -> (usize, [usize; 2]) {
        let (image, tile) = (tile / self.of_image(), tile % self.of_image());
        (image, [tile / self.columns * TILE, tile % self.columns * TILE])
    }
}
