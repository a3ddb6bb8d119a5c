//! Networks: the modules that a user writes, the layers that a device runs, losses, initial values,
//! and flat memory for all parameters. Independent of ranks.

mod build;
mod features;
mod initial;
mod layer;
mod loss;
mod model;
mod network;
mod parameters;
mod table;
mod tensor;
mod text;

#[cfg(test)]
mod tests;

pub use features::{Features, LARGEST_SIZE};
pub use initial::{Initial, generator, symmetric};
// all that the folder makes public is part of the contract
pub use layer::*;
pub use loss::Loss;
pub use model::Model;
pub use network::{
    Attention, Convolution, DROPOUT_RATES, GptSizes, Module, Network, PoolWindows, RESNET_GROUPS,
};
pub use parameters::{FlatBuffer, Segmentation, TensorPosition, hash_values};
pub use tensor::{TensorShard, TensorSpec};
pub use text::LONGEST_TEXT;
