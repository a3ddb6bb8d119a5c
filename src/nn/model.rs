//! A model: layers and tensors for one input shape.

use super::layer::Layer;
use super::{Features, Loss, TensorSpec};

/// A network built for one input shape. It is independent of ranks and holds no values.
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
    /// The loss that training minimises.
    pub loss: Loss,
}

impl Model {
    /// Returns the number of parameters.
    pub fn num_parameters(&self) -> usize {
        self.tensors.iter().fold(0, |sum: usize, tensor| sum.saturating_add(tensor.num_elements()))
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
}
