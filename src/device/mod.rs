//! Arithmetic: the complete list of operations that training needs, as one trait, and the devices that do them.
//!
//! Operations are as coarse as a fused kernel, write into buffers that the caller allocated once, and at steady
//! state allocate nothing but what starting several threads takes. Arrays are dense and row-major. Images travel *channels last*, `[rows, height, width, channels]`,
//! between layers, so that the innermost loop of a convolution runs over consecutive memory whatever the image's width;
//! [`Device::transpose_each`] turns them to channels first where a `Linear` layer with PyTorch's weight order follows.
//!
//! `cpu/` is the plain truth that `cuda/` is tested against, file by file under the same names. Operations of a GPU only begin when
//! they are called, so they return nothing; what goes wrong is returned by the next transfer to or from the host.
//!
//! Nothing here knows what a layer, a parameter name or a rank is. `cpu/matmul.rs` is the only place that names `gemm`, `cuda/`
//! the only one that names CUDA.

use std::ops::Range;

use crate::Result;
use crate::memory::Buffer;

mod cpu;
pub mod cuda;
mod shapes;

pub use cpu::{Cpu, flush_subnormals};
pub use cuda::{Cuda, CudaBuffer, Precision};
pub use shapes::{
    Activation, AdamStep, BlockShape, ConvolutionShape, LinearShape, LossShape, PoolShape, SgdStep,
    WeightLayout,
};

/// Where in the totals buffer a step's sums are: see [`Device::cross_entropy`] and [`Device::adam_step`].
pub mod totals {
    /// Sum over rows of the loss.
    pub const LOSS: usize = 0;
    /// Number of rows whose largest output is their label's.
    pub const CORRECT: usize = 1;
    /// Sum of the squares of all gradient elements that the optimizer read.
    pub const GRADIENT_SQUARES: usize = 2;
    /// The length of the buffer.
    pub const LEN: usize = 3;
}

/// What changes of an optimizer from step to step. It lies in the device's memory, so that all other operations of a step are the
/// same each time and can be recorded.
pub mod update {
    /// Learning rate.
    pub const LEARNING_RATE: usize = 0;
    /// The gradient is multiplied by this first (clipping).
    pub const GRADIENT_SCALE: usize = 1;
    /// 1 − β₁ᵗ, for Adam.
    pub const BIAS_CORRECTION1: usize = 2;
    /// 1 − β₂ᵗ, for Adam.
    pub const BIAS_CORRECTION2: usize = 3;
    /// The length of the buffer.
    pub const LEN: usize = 4;
}

/// What memory is for, from which a device chooses how it keeps the values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// What the optimizer changes and products read: `f32`, beside which there may be a copy in the precision of products.
    Parameters,
    /// What layers hand on, and its gradients: in the precision of products.
    Activations,
    /// All else: `f32`.
    Exact,
}

/// A place to compute. Not one of its operations is collective. What has a default is for devices that do more at once, or later, than
/// they are told to.
pub trait Device {
    /// Memory for values on the device.
    type Buffer: Buffer;
    /// A range of a buffer, to read.
    type View<'a>: Copy;
    /// A range of a buffer, to write.
    type ViewMut<'a>;
    /// A step's sums on their way to the host.
    type Totals;
    /// Operations that were started together and can be started again as one.
    type Recording;

    /// Zeroed memory for `len` elements, to be used as `role` says.
    ///
    /// # Errors
    /// The device has not that much memory left.
    fn allocate(&self, len: usize, role: Role) -> Result<Self::Buffer>;

