//! Pooling on its own.

use super::passes::{LayerPasses, LayerTensors, Tape};
use crate::device::{Device, PoolShape};
use crate::nn::Features;

/// The value that stands for a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pooling {
    /// The maximum.
    Max,
    /// The mean.
    Average,
    /// The mean over the whole image, which leaves a feature for each channel.
    GlobalAverage,
}

/// Pooling on its own.
#[derive(Debug, Clone)]
pub struct PoolLayer {
    /// The value that stands for a window.
    pub pooling: Pooling,
    /// The sizes of the pooling; `rows` is 0 here.
    pub shape: PoolShape,
}

impl LayerPasses for PoolLayer {
    fn name(&self) -> &'static str {
        match self.pooling {
            Pooling::Max => "max-pool",
            Pooling::Average => "average-pool",
            Pooling::GlobalAverage => "global-average",
        }
    }

    fn input_len(&self) -> usize {
        self.shape.image_len()
    }

    fn output(&self) -> Features {
        let channels = self.shape.channels;
        match self.pooling {
            Pooling::GlobalAverage => Features::Flat(channels),
            Pooling::Max | Pooling::Average => {
                let (height, width) = (self.shape.output_height(), self.shape.output_width());
                Features::Image { height, width, channels }
            }
        }
    }

    fn saved_len(&self) -> usize {
        if self.pooling == Pooling::Max { self.shape.output_len() } else { 0 }
    }

    fn forward<D: Device>(
        &self,
        device: &D,
        _parameters: LayerTensors<'_, D>,
        rows: usize,
        input: D::View<'_>,
        saved: D::ViewMut<'_>,
        output: D::ViewMut<'_>,
    ) {
        let shape = PoolShape { rows, ..self.shape };
        match self.pooling {
            Pooling::Max => device.max_pool_forward(&shape, input, saved, output),
            Pooling::Average | Pooling::GlobalAverage => device.average_pool_forward(&shape, input, output),
        }
    }

    fn backward_input<D: Device>(
        &self,
        device: &D,
        _parameters: LayerTensors<'_, D>,
        rows: usize,
        tape: &Tape<'_, D>,
        gradient: D::View<'_>,
        input_gradient: D::ViewMut<'_>,
    ) {
        let shape = PoolShape { rows, ..self.shape };
        match self.pooling {
            Pooling::Max => device.max_pool_backward(&shape, tape.saved, gradient, input_gradient),
            Pooling::Average | Pooling::GlobalAverage => {
                device.average_pool_backward(&shape, gradient, input_gradient);
            }
        }
    }
}
