//! Memory of convolutions: images with zeros around them.

use super::blocks::SparseGradient;
use crate::device::ConvolutionShape;
use crate::memory::scratch::Room;

/// Memory that operations reuse. A room begins with a cache line, of which a vector of an image with a
/// multiple of 16 channels then takes one and not two.
#[derive(Default)]
pub(super) struct ConvolutionScratch {
    /// The weights in the order of an operation.
    pub(super) packed: Room,
    /// An image with zeros around it.
    pub(super) image: Room,
    pub(super) nonzero: Vec<SparseGradient>,
    pub(super) lengths: Vec<usize>,
    /// The coefficients of kernels and tiles, and their products.
    pub(super) coefficients: Room,
}

/// Copies an image into one with zeros around it, which are there already.
pub(super) fn pad(shape: &ConvolutionShape, image: &[f32], padded: &mut [f32]) {
    rows_inside(shape, padded).zip(image.chunks_exact(shape.width * shape.channels)).for_each(
        |(into, from)| {
            into.copy_from_slice(from);
        },
    );
}

/// Returns the rows of the image that `padded` has inside.
pub(super) fn rows_inside<'a>(
    shape: &ConvolutionShape,
    padded: &'a mut [f32],
) -> impl Iterator<Item = &'a mut [f32]> {
    let ConvolutionShape { channels, width, padding, .. } = *shape;
    let inside = padding * channels..(padding + width) * channels;
    let rows = padded.chunks_exact_mut(shape.padded_width() * channels).skip(padding).take(shape.height);
    rows.map(move |row| &mut row[inside.clone()])
}
