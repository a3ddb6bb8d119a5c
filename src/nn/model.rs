//! A model: layers and tensors for one shape of input, and the passes through a run of its layers.
//!
//! The arrays of a pass are allocated once, for the largest number of rows that will come. A forward pass fills a
//! [`Tape`](super::layer::Tape) per layer; a backward pass reads it and needs two arrays for gradients, which the
//! micro-batches share.

use std::ops::Range;

use super::layer::{Layer, Tape};
use super::{FlatBuffer, Loss, TensorSpec};
use crate::Result;
use crate::device::{Device, LossShape, totals};

/// The shape of one row of values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Features {
    /// A list.
    Flat(usize),
    /// An image, channels last.
    Image {
        /// Rows of pixels.
        height: usize,
        /// Pixels of a row.
        width: usize,
        /// Values of a pixel.
        channels: usize,
    },
}

impl Features {
    /// The number of values.
    #[allow(clippy::len_without_is_empty)] // emptiness is an error where a model is built
    pub fn len(self) -> usize {
        match self {
            Features::Flat(len) => len,
            Features::Image { height, width, channels } => height * width * channels,
        }
    }
}

impl std::fmt::Display for Features {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Features::Flat(1) => write!(f, "1 feature"),
            Features::Flat(len) => write!(f, "{len} features"),
            Features::Image { height, width, channels } => {
                write!(
                    f,
                    "images of {height} × {width} with {channels} channel{}",
                    if *channels == 1 { "" } else { "s" }
                )
            }
        }
    }
}

/// A network built for one shape of input. It knows no rank and holds no values.
#[derive(Debug, Clone)]
pub struct Model {
    /// The network's name.
    pub name: String,
    /// The layers in order.
    pub layers: Vec<Layer>,
    /// The tensors in logical order.
    pub tensors: Vec<TensorSpec>,
    /// The shape of one row of input.
    pub input: Features,
    /// The number of outputs per row.
    pub outputs: usize,
    /// What is minimised.
    pub loss: Loss,
}

impl Model {
    /// The number of parameters.
    pub fn num_parameters(&self) -> usize {
        self.tensors.iter().map(TensorSpec::num_elements).sum()
    }

    /// The number of target values per row.
    pub fn targets_per_row(&self) -> usize {
        self.loss.targets_per_row(self.outputs)
    }
}

/// The arrays of one micro-batch on its way through a run of layers.
pub struct Activations<D: Device> {
    /// `[rows, input_len]` of the first layer.
    pub input: D::Buffer,
    /// `[rows, targets_per_row]`.
    pub targets: D::Buffer,
    outputs: Vec<D::Buffer>,
    saved: Vec<D::Buffer>,
}

impl<D: Device> Activations<D> {
    /// Room for `capacity` rows. Not collective.
    ///
    /// # Errors
    /// The device has not that much memory.
    pub fn new(device: &D, model: &Model, layers: Range<usize>, capacity: usize) -> Result<Activations<D>> {
        let layers = &model.layers[layers];
        let arrays = |len: fn(&Layer) -> usize| -> Result<Vec<_>> {
            layers.iter().map(|layer| device.allocate(capacity * len(layer))).collect()
        };
        Ok(Activations {
            input: device.allocate(capacity * layers.first().map_or(0, Layer::input_len))?,
            targets: device.allocate(capacity * model.targets_per_row())?,
            outputs: arrays(Layer::output_len)?,
            saved: arrays(Layer::saved_len)?,
        })
    }
}

/// The two arrays that gradients alternate between on their way back.
pub struct GradientPair<D: Device> {
    /// The gradient of the output of the layer at hand.
    current: D::Buffer,
    other: D::Buffer,
}

impl<D: Device> GradientPair<D> {
    /// Room for `capacity` rows of the widest layer of `model`. Not collective.
    ///
    /// # Errors
    /// The device has not that much memory.
    pub fn new(device: &D, model: &Model, capacity: usize) -> Result<GradientPair<D>> {
        let widest = model.layers.iter().map(|layer| layer.output_len().max(layer.input_len())).max();
        let len = capacity * widest.unwrap_or_default();
        Ok(GradientPair { current: device.allocate(len)?, other: device.allocate(len)? })
    }
}

