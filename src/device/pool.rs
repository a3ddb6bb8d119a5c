//! Contract of max-pooling on its own, for networks whose pooling does not follow a convolution.

use super::memory::MemoryOperations;

/// A maximum over square windows whose stride is their size.
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
    /// Height, width and stride of the window.
    pub size: usize,
}

/// Max-pooling, forward and backward.
pub trait PoolOperations: MemoryOperations {
    /// Computes the maximum over windows of `size × size`; incomplete windows at the right and
    /// bottom edges are left out. `argmax` receives the place of the maximum in its window.
    fn max_pool_forward(
        &self,
        shape: &PoolShape,
        input: Self::View<'_>,
        argmax: Self::ViewMut<'_>,
        output: Self::ViewMut<'_>,
    );

    /// Computes the gradient of the inputs.
    fn max_pool_backward(
        &self,
        shape: &PoolShape,
        argmax: Self::View<'_>,
        gradient: Self::View<'_>,
        input_gradient: Self::ViewMut<'_>,
    );
}
