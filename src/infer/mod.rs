//! The use of trained networks: forward passes alone, on one rank.
//!
//! A file's network is built anew and its tensors are read by name, so any checkpoint serves, whatever the
//! layout that wrote it. Rows do not depend on each other, so a row's outputs have the same bits in any
//! batch and on any rank.

mod generate;
mod predictor;
mod trained;

pub use generate::{Sampling, TextGenerator};
pub use predictor::Predictor;
pub use trained::TrainedNetwork;