/// A run of consecutive layers, for which this rank does the work.
#[derive(Debug, Clone)]
pub struct Stage<'m> {
    /// The whole model.
    pub model: &'m Model,
    /// Which of its layers.
    pub layers: Range<usize>,
}

impl<'m> Stage<'m> {
    /// All layers of `model`.
    pub fn whole(model: &'m Model) -> Stage<'m> {
        Stage { model, layers: 0..model.layers.len() }
    }

    /// Forward pass of `rows` rows that are in `activations.input`. With no rows nothing happens.
    pub fn forward<D: Device>(
        &self,
        device: &D,
        parameters: &FlatBuffer<D>,
        rows: usize,
        activations: &mut Activations<D>,
    ) {
        if rows == 0 {
            return;
        }
        for (at, layer) in self.model.layers[self.layers.clone()].iter().enumerate() {
            let (before, rest) = activations.outputs.split_at_mut(at);
            let input = before.last().unwrap_or(&activations.input);
            let input = device.view(input, 0..rows * layer.input_len());
            let saved = device.view_mut(&mut activations.saved[at], 0..rows * layer.saved_len());
            let output = device.view_mut(&mut rest[0], 0..rows * layer.output_len());
            layer.forward(device, parameters, rows, input, saved, output);
        }
    }

    /// The loss of the last layer's outputs, added to `sums`; its gradient, times `scale`, begins the backward pass.
    pub fn loss<D: Device>(
        &self,
        device: &D,
        rows: usize,
        scale: f32,
        activations: &Activations<D>,
        gradients: &mut GradientPair<D>,
        sums: &mut D::Buffer,
    ) {
        let model = self.model;
        let shape = LossShape { rows, columns: model.outputs, scale };
        let outputs = self.outputs(device, rows, activations);
        let targets = device.view(&activations.targets, 0..rows * model.targets_per_row());
        let gradient = device.view_mut(&mut gradients.current, 0..rows * model.outputs);
        let sums = device.view_mut(sums, 0..totals::LEN);
        model.loss.evaluate(device, &shape, outputs, targets, gradient, sums);
    }

    /// Backward pass of layer `index` of the model: from the gradient of its output to that of its parameters (added to
    /// what is there if `accumulate`) and, if an earlier layer has parameters, of its input. With no rows nothing happens.
    #[allow(clippy::too_many_arguments)] // each is a different part of the state of a step
    pub fn backward_layer<D: Device>(
        &self,
        device: &D,
        index: usize,
        rows: usize,
        parameters: &FlatBuffer<D>,
        activations: &Activations<D>,
        gradients: &mut FlatBuffer<D>,
        pair: &mut GradientPair<D>,
        accumulate: bool,
    ) {
        if rows == 0 {
            return;
        }
        let layer = &self.model.layers[index];
        let at = index - self.layers.start;
        let input = if at == 0 { &activations.input } else { &activations.outputs[at - 1] };
        let tape = Tape {
            input: device.view(input, 0..rows * layer.input_len()),
            saved: device.view(&activations.saved[at], 0..rows * layer.saved_len()),
            output: device.view(&activations.outputs[at], 0..rows * layer.output_len()),
        };
        let len = rows * layer.output_len();
        let gradient = device.view_mut(&mut pair.current, 0..len);
        layer.backward_activation(device, &tape, gradient, gradients, accumulate);
        let gradient = device.view(&pair.current, 0..len);
        layer.backward_weight(device, rows, &tape, gradient, gradients, accumulate);
        if self.model.layers[..index].iter().any(|earlier| !earlier.tensors().is_empty()) {
            let input_gradient = device.view_mut(&mut pair.other, 0..rows * layer.input_len());
            layer.backward_input(device, parameters, rows, &tape, gradient, input_gradient);
            std::mem::swap(&mut pair.current, &mut pair.other);
        }
    }

    /// The outputs of the last layer for the first `rows` rows.
    pub fn outputs<'a, D: Device>(&self, device: &D, rows: usize, activations: &'a Activations<D>) -> D::View<'a> {
        let outputs = activations.outputs.last().unwrap_or(&activations.input);
        device.view(outputs, 0..rows * self.model.outputs)
    }
}
