//! Forward passes over a sequence that grows.
//!
//! # The path of the data
//!
//! The network is built for a single position, and its arrays have a row for each position of the context.
//! A pass over positions a..b writes rows a..b of every array. A layer that treats positions alike reads
//! the same rows of its input; attention reads rows 0..b, so its input array, with the keys and values of
//! all positions before, is the cache. Each further token costs one row of each product and one query of
//! attention, and no array is copied.
//!
//! # Invariants
//!
//! * Row p of every array is what a pass over a whole sequence would write there if it began with the tokens
//!   0..=p that are [known](Decoder): no output depends on a later position, and an element of a product, or
//!   the output of a query, has the same bits however many rows or queries are computed with it.
//! * So the outputs have the bits of a pass over all positions ([`Predictor`](super::Predictor)).
//! * Tokens are compared with those that are known, and rows are computed from the first that differs.
//!   When a text outgrows the context, its last tokens move to other positions at each step, and all rows
//!   are computed again, because the learnt positions and everything computed from them change.

use super::TrainedNetwork;
use super::weights::{read_weights, transpose_weights};
use crate::Result;
use crate::device::Device;
use crate::nn::{FlatBuffer, Model};
use crate::parallel::batch::Summation;
use crate::parallel::stage::{Activations, Stage};
use crate::parallel::tensor::division::FeatureDivision;
use crate::parallel::tensor::exchange::{here, here_mut};
use crate::parallel::tensor::{Split, split};
use crate::sums::NUM_LEAVES;

/// A network of sequences with its weights, and with what it has computed of the tokens so far.
pub struct Decoder<'a, D: Device> {
    device: &'a D,
    stage: Stage,
    parameters: FlatBuffer<D>,
    activations: Activations<D>,
    /// The number of outputs of a position.
    width: usize,
    /// The tokens of which the arrays have the rows.
    known: Vec<f32>,
}

impl<'a, D: Device> Decoder<'a, D> {
    /// Reads the weights of `model` from `trained`. Returns nothing if a layer of the network cannot continue
    /// a sequence: see [`LayerPasses::continues`](crate::nn::LayerPasses::continues). Not collective.
    ///
    /// # Errors
    /// A tensor cannot be read, or the device does not have enough memory.
    pub fn new(device: &'a D, trained: &TrainedNetwork, model: &Model) -> Result<Option<Decoder<'a, D>>> {
        let division = FeatureDivision::new(Summation::Canonical { num_leaves: NUM_LEAVES }, 1);
        let one = trained.build_for_one_position()?;
        let mut parts = split(&one, Split::Pairs, 0, division);
        let transposed = transpose_weights(&mut parts);
        let stage = Stage::new(0, None, &parts, one.input.len(), 0, None);
        if !stage.continues() {
            return Ok(None);
        }
        // a layer of positions has a row for each in the whole model alone
        let whole = split(model, Split::Pairs, 0, division);
        let parameters = read_weights(device, trained, model, &whole, &transposed)?;
        let activations = stage.allocate_activations(device, model.input.len(), None)?;
        let width = one.output.len();
        Ok(Some(Decoder { device, stage, parameters, activations, width, known: Vec::new() }))
    }

    /// Runs the network over `tokens`, at least one and no more than the context has, and calls `look` with
    /// the outputs of the last. Not collective.
    ///
    /// # Errors
    /// `look` or the device failed.
    pub fn run(&mut self, tokens: &[f32], look: &mut dyn FnMut(&[f32]) -> Result<()>) -> Result<()> {
        let Decoder { device, stage, parameters, activations, width, known } = self;
        let num_equal = known.iter().zip(tokens).take_while(|(known, token)| known == token).count();
        let (last, positions) = (tokens.len() - 1, num_equal.min(tokens.len() - 1)..tokens.len());
        known.truncate(positions.start);
        let input = here_mut(activations.input());
        device.write(device.view_mut(input, positions.clone()), &mut |input| {
            input.copy_from_slice(&tokens[positions.clone()]);
            Ok(())
        })?;
        stage.forward_next(*device, parameters, &positions, activations);
        known.extend_from_slice(&tokens[positions.clone()]);
        let output = here(activations.output());
        device.read(device.view(output, last * *width..tokens.len() * *width), look)
    }
}
