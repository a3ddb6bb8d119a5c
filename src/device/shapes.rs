//! The sizes and settings that operations take, the same for every device.

/// An elementwise function after a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// x
    Identity,
    /// max(x, 0)
    Relu,
    /// x · Φ(x), with the exact normal distribution function (erf), as PyTorch's default
    Gelu,
    /// tanh(x)
    Tanh,
}

impl Activation {
    /// True if the backward pass cannot do with the outputs alone: the forward pass then saves the derivative, or what the device
    /// makes it of.
    pub fn saves(self) -> bool {
        self == Activation::Gelu
    }
}

/// How a weight matrix lies in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightLayout {
    /// `[outputs, inputs]`, PyTorch's `Linear`: y = x · Wᵀ.
    OutputsByInputs,
    /// `[inputs, outputs]`: y = x · W.
    InputsByOutputs,
}

/// A block of a matrix, to be copied into another.
#[derive(Debug, Clone, Copy)]
pub struct BlockShape {
    /// Rows of the block.
    pub rows: usize,
    /// Columns of the block.
    pub columns: usize,
    /// Elements from row to row where it is read.
    pub from_stride: usize,
    /// Elements from row to row where it is written.
    pub into_stride: usize,
}

/// A product of a batch with a weight matrix.
#[derive(Debug, Clone, Copy)]
pub struct LinearShape {
    /// Rows of the batch.
    pub rows: usize,
    /// Features in.
    pub inputs: usize,
    /// Features out.
    pub outputs: usize,
    /// How the weight lies.
    pub layout: WeightLayout,
}

/// A convolution with a square kernel, `[outputs, channels, kernel, kernel]`, perhaps with pooling and ReLU.
#[derive(Debug, Clone, Copy)]
pub struct ConvolutionShape {
    /// Images.
    pub rows: usize,
    /// Channels in.
    pub channels: usize,
    /// Height of the input.
    pub height: usize,
    /// Width of the input.
    pub width: usize,
    /// Channels out.
    pub outputs: usize,
    /// Height and width of the kernel.
    pub kernel: usize,
    /// 2 × 2 max-pooling of the outputs.
    pub pool: bool,
    /// ReLU of the (pooled) outputs.
    pub relu: bool,
}

impl ConvolutionShape {
    /// Height of the output, pooled if it is pooled.
    pub fn output_height(&self) -> usize {
        (self.height + 1 - self.kernel) / self.window()
    }

    /// Width of the output, pooled if it is pooled.
    pub fn output_width(&self) -> usize {
        (self.width + 1 - self.kernel) / self.window()
    }

    /// Height and width of the square of convolution outputs that one output is the maximum of.
    pub fn window(&self) -> usize {
        1 + usize::from(self.pool)
    }

    /// Elements of one input image.
    pub fn image_len(&self) -> usize {
        self.height * self.width * self.channels
    }

    /// Elements of one output image.
    pub fn output_len(&self) -> usize {
        self.output_height() * self.output_width() * self.outputs
    }

    /// Elements of the weight.
    pub fn weight_len(&self) -> usize {
        self.outputs * self.channels * self.kernel * self.kernel
    }
}

/// A maximum over windows.
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

/// A batch of outputs to be judged.
#[derive(Debug, Clone, Copy)]
pub struct LossShape {
    /// Rows of the batch.
    pub rows: usize,
    /// Classes, or outputs.
    pub columns: usize,
    /// What each row's gradient is multiplied by: 1 / the number of rows of the whole global batch, so that the sum over
    /// micro-batches and ranks is the gradient of the mean.
    pub scale: f32,
}

/// One step of stochastic gradient descent, as `torch.optim.SGD` defines it.
#[derive(Debug, Clone, Copy)]
pub struct SgdStep {
    /// Decay of the momentum buffer; 0 for none.
    pub momentum: f32,
    /// Nesterov's momentum.
    pub nesterov: bool,
    /// Added to the gradient: `weight_decay · parameter`.
    pub weight_decay: f32,
}

/// One step of Adam (Kingma and Ba, 2015), or of AdamW (Loshchilov and Hutter, 2019), as `torch.optim` defines them.
#[derive(Debug, Clone, Copy)]
pub struct AdamStep {
    /// Decay rate of the first moment.
    pub beta1: f64,
    /// Decay rate of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub epsilon: f32,
    /// Weight decay: decoupled (AdamW) or added to the gradient (Adam).
    pub weight_decay: f32,
    /// AdamW.
    pub decoupled: bool,
}
