//! The layers that a device runs. Each stands for one or several modules of a network, fused as the
//! device's operations are.

use smallvec::SmallVec;

use super::parameters::FlatBuffer;
use super::{Features, Initial, TensorSpec};
use crate::device::{
    Activation, BiasShape, ConvolutionShape, Device, FusedActivation, LinearShape, PoolShape, WeightLayout,
    WeightOperands,
};
use crate::sums::Section;

/// A layer, with the indices of its tensors in the model's logical order.
#[derive(Debug, Clone)]
pub enum Layer {
    /// A linear layer and the activation that follows it.
    Linear {
        /// Features per input row.
        inputs: usize,
        /// Features per output row.
        outputs: usize,
        /// The memory layout of the weight.
        layout: WeightLayout,
        /// The input features as terms of canonical sums: see [`crate::sums`].
        input_terms: Section,
        /// The output features as terms of canonical sums.
        output_terms: Section,
        /// The activation that follows.
        activation: Activation,
        /// Index of the weight tensor.
        weight: usize,
        /// Index of the bias tensor.
        bias: Option<usize>,
    },
    /// A convolution and the pooling and ReLU that follow it.
    Convolution {
        /// The sizes of the convolution; `rows` is 0 here.
        shape: ConvolutionShape,
        /// Index of the weight tensor; the bias tensor is the next one.
        weight: usize,
    },
    /// Max-pooling on its own.
    MaxPool(PoolShape),
    /// An activation on its own.
    Activation(Activation, Features),
    /// Converts an image, channels last, to features in PyTorch's order, channels first.
    Flatten {
        /// Height times width.
        positions: usize,
        /// Number of channels.
        channels: usize,
    },
}

/// The arrays of one layer's forward pass that its backward pass reads.
pub struct Tape<'a, D: Device> {
    /// The layer's input, `[rows, input_len]`.
    pub input: D::View<'a>,
    /// The values saved by the forward pass, `[rows, saved_len]`.
    pub saved: D::View<'a>,
    /// The layer's output, `[rows, output_len]`.
    pub output: D::View<'a>,
}

impl<D: Device> Clone for Tape<'_, D> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<D: Device> Copy for Tape<'_, D> {}

/// The rows of a micro-batch, from which gradients of weights are computed.
pub struct TapedRows<'a, D: Device> {
    /// The arrays of the forward pass.
    pub tape: Tape<'a, D>,
    /// The gradient of the values before the activation, as [`Layer::backward_activation`] leaves it.
    pub gradient: D::View<'a>,
    /// The rows among those of the batch.
    pub section: Section,
}

impl Layer {
    /// Returns the number of input values per row.
    pub fn input_len(&self) -> usize {
        match self {
            Layer::Linear { inputs, .. } => *inputs,
            Layer::Convolution { shape, .. } => shape.image_len(),
            Layer::MaxPool(shape) => shape.height * shape.width * shape.channels,
            Layer::Activation(_, features) => features.len(),
            Layer::Flatten { positions, channels } => positions * channels,
        }
    }

    /// Returns the shape of one row of output.
    pub fn output(&self) -> Features {
        match self {
            Layer::Linear { outputs, .. } => Features::Flat(*outputs),
            Layer::Convolution { shape, .. } => Features::Image {
                height: shape.output_height(),
                width: shape.output_width(),
                channels: shape.outputs,
            },
            Layer::MaxPool(PoolShape { height, width, channels, size, .. }) => {
                Features::Image { height: height / size, width: width / size, channels: *channels }
            }
            Layer::Activation(_, features) => *features,
            Layer::Flatten { .. } => Features::Flat(self.input_len()),
        }
    }

    /// Returns the number of output values per row.
    pub fn output_len(&self) -> usize {
        self.output().len()
    }

    /// Returns the number of values per row that the forward pass saves for the backward pass
    /// besides its output.
    pub fn saved_len(&self) -> usize {
        match self {
            Layer::Linear { activation, outputs, .. } if activation.saves() => *outputs,
            Layer::Activation(activation, features) if activation.saves() => features.len(),
            Layer::Convolution { .. } | Layer::MaxPool(_) => self.output_len(),
            _ => 0,
        }
    }

    /// Returns the approximate number of multiplications and additions of one row's forward pass.
    /// Computing the gradients of the weights takes as many again, and so does computing the
    /// gradients of the inputs.
    pub fn operations(&self) -> usize {
        match self {
            Layer::Linear { inputs, outputs, .. } => 2 * inputs * outputs,
            Layer::Convolution { shape, .. } => {
                let positions = (shape.height + 1 - shape.kernel) * (shape.width + 1 - shape.kernel);
                2 * positions * shape.weight_len()
            }
            Layer::MaxPool(_) | Layer::Activation(..) | Layer::Flatten { .. } => self.input_len(),
        }
    }

