//! The use of trained networks: forward passes alone, each on one rank.
//!
//! A file's network is built anew and its tensors are read by name, so any checkpoint serves, whatever the
//! layout that wrote it. Rows do not depend on each other, so on the CPU a row's outputs have the same bits
//! in any batch and on any rank.

mod decoder;
mod generate;
mod predict;
mod prediction;
mod prediction_file;
mod predictor;
mod score;
mod trained;
mod weights;

#[cfg(test)]
mod tests;

pub use decoder::Decoder;
pub use generate::{Sampling, TextGenerator};
pub use predict::{SampleSets, predict, rows_at_once};
pub use prediction::PredictionShape;
pub use prediction_file::PredictionFile;
pub use predictor::Predictor;
pub use score::{ClassScore, Score, ScoreSummary};
pub use trained::TrainedNetwork;
