//! Forward passes.

use super::TrainedNetwork;
use super::weights::read_weights;
use crate::Result;
use crate::device::Device;
use crate::nn::{Features, FlatBuffer, Model};
use crate::parallel::batch::Summation;
use crate::parallel::stage::{Activations, Stage};
use crate::parallel::tensor::division::FeatureDivision;
use crate::parallel::tensor::exchange::{Exchanger, here, here_mut};
use crate::parallel::tensor::{Split, split};
use crate::sums::NUM_LEAVES;

/// A network with its weights, ready for forward passes of some rows.
pub struct Predictor<'a, D: Device> {
    exchanger: Exchanger<'a, D>,
    stage: Stage,
    parameters: FlatBuffer<D>,
    activations: Activations<D>,
    input: Features,
    output: Features,
}

impl<'a, D: Device> Predictor<'a, D> {
    /// Reads the weights of `model` from `trained`, and prepares for at most `rows` rows. Not collective.
    ///
    /// # Errors
    /// A tensor cannot be read, or the device does not have enough memory.
    pub fn new(
        device: &'a D,
        trained: &TrainedNetwork,
        model: &Model,
        rows: usize,
    ) -> Result<Predictor<'a, D>> {
        let division = FeatureDivision::new(Summation::Canonical { num_leaves: NUM_LEAVES }, 1);
        let parts = split(model, Split::Pairs, 0, division);
        let parameters = read_weights(device, trained, model, &parts, &[])?;
        let stage = Stage::new(0, None, &parts, model.input.len(), 0, None);
        let exchanger = Exchanger::alone(device);
        let activations = stage.allocate_activations(device, rows, None)?;
        let (input, output) = (model.input, model.output);
        Ok(Predictor { exchanger, stage, parameters, activations, input, output })
    }

    /// Returns the shape of a row of inputs.
    pub fn input(&self) -> Features {
        self.input
    }

    /// Returns the shape of a row of outputs.
    pub fn output(&self) -> Features {
        self.output
    }

    /// Runs the network over `rows` rows, whose inputs `fill` writes, and calls `look` with the outputs,
    /// `[rows, output]`. Not collective.
    ///
    /// # Errors
    /// `fill`, `look` or the device failed.
    pub fn run(
        &mut self,
        rows: usize,
        fill: &mut dyn FnMut(&mut [f32]) -> Result<()>,
        look: &mut dyn FnMut(&[f32]) -> Result<()>,
    ) -> Result<()> {
        let device = self.exchanger.device;
        let input = here_mut(self.activations.input());
        device.write(device.view_mut(input, 0..rows * self.input.len()), fill)?;
        for at in 0..self.stage.num_pieces() {
            let (parameters, activations) = (&self.parameters, &mut self.activations);
            self.stage.forward_piece(&mut self.exchanger, parameters, at, rows, activations)?;
        }
        let output = here(self.activations.output());
        device.read(device.view(output, 0..rows * self.output.len()), look)
    }
}
