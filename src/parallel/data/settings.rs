//! The settings of the weights of a rank and of the reduction of their gradients.

use crate::optim::OptimizerSettings;
use crate::parallel::schedule::Passes;
use crate::parallel::zero::{Accumulation, Gathering, ZeroStage};

/// The settings of the reduction of gradients.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SyncSettings {
    /// The size of the largest bucket, in bytes.
    pub bucket_bytes: usize,
    /// The stage of ZeRO; `None` for the fastest that is not slower than stage 0.
    pub zero: Option<ZeroStage>,
    /// The place where gradients of several micro-batches are added up from stage 2 on.
    pub accumulation: Accumulation,
    /// Communicate during the backward pass.
    pub overlap: bool,
    /// The norm to which the gradient is clipped; `None` for no clipping.
    pub clip_norm: Option<f64>,
}

/// The settings of [`Weights`](super::Weights) that depend on the run.
#[derive(Debug, Clone, Copy)]
pub struct WeightSettings {
    /// The settings of the reduction.
    pub sync: SyncSettings,
    /// The optimizer's rule and constants.
    pub optimizer: OptimizerSettings,
    /// The passes of a step.
    pub passes: Passes,
    /// The time for which gathered parameters are kept in stage 3.
    pub gathering: Gathering,
    /// The seed of the initial parameters.
    pub seed: u64,
}
