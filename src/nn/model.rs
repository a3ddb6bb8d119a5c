//! A model: layers and tensors for one input shape.

use std::ops::Range;

use super::layer::{Layer, LayerInputs};
use super::{Features, Loss, TensorSpec};

/// A network built for one input shape. It is independent of ranks and holds no values.
#[derive(Debug, Clone)]
pub struct Model {
    /// The network's name.
    pub name: String,
    /// The network as text: see [`Network::from_text`](super::Network::from_text).
    pub text: String,
    /// The layers in the order in which they run.
    pub layers: Vec<Layer>,
    /// The values that each layer reads.
    pub inputs: Vec<LayerInputs>,
    /// The tensors in logical order.
    pub tensors: Vec<TensorSpec>,
    /// The shape of one row of input.
    pub input: Features,
    /// The shape of one row of output.
    pub output: Features,
    /// The loss that training minimises.
    pub loss: Loss,
}

impl Model {
    /// Returns the number of parameters.
    pub fn num_parameters(&self) -> usize {
        self.tensors.iter().fold(0, |sum: usize, tensor| sum.saturating_add(tensor.num_elements()))
    }

    /// Returns the number of predictions that a row of outputs is: for cross-entropy, one for each position
    /// of a sequence.
    pub fn num_predictions(&self) -> usize {
        match (self.loss, self.output) {
            (Loss::CrossEntropy, Features::Sequence { len, .. }) => len,
            _ => 1,
        }
    }

    /// Returns the number of outputs of a prediction: with cross-entropy, those of the classes.
    pub fn outputs_per_prediction(&self) -> usize {
        self.output.len() / self.num_predictions()
    }

    /// Returns the cost of each layer's forward and backward pass, in operations per row. No
    /// gradient is computed for the input of the first layer that has parameters.
    pub fn costs(&self) -> Vec<u64> {
        let first = self.layers.iter().position(|layer| !layer.tensors.is_empty()).unwrap_or_default();
        let passes = |index| if index > first { 3 } else { 2 };
        self.layers
            .iter()
            .enumerate()
            .map(|(index, layer)| passes(index) * layer.operations() as u64)
            .collect()
    }

    /// Returns the layers in runs between which a pipeline can be cut, because one value alone is read
    /// after the cut: a residual with its branches is in one run, any other layer is a run.
    pub fn runs(&self) -> Vec<Range<usize>> {
        let num = self.layers.len();
        // the earliest value that the layers from each one on read
        let mut earliest: Vec<usize> = self.inputs.iter().map(LayerInputs::earliest).collect();
        for at in (1..num).rev() {
            earliest[at - 1] = earliest[at - 1].min(earliest[at]);
        }
        let mut ends: Vec<usize> = (1..num).filter(|at| earliest[*at] >= *at).collect();
        ends.extend((num > 0).then_some(num));
        let mut start = 0;
        ends.into_iter().map(|end| std::mem::replace(&mut start, end)..end).collect()
    }
}
