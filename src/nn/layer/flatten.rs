//! The conversion of images to features.

use super::passes::{LayerPasses, LayerTensors, Tape};
use crate::device::Device;
use crate::nn::Features;

/// Converts an image, channels last, to features in PyTorch's order, channels first.
#[derive(Debug, Clone)]
pub struct FlattenLayer {
    /// Height times width.
    pub positions: usize,
    /// Number of channels.
    pub channels: usize,
}

impl LayerPasses for FlattenLayer {
    fn name(&self) -> &'static str {
        "flatten"
    }

    fn input_len(&self) -> usize {
        self.positions * self.channels
    }

    fn output(&self) -> Features {
        Features::Flat(self.input_len())
    }

    fn forward<D: Device>(
        &self,
        device: &D,
        _parameters: LayerTensors<'_, D>,
        _rows: usize,
        input: D::View<'_>,
        _saved: D::ViewMut<'_>,
        output: D::ViewMut<'_>,
    ) {
        device.transpose_each(self.positions, self.channels, input, output);
    }

    fn backward_input<D: Device>(
        &self,
        device: &D,
        _parameters: LayerTensors<'_, D>,
        _rows: usize,
        _tape: &Tape<'_, D>,
        gradient: D::View<'_>,
        input_gradient: D::ViewMut<'_>,
    ) {
        device.transpose_each(self.channels, self.positions, gradient, input_gradient);
    }
}
