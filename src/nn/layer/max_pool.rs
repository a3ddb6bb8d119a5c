//! Max-pooling on its own.

use super::passes::{LayerPasses, LayerTensors, Tape};
use crate::device::{Device, FusedActivation, PoolShape};
use crate::nn::Features;

/// Max-pooling on its own.
#[derive(Debug, Clone)]
pub struct MaxPoolLayer {
    /// The sizes of the pooling; `rows` is 0 here.
    pub shape: PoolShape,
}

impl LayerPasses for MaxPoolLayer {
    fn name(&self) -> &'static str {
        "max-pool"
    }

    fn input_len(&self) -> usize {
        self.shape.height * self.shape.width * self.shape.channels
    }

    fn output(&self) -> Features {
        let PoolShape { height, width, channels, size, .. } = self.shape;
        Features::Image { height: height / size, width: width / size, channels }
    }

    fn saved_len(&self) -> usize {
        self.output().len()
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
        device.max_pool_forward(&PoolShape { rows, ..self.shape }, input, saved, output);
    }

    fn backward_input<D: Device>(
        &self,
        device: &D,
        _parameters: LayerTensors<'_, D>,
        rows: usize,
        tape: &Tape<'_, D>,
        gradient: D::View<'_>,
        input_gradient: D::ViewMut<'_>,
        _previous: Option<FusedActivation<D::View<'_>>>,
    ) {
        let shape = PoolShape { rows, ..self.shape };
        device.max_pool_backward(&shape, tape.saved, gradient, input_gradient);
    }
}
