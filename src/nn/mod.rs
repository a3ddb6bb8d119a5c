//! Networks: modules as they are written down, layers as a device runs them, losses, initial values, and the flat
//! memory of all parameters. Knows no rank.

mod initial;
mod layer;
mod loss;
mod model;
mod network;
mod parameters;

#[cfg(test)]
mod tests;

pub use initial::{Initial, generator, symmetric};
pub use layer::{Layer, Tape};
pub use loss::Loss;
pub use model::{Features, LARGEST_SIZE, Model};
pub use network::{Module, Network};
pub use parameters::{FlatBuffer, Segmentation, TensorShard, TensorSpec, hash_values};