    /// The range `range` of `buffer`, to read.
    fn view<'a>(&self, buffer: &'a Self::Buffer, range: Range<usize>) -> Self::View<'a>;

    /// The range `range` of `buffer`, to write.
    fn view_mut<'a>(&self, buffer: &'a mut Self::Buffer, range: Range<usize>) -> Self::ViewMut<'a>;

    /// Lets `fill` write `into` from the host.
    ///
    /// # Errors
    /// What `fill` returns, or the transfer failed.
    fn write(&self, into: Self::ViewMut<'_>, fill: &mut dyn FnMut(&mut [f32]) -> Result<()>) -> Result<()>;

    /// Lets `look` read `from` on the host, when all operations so far are done.
    ///
    /// # Errors
    /// What `look` returns, or the transfer failed.
    fn read(&self, from: Self::View<'_>, look: &mut dyn FnMut(&[f32]) -> Result<()>) -> Result<()>;

    /// Starts reading a step's sums (see [`totals`]) as they are when all operations so far are done.
    ///
    /// # Errors
    /// The transfer failed.
    fn start_totals(&self, sums: Self::View<'_>) -> Result<Self::Totals>;

    /// Waits for a step's sums.
    ///
    /// # Errors
    /// An operation or the transfer failed.
    fn finish_totals(&self, reading: Self::Totals) -> Result<[f32; totals::LEN]>;

    /// Waits until all operations so far are done.
    fn wait(&self) {}

    /// True if operations only start here and are done later: the host should then begin with the next step before it asks what
    /// came of the last.
    fn is_asynchronous(&self) -> bool {
        false
    }

    /// Bytes that samples may take to stay on the device; 0 if they should not.
    fn room_for_samples(&self) -> usize {
        0
    }

    /// Does `work`, which starts the same operations on the same memory each time, reads and writes nothing for the host, and leaves all
    /// else as it found it. A device that can records them and from then on starts the recording instead.
    ///
    /// # Errors
    /// What `work` returns, or the recording failed.
    fn repeat(
        &self,
        _recording: &mut Option<Self::Recording>,
        work: &mut dyn FnMut() -> Result<()>,
    ) -> Result<()> {
        work()
    }

    /// Row i of `into` becomes the row of `table` whose number is the bits of `numbers[i]`; rows have `columns` elements.
    /// Nothing happens where `into` is empty.
    fn gather_rows(
        &self,
        columns: usize,
        table: Self::View<'_>,
        numbers: Self::View<'_>,
        into: Self::ViewMut<'_>,
    );

    /// Sets every element to `value`.
    fn fill(&self, into: Self::ViewMut<'_>, value: f32);

    /// `into = from`; lengths are equal.
    fn copy(&self, from: Self::View<'_>, into: Self::ViewMut<'_>);

    /// Copies a block of `shape.rows × shape.columns` from one row-major matrix into another; the views begin where the block
    /// does.
    fn copy_block(&self, shape: &BlockShape, from: Self::View<'_>, into: Self::ViewMut<'_>);

    /// `output = activation(input · W + bias)`, `[rows, outputs]`. `saved` (same shape) receives what
    /// [`Device::backward_activation`] will want if [`Activation::saves`]; else it may be empty.
    #[allow(clippy::too_many_arguments)] // one argument for each array of the formula
    fn linear_forward(
        &self,
        shape: &LinearShape,
        input: Self::View<'_>,
        weight: Self::View<'_>,
        bias: Option<Self::View<'_>>,
        activation: Activation,
        saved: Self::ViewMut<'_>,
        output: Self::ViewMut<'_>,
    );

    /// `weight_gradient (+)= inputᵀ · gradient` in the layout of the weight; added where `accumulate`.
    fn linear_backward_weight(
        &self,
        shape: &LinearShape,
        input: Self::View<'_>,
        gradient: Self::View<'_>,
        weight_gradient: Self::ViewMut<'_>,
        accumulate: bool,
    );

    /// `input_gradient = gradient · Wᵀ`, `[rows, inputs]`; with `before`, a [fused](Device::fuses_backward) activation and what it
    /// saved, that before the activation.
    fn linear_backward_input(
        &self,
        shape: &LinearShape,
        gradient: Self::View<'_>,
        weight: Self::View<'_>,
        input_gradient: Self::ViewMut<'_>,
        before: Option<(Activation, Self::View<'_>)>,
    );

    /// True if [`Device::linear_backward_input`] should go back through an activation before it in the same pass.
    fn fuses_backward(&self, _activation: Activation) -> bool {
        false
    }

    /// `output = activation(input)`, elementwise; `saved` as in [`Device::linear_forward`].
    fn activation_forward(
        &self,
        activation: Activation,
        input: Self::View<'_>,
        saved: Self::ViewMut<'_>,
        output: Self::ViewMut<'_>,
    );

    /// Turns `gradient`, `[rows, columns]`, from the gradient after the activation into that before it, and sums it over
    /// the rows into `bias_gradient` if there is one (added where `accumulate`). `saved` is what the forward pass left
    /// there if [`Activation::saves`], else its output.
    fn backward_activation(
        &self,
        activation: Activation,
        columns: usize,
        saved: Self::View<'_>,
        gradient: Self::ViewMut<'_>,
        bias_gradient: Option<Self::ViewMut<'_>>,
        accumulate: bool,
    );

    /// Convolution (valid, stride 1, cross-correlation) with bias, then, as `shape` says, 2 × 2 max-pooling and ReLU in
    /// the same pass. `route` has the shape of `output` and remembers which of its four inputs each pooled output took.
    fn convolution_forward(
        &self,
        shape: &ConvolutionShape,
        input: Self::View<'_>,
        weight: Self::View<'_>,
        bias: Self::View<'_>,
        route: Self::ViewMut<'_>,
        output: Self::ViewMut<'_>,
    );

    /// `weight_gradient (+)=` the gradient of [`Device::convolution_forward`]'s weights, given that of its outputs before
    /// ReLU (see [`Device::backward_activation`]).
    fn convolution_backward_weight(
        &self,
        shape: &ConvolutionShape,
        input: Self::View<'_>,
        route: Self::View<'_>,
        gradient: Self::View<'_>,
        weight_gradient: Self::ViewMut<'_>,
        accumulate: bool,
    );

    /// The gradient of [`Device::convolution_forward`]'s inputs, given that of its outputs before ReLU.
    fn convolution_backward_input(
        &self,
        shape: &ConvolutionShape,
        weight: Self::View<'_>,
        route: Self::View<'_>,
        gradient: Self::View<'_>,
        input_gradient: Self::ViewMut<'_>,
    );

    /// Maximum over windows of `size × size`, stride `size`; a rest at the right and bottom edge is left out. `route`
    /// remembers the place of the maximum in its window.
    fn max_pool_forward(
        &self,
        shape: &PoolShape,
        input: Self::View<'_>,
        route: Self::ViewMut<'_>,
        output: Self::ViewMut<'_>,
    );

    /// The gradient of [`Device::max_pool_forward`]'s inputs.
    fn max_pool_backward(
        &self,
        shape: &PoolShape,
        route: Self::View<'_>,
        gradient: Self::View<'_>,
        input_gradient: Self::ViewMut<'_>,
    );

    /// Transposes each of `input`'s matrices of `rows × columns`.
    fn transpose_each(&self, rows: usize, columns: usize, input: Self::View<'_>, output: Self::ViewMut<'_>);

    /// Softmax and cross-entropy of `logits`, `[rows, columns]`, with the class numbers in `labels`, `[rows]`:
    /// `gradient = scale · (softmax − one-hot)`, and adds the rows' losses and correct guesses to `sums` (see [`totals`]).
    fn cross_entropy(
        &self,
        shape: &LossShape,
        logits: Self::View<'_>,
        labels: Self::View<'_>,
        gradient: Self::ViewMut<'_>,
        sums: Self::ViewMut<'_>,
    );

    /// The mean over columns of `(output − target)²` for each row, with gradient and sums as in [`Device::cross_entropy`].
    /// Without targets they count as zero: the mean of squares.
    fn mean_squared_error(
        &self,
        shape: &LossShape,
        output: Self::View<'_>,
        targets: Option<Self::View<'_>>,
        gradient: Self::ViewMut<'_>,
        sums: Self::ViewMut<'_>,
    );

    /// One step of stochastic gradient descent over flat slices; adds the gradient's squares to `sums`. `momentum` is as
    /// long as the parameters, or empty if the momentum is 0; for `update` see [`update`].
    fn sgd_step(
        &self,
        step: &SgdStep,
        update: Self::View<'_>,
        parameters: Self::ViewMut<'_>,
        gradients: Self::View<'_>,
        momentum: Self::ViewMut<'_>,
        sums: Self::ViewMut<'_>,
    );

    /// One step of Adam or AdamW over flat slices, with the first and second moments; adds the gradient's squares to
    /// `sums`.
    fn adam_step(
        &self,
        step: &AdamStep,
        update: Self::View<'_>,
        parameters: Self::ViewMut<'_>,
        gradients: Self::View<'_>,
        moments: [Self::ViewMut<'_>; 2],
        sums: Self::ViewMut<'_>,
    );

    /// Adds the squares of `values` to `sums[totals::GRADIENT_SQUARES]`.
    fn sum_squares(&self, values: Self::View<'_>, sums: Self::ViewMut<'_>);
}
