//! Contract of pooling on its own, for networks whose pooling does not follow a convolution.

use super::memory::MemoryOperations;

/// Windows of images.
#[derive(Debug, Clone, Copy)]
pub struct PoolShape {
    /// Images.
    pub rows: usize,
    /// Height of the input.
    pub height: usize,
    /// Width of the input.
    pub width: usize,
    /// Channels.
    pub channels: usize,
    /// Height of the window.
    pub window_height: usize,
    /// Width of the window.
    pub window_width: usize,
    /// Distance between windows from top to bottom.
    pub stride_height: usize,
    /// Distance between windows from left to right.
    pub stride_width: usize,
    /// Rows and columns around the image that windows reach into, at most half a window: a maximum ignores
    /// them, and a mean takes them for zeros.
    pub padding: usize,
}

impl PoolShape {
    /// Returns the shape with one window, the whole image; `rows` is 0.
    pub fn whole(height: usize, width: usize, channels: usize) -> PoolShape {
        PoolShape {
            rows: 0,
            height,
            width,
            channels,
            window_height: height,
            window_width: width,
            stride_height: height,
            stride_width: width,
            padding: 0,
        }
    }

    /// Returns the number of windows from top to bottom. Incomplete windows at the bottom edge are left
    /// out.
    pub fn output_height(&self) -> usize {
        (self.height + 2 * self.padding - self.window_height) / self.stride_height + 1
    }

    /// Returns the number of windows from left to right. Incomplete windows at the right edge are left
    /// out.
    pub fn output_width(&self) -> usize {
        (self.width + 2 * self.padding - self.window_width) / self.stride_width + 1
    }

    /// Returns the number of elements of one input image.
    pub fn image_len(&self) -> usize {
        self.height * self.width * self.channels
    }

    /// Returns the number of elements of one output image.
    pub fn output_len(&self) -> usize {
        self.output_height() * self.output_width() * self.channels
    }

    /// Returns the number of elements of a window, of one channel.
    pub fn window_len(&self) -> usize {
        self.window_height * self.window_width
    }
}

/// Maxima and means over windows, forward and backward.
pub trait PoolOperations: MemoryOperations {
    /// Computes the maximum over each window. `argmax` receives the place of the maximum in its window.
    fn max_pool_forward(
        &self,
        shape: &PoolShape,
        input: Self::View<'_>,
        argmax: Self::ViewMut<'_>,
        output: Self::ViewMut<'_>,
    );

    /// Computes the gradient of the inputs of maxima.
    fn max_pool_backward(
        &self,
        shape: &PoolShape,
        argmax: Self::View<'_>,
        gradient: Self::View<'_>,
        input_gradient: Self::ViewMut<'_>,
    );

    /// Computes the mean over each window.
    fn average_pool_forward(&self, shape: &PoolShape, input: Self::View<'_>, output: Self::ViewMut<'_>);

    /// Computes the gradient of the inputs of means.
    fn average_pool_backward(
        &self,
        shape: &PoolShape,
        gradient: Self::View<'_>,
        input_gradient: Self::ViewMut<'_>,
    );
}
