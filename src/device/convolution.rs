//! Contract of convolution layers, with pooling and ReLU in the same pass.

use super::memory::MemoryOperations;
use super::row_sums::RowSums;

/// A convolution with a square kernel, `[outputs, channels, kernel, kernel]`, with optional pooling
/// and ReLU.
#[derive(Debug, Clone, Copy)]
pub struct ConvolutionShape {
    /// Images.
    pub rows: usize,
    /// Input channels.
    pub channels: usize,
    /// Height of the input.
    pub height: usize,
    /// Width of the input.
    pub width: usize,
    /// Output channels.
    pub outputs: usize,
    /// Height and width of the kernel.
    pub kernel: usize,
    /// True for 2 × 2 max-pooling of the outputs.
    pub pool: bool,
    /// True for ReLU of the (pooled) outputs.
    pub relu: bool,
}

impl ConvolutionShape {
    /// Returns the height of the output, after pooling.
    pub fn output_height(&self) -> usize {
        (self.height + 1 - self.kernel) / self.window()
    }

    /// Returns the width of the output, after pooling.
    pub fn output_width(&self) -> usize {
        (self.width + 1 - self.kernel) / self.window()
    }

    /// Returns the height and width of the pooling window: 1 without pooling.
    pub fn window(&self) -> usize {
        1 + usize::from(self.pool)
    }

    /// Returns the number of elements of one input image.
    pub fn image_len(&self) -> usize {
        self.height * self.width * self.channels
    }

    /// Returns the number of elements of one output image.
    pub fn output_len(&self) -> usize {
        self.output_height() * self.output_width() * self.outputs
    }

    /// Returns the number of elements of the weight.
    pub fn weight_len(&self) -> usize {
        self.outputs * self.channels * self.kernel * self.kernel
    }
}

/// Convolution (valid, stride 1, cross-correlation), forward and backward.
pub trait ConvolutionOperations: MemoryOperations {
    /// Computes the convolution with bias, then, as `shape` says, 2 × 2 max-pooling and ReLU.
    ///
    /// `argmax`, of the shape of `output`, receives the place of the maximum in each pooling
    /// window, 0 to 3 in reading order.
    fn convolution_forward(
        &self,
        shape: &ConvolutionShape,
        input: Self::View<'_>,
        weight: Self::View<'_>,
        bias: Self::View<'_>,
        argmax: Self::ViewMut<'_>,
        output: Self::ViewMut<'_>,
    );

    /// Adds up the gradient of the weights from `gradient`, the gradient of the outputs before ReLU.
    fn convolution_backward_weight(
        &self,
        shape: &ConvolutionShape,
        input: Self::View<'_>,
        argmax: Self::View<'_>,
        gradient: Self::View<'_>,
        weight_gradient: RowSums<Self::ViewMut<'_>>,
    );

    /// Computes the gradient of the inputs from `gradient`, the gradient of the outputs before
    /// ReLU.
    fn convolution_backward_input(
        &self,
        shape: &ConvolutionShape,
        weight: Self::View<'_>,
        argmax: Self::View<'_>,
        gradient: Self::View<'_>,
        input_gradient: Self::ViewMut<'_>,
    );
}