    /// Returns true for a layer whose backward pass turns the gradient of its output into the
    /// gradient of its input in place.
    pub fn is_elementwise(&self) -> bool {
        matches!(self, Layer::Activation(..))
    }

    /// Returns this layer with its tensors numbered from `first` on.
    pub fn with_tensors_from(mut self, first: usize) -> Layer {
        match &mut self {
            Layer::Linear { weight, bias, .. } => {
                *weight = first;
                *bias = bias.map(|_| first + 1);
            }
            Layer::Convolution { weight, .. } => *weight = first,
            Layer::MaxPool(_) | Layer::Activation(..) | Layer::Flatten { .. } => {}
        }
        self
    }

    /// Returns the indices of the layer's tensors.
    pub fn tensors(&self) -> std::ops::Range<usize> {
        match self {
            Layer::Linear { weight, bias, .. } => *weight..*weight + 1 + usize::from(bias.is_some()),
            Layer::Convolution { weight, .. } => *weight..*weight + 2,
            _ => 0..0,
        }
    }

    /// Runs the forward pass for `rows ≥ 1` rows.
    pub fn forward<D: Device>(
        &self,
        device: &D,
        parameters: &FlatBuffer<D>,
        rows: usize,
        input: D::View<'_>,
        saved: D::ViewMut<'_>,
        output: D::ViewMut<'_>,
    ) {
        match self {
            // a rank's shard of a layer may be empty: its contribution to a sum is then 0
            Layer::Linear { inputs: 0, .. } => device.fill(output, 0.0),
            Layer::Linear { outputs: 0, .. } => {}
            Layer::Linear { activation, weight, bias, .. } => {
                let shape = self.linear_shape(rows);
                let bias = bias.map(|bias| parameters.tensor(device, bias));
                let weight = parameters.tensor(device, *weight);
                device.linear_forward(&shape, input, weight, bias, *activation, saved, output);
            }
            Layer::Convolution { shape, weight } => {
                let shape = ConvolutionShape { rows, ..*shape };
                let bias = parameters.tensor(device, weight + 1);
                let weight = parameters.tensor(device, *weight);
                device.convolution_forward(&shape, input, weight, bias, saved, output);
            }
            Layer::MaxPool(shape) => {
                device.max_pool_forward(&PoolShape { rows, ..*shape }, input, saved, output)
            }
            Layer::Activation(activation, _) => device.activation_forward(*activation, input, saved, output),
            Layer::Flatten { positions, channels } => {
                device.transpose_each(*positions, *channels, input, output);
            }
        }
    }

    /// Runs the first part of the backward pass: turns `gradient`, the gradient of the output, into
    /// the gradient of the values before the activation, which the other two parts read, and adds
    /// up that of the bias in `sums`. If `is_backpropagated`, `gradient` has already passed through
    /// the activation, and only the bias is left.
    pub fn backward_activation<D: Device>(
        &self,
        device: &D,
        tape: &Tape<'_, D>,
        gradient: D::ViewMut<'_>,
        sums: Option<(&mut FlatBuffer<D>, Section)>,
        is_backpropagated: bool,
    ) {
        let (activation, columns, bias) = match self {
            Layer::Linear { outputs: 0, .. } => return,
            Layer::Linear { activation, outputs, bias, .. } => (*activation, *outputs, *bias),
            Layer::Convolution { shape, weight } => {
                let activation = if shape.relu { Activation::Relu } else { Activation::Identity };
                (activation, shape.outputs, Some(weight + 1))
            }
            Layer::Activation(activation, features) => (*activation, features.len(), None),
            Layer::MaxPool(_) | Layer::Flatten { .. } => return,
        };
        let activation = if is_backpropagated { Activation::Identity } else { activation };
        let saved = if activation.saves() { tape.saved } else { tape.output };
        let bias =
            bias.zip(sums).map(|(bias, (gradients, section))| gradients.row_sums(device, bias, section));
        if is_backpropagated && bias.is_none() {
            return;
        }
        let shape = BiasShape { columns, positions: self.output_len() / columns };
        device.activation_backward(activation, shape, saved, gradient, bias);
    }

