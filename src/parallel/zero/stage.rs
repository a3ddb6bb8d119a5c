//! The stage of ZeRO, and the place where micro-batches are added up.

use clap::ValueEnum;

/// The arrays of which every replica keeps its part only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum ZeroStage {
    /// None: gradients are summed on every replica, which updates all parameters
    #[value(name = "0")]
    None,
    /// The optimizer's slots: every replica updates its part of the parameters
    #[value(name = "1")]
    Slots,
    /// Slots and gradients
    #[value(name = "2")]
    Gradients,
    /// Slots, gradients and parameters, which are gathered when layers need them
    #[value(name = "3")]
    Parameters,
}

impl ZeroStage {
    /// Returns true if a replica keeps its part of the sums of gradients only.
    pub fn divides_gradients(self) -> bool {
        self >= ZeroStage::Gradients
    }

    /// Returns true if a replica keeps its part of the parameters only.
    pub fn divides_parameters(self) -> bool {
        self == ZeroStage::Parameters
    }
}

/// The place where the gradients of several micro-batches are added up, if replicas keep only their
/// parts of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Accumulation {
    /// In whole segments, which are reduce-scattered after the last micro-batch: fewer messages
    Whole,
    /// In the owned parts, to which every micro-batch is reduce-scattered: less memory
    Parts,
}
