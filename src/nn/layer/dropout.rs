//! Dropout.

use super::passes::{Draws, LayerPasses, LayerSums, LayerTensors, PositionRule, Tape};
use crate::device::{Device, DropoutShape};
use crate::nn::Features;
use crate::sums::Section;

/// In training, sets values to 0 at random and scales the others (Srivastava et al., "Dropout", 2014);
/// without [`Draws`] it changes nothing. Values are drawn by their number in the batch, so they are the
/// same in every layout, and drawn again in the backward pass instead of being kept.
#[derive(Debug, Clone)]
pub struct DropoutLayer {
    /// The probability of 0.
    pub rate: f32,
    /// The number of the module among those that draw.
    pub number: usize,
    /// The shape of a row.
    pub features: Features,
    /// The number of the first value of a row among all of the whole layer.
    pub first: usize,
    /// The number of values of a row of the whole layer.
    pub whole_len: usize,
}

impl DropoutLayer {
    /// Returns a layer with all values of rows of `features`.
    pub fn whole(rate: f32, number: usize, features: Features) -> DropoutLayer {
        DropoutLayer { rate, number, features, first: 0, whole_len: features.len() }
    }

    fn shape(&self, draws: Draws) -> DropoutShape {
        let (row_len, row_stride) = (self.features.len() as u64, self.whole_len as u64);
        let first = draws.first_row as u64 * row_stride + self.first as u64;
        DropoutShape { mask: draws.mask(self.rate, self.number), first, row_len, row_stride }
    }
}

impl LayerPasses for DropoutLayer {
    fn name(&self) -> &'static str {
        "dropout"
    }

    fn input_len(&self) -> usize {
        self.features.len()
    }

    fn output(&self) -> Features {
        self.features
    }

    fn is_elementwise(&self) -> bool {
        true
    }

    fn changes_gradient(&self) -> bool {
        true
    }

    fn continues(&self) -> bool {
        true
    }

    fn position_rule(&self) -> PositionRule {
        PositionRule::Alike
    }

    fn of_positions(&self, own: Section) -> DropoutLayer {
        let first = own.terms().start * self.features.last_dimension();
        DropoutLayer { features: self.features.with_positions(own.len()), first, ..self.clone() }
    }

    fn forward<D: Device>(
        &self,
        device: &D,
        parameters: LayerTensors<'_, D>,
        _rows: usize,
        input: D::View<'_>,
        _saved: D::ViewMut<'_>,
        output: D::ViewMut<'_>,
    ) {
        match parameters.draws {
            Some(draws) => device.dropout(&self.shape(draws), Some(input), output),
            None => device.copy(input, output),
        }
    }

    fn backward_activation<D: Device>(
        &self,
        device: &D,
        tape: &Tape<'_, D>,
        gradient: D::ViewMut<'_>,
        _sums: Option<(LayerSums<'_, D>, Section)>,
    ) {
        if let Some(draws) = tape.draws {
            device.dropout(&self.shape(draws), None, gradient);
        }
    }
}
