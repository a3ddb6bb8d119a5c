//! Convolutions.

use super::passes::{LayerPasses, LayerSums, LayerTensors, Tape, TapedRows};
use crate::device::{Activation, ConvolutionShape, Device};
use crate::nn::Features;
use crate::sums::Section;

/// A convolution and the pooling, ReLU and conversion to features that follow it.
#[derive(Debug, Clone)]
pub struct ConvolutionLayer {
    /// The sizes of the convolution; `rows` is 0 here.
    pub shape: ConvolutionShape,
    /// True for a layer with a bias.
    pub bias: bool,
}

/// The numbers of the tensors.
const WEIGHT: usize = 0;
const BIAS: usize = 1;

impl ConvolutionLayer {
    fn shape(&self, rows: usize) -> ConvolutionShape {
        ConvolutionShape { rows, ..self.shape }
    }
}

impl LayerPasses for ConvolutionLayer {
    fn name(&self) -> &'static str {
        if self.shape.flattens { "convolution, flatten" } else { "convolution" }
    }

    fn input_len(&self) -> usize {
        self.shape.image_len()
    }

    fn output(&self) -> Features {
        let ConvolutionShape { outputs: channels, flattens, .. } = self.shape;
        let (height, width) = (self.shape.output_height(), self.shape.output_width());
        match flattens {
            true => Features::Flat(self.shape.output_len()),
            false => Features::Image { height, width, channels },
        }
    }

    fn saved_len(&self) -> usize {
        self.shape.argmax_len()
    }

    fn operations(&self) -> usize {
        let window = self.shape.window();
        let positions = self.shape.output_height() * self.shape.output_width() * window * window;
        2 * positions * self.shape.weight_len()
    }

    fn activation(&self) -> Activation {
        if self.shape.relu { Activation::Relu } else { Activation::Identity }
    }

    fn forward<D: Device>(
        &self,
        device: &D,
        parameters: LayerTensors<'_, D>,
        rows: usize,
        input: D::View<'_>,
        saved: D::ViewMut<'_>,
        output: D::ViewMut<'_>,
    ) {
        let weight = parameters.get(device, WEIGHT);
        let bias = self.bias.then(|| parameters.get(device, BIAS));
        device.convolution_forward(&self.shape(rows), input, weight, bias, saved, output);
    }

    fn backward_activation<D: Device>(
        &self,
        device: &D,
        tape: &Tape<'_, D>,
        gradient: D::ViewMut<'_>,
        _sums: Option<(LayerSums<'_, D>, Section)>,
    ) {
        if self.shape.relu {
            device.convolution_backward_relu(&self.shape, tape.output, gradient);
        }
    }

    fn backward_weight<D: Device>(
        &self,
        device: &D,
        micro_batches: &[TapedRows<'_, D>],
        mut sums: LayerSums<'_, D>,
    ) {
        for TapedRows { tape, gradient, section } in micro_batches {
            let sums = sums.of_weight_and_bias(device, self.bias, *section);
            let shape = self.shape(section.len());
            device.convolution_backward_weight(&shape, tape.input, tape.saved, *gradient, sums);
        }
    }

    fn backward_input<D: Device>(
        &self,
        device: &D,
        parameters: LayerTensors<'_, D>,
        rows: usize,
        tape: &Tape<'_, D>,
        gradient: D::View<'_>,
        input_gradient: D::ViewMut<'_>,
    ) {
        let weight = parameters.get(device, WEIGHT);
        device.convolution_backward_input(&self.shape(rows), weight, tape.saved, gradient, input_gradient);
    }
}
