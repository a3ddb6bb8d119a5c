//! Contract of convolution layers, with pooling, ReLU and conversion to features in the same pass.

use super::activation::BiasShape;
use super::memory::MemoryOperations;
use super::row_sums::ParameterSums;

/// A convolution with a square kernel, `[outputs, channels, kernel, kernel]`, with optional pooling,
/// ReLU and conversion to features.
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
    /// The distance between the places of the kernel; 1 with pooling.
    pub stride: usize,
    /// The rows and columns of zeros around an image, on each side.
    pub padding: usize,
    /// True for 2 × 2 max-pooling of the outputs.
    pub pool: bool,
    /// True for ReLU of the (pooled) outputs.
    pub relu: bool,
    /// True if the outputs of an image are features in PyTorch's order, channels first; only with ReLU. They
    /// are an image, channels last, otherwise.
    pub flattens: bool,
}

impl ConvolutionShape {
    /// Returns the number of places of the kernel in `padded` rows or columns.
    fn places(&self, padded: usize) -> usize {
        (padded - self.kernel) / self.stride + 1
    }

    /// Returns the height of the output, after pooling.
    pub fn output_height(&self) -> usize {
        self.places(self.padded_height()) / self.window()
    }

    /// Returns the width of the output, after pooling.
    pub fn output_width(&self) -> usize {
        self.places(self.padded_width()) / self.window()
    }

    /// Returns the height of an image with the zeros around it.
    pub fn padded_height(&self) -> usize {
        self.height + 2 * self.padding
    }

    /// Returns the width of an image with the zeros around it.
    pub fn padded_width(&self) -> usize {
        self.width + 2 * self.padding
    }

    /// Returns the number of elements of one image with the zeros around it.
    pub fn padded_len(&self) -> usize {
        self.padded_height() * self.padded_width() * self.channels
    }

    /// Returns the number of elements of one image's `argmax`.
    pub fn argmax_len(&self) -> usize {
        if self.pool { self.output_len() } else { 0 }
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

    /// Returns the rows of the output, to which the bias is added.
    pub fn output_rows(&self) -> BiasShape {
        BiasShape { columns: self.outputs, positions: self.output_height() * self.output_width() }
    }

    /// Returns the number of elements of the weight.
    pub fn weight_len(&self) -> usize {
        self.outputs * self.channels * self.kernel * self.kernel
    }
}

/// Convolution (cross-correlation, as PyTorch's `Conv2d`), forward and backward.
pub trait ConvolutionOperations: MemoryOperations {
    /// Computes the convolution, with `bias` if there is one, then, as `shape` says, 2 × 2 max-pooling,
    /// ReLU and the conversion to features.
    ///
    /// With pooling, `argmax`, as long as `output`, receives the place of the maximum in each window, in
    /// the device's form; it is empty without.
    fn convolution_forward(
        &self,
        shape: &ConvolutionShape,
        input: Self::View<'_>,
        weight: Self::View<'_>,
        bias: Option<Self::View<'_>>,
        argmax: Self::ViewMut<'_>,
        output: Self::ViewMut<'_>,
    );

    /// Turns `gradient`, that of `output`, into what the other passes read, the gradient of the outputs
    /// before ReLU, in the order that the device prefers; only for shapes with ReLU, of which `rows` is not
    /// read. A device whose `argmax` says which outputs ReLU set to 0 may leave their gradients as they are:
    /// its other passes then take them for 0. Called once for a gradient.
    fn convolution_backward_relu(
        &self,
        shape: &ConvolutionShape,
        output: Self::View<'_>,
        gradient: Self::ViewMut<'_>,
    );

    /// Adds up the gradients of the weight and of the bias from `gradient`, that of
    /// the outputs, or, with ReLU, what [`ConvolutionOperations::convolution_backward_relu`] made of it.
    fn convolution_backward_weight(
        &self,
        shape: &ConvolutionShape,
        input: Self::View<'_>,
        argmax: Self::View<'_>,
        gradient: Self::View<'_>,
        sums: impl ParameterSums<Self>,
    );

    /// Computes the gradient of the inputs from `gradient`, that of
    /// the outputs, or, with ReLU, what [`ConvolutionOperations::convolution_backward_relu`] made of it.
    fn convolution_backward_input(
        &self,
        shape: &ConvolutionShape,
        weight: Self::View<'_>,
        argmax: Self::View<'_>,
        gradient: Self::View<'_>,
        input_gradient: Self::ViewMut<'_>,
    );
}
