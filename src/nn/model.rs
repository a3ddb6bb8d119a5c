//! A model: layers and tensors for one input shape.

use super::layer::Layer;
use super::{Loss, TensorSpec};

/// The shape of one row of values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Features {
    /// A vector of features.
    Flat(usize),
    /// An image, channels last.
    Image {
        /// Rows of pixels.
        height: usize,
        /// Pixels per row.
        width: usize,
        /// Values per pixel.
        channels: usize,
    },
}

/// The largest number of values in a row of inputs, of targets or of a layer's outputs. Such a row
/// takes 1 GiB, and the product of two such sizes cannot overflow.
pub const LARGEST_SIZE: usize = 1 << 28;

impl Features {
    /// Returns the number of values, saturating at `usize::MAX`.
    #[allow(clippy::len_without_is_empty)] // emptiness is an error where a model is built
    pub fn len(self) -> usize {
        match self {
            Features::Flat(len) => len,
            Features::Image { height, width, channels } => {
                height.saturating_mul(width).saturating_mul(channels)
            }
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

/// A network built for one input shape. It knows no rank and holds no values.
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
        let first = self.layers.iter().position(|layer| !layer.tensors().is_empty()).unwrap_or_default();
        let passes = |index| if index > first { 3 } else { 2 };
        self.layers
            .iter()
            .enumerate()
            .map(|(index, layer)| passes(index) * layer.operations() as u64)
            .collect()
    }
}