    /// Runs the second part of the backward pass: adds up the gradient of the weight, if the layer has
    /// one, over the rows of consecutive micro-batches.
    pub fn backward_weight<D: Device>(
        &self,
        device: &D,
        micro_batches: &[TapedRows<'_, D>],
        gradients: &mut FlatBuffer<D>,
    ) {
        match self {
            Layer::Linear { inputs: 0, .. } | Layer::Linear { outputs: 0, .. } => {}
            Layer::Linear { weight, .. } => {
                let operands: SmallVec<[WeightOperands<D::View<'_>>; 16]> = micro_batches
                    .iter()
                    .map(|TapedRows { tape, gradient, section }| WeightOperands {
                        rows: section.len(),
                        input: tape.input,
                        gradient: *gradient,
                    })
                    .collect();
                let sections = micro_batches.iter().map(|rows| rows.section);
                let Some(section) = sections.reduce(Section::join) else { return };
                let (shape, weight) =
                    (self.linear_shape(section.len()), gradients.row_sums(device, *weight, section));
                device.linear_backward_weight(&shape, &operands, weight);
            }
            Layer::Convolution { shape, weight } => {
                for TapedRows { tape, gradient, section } in micro_batches {
                    let shape = ConvolutionShape { rows: section.len(), ..*shape };
                    let weight = gradients.row_sums(device, *weight, *section);
                    device.convolution_backward_weight(&shape, tape.input, tape.saved, *gradient, weight);
                }
            }
            _ => {}
        }
    }

    /// Runs the third part of the backward pass, which is independent of the second: computes the
    /// gradient of the input. Must not be called on [elementwise](Layer::is_elementwise) layers.
    /// With `previous` (see [`Layer::activation_fused_with`]), also backpropagates through the
    /// previous layer's activation.
    #[allow(clippy::too_many_arguments)] // one argument for each array of the formula
    pub fn backward_input<D: Device>(
        &self,
        device: &D,
        parameters: &FlatBuffer<D>,
        rows: usize,
        tape: &Tape<'_, D>,
        gradient: D::View<'_>,
        input_gradient: D::ViewMut<'_>,
        previous: Option<FusedActivation<D::View<'_>>>,
    ) {
        match self {
            Layer::Linear { outputs: 0, .. } => device.fill(input_gradient, 0.0),
            Layer::Linear { inputs: 0, .. } => {}
            Layer::Linear { weight, .. } => {
                let weight = parameters.tensor(device, *weight);
                let shape = self.linear_shape(rows);
                device.linear_backward_input(&shape, gradient, weight, input_gradient, previous);
            }
            Layer::Convolution { shape, weight } => {
                let shape = ConvolutionShape { rows, ..*shape };
                let weight = parameters.tensor(device, *weight);
                device.convolution_backward_input(&shape, weight, tape.saved, gradient, input_gradient);
            }
            Layer::MaxPool(shape) => {
                device.max_pool_backward(&PoolShape { rows, ..*shape }, tape.saved, gradient, input_gradient);
            }
            Layer::Activation(..) => {
                unreachable!("the gradient of an elementwise layer is computed in place")
            }
            Layer::Flatten { positions, channels } => {
                device.transpose_each(*channels, *positions, gradient, input_gradient);
            }
        }
    }

    /// Returns the activation of this layer if the layer `after` it can backpropagate through it in
    /// the pass that computes the gradient of its own inputs.
    pub fn activation_fused_with<D: Device>(&self, device: &D, after: &Layer) -> Option<Activation> {
        match (self, after) {
            (Layer::Linear { activation, outputs: 1.., .. }, Layer::Linear { outputs: 1.., .. }) => {
                Some(*activation)
                    .filter(|activation| activation.saves() && device.fuses_activation_backward(*activation))
            }
            _ => None,
        }
    }

    fn linear_shape(&self, rows: usize) -> LinearShape {
        let Layer::Linear { inputs, outputs, layout, input_terms, output_terms, .. } = *self else {
            unreachable!("only called for linear layers");
        };
        LinearShape { rows, inputs, outputs, layout, input_terms, output_terms }
    }
}

/// Returns the tensors of a convolution or linear layer called `name`, with PyTorch's default
/// initial values.
pub(super) fn torch_tensors(name: &str, shape: Vec<usize>, bias: bool) -> Vec<TensorSpec> {
    let initial = Initial::torch_default(shape[1..].iter().product());
    let outputs = shape[0];
    let mut tensors = vec![TensorSpec { name: format!("{name}.weight"), shape, initial }];
    if bias {
        tensors.push(TensorSpec { name: format!("{name}.bias"), shape: vec![outputs], initial });
    }
    tensors
}
