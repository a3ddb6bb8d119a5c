//! The options of the tensor axis.

use clap::Args;

use super::Switch;
use crate::parallel::layout::ParallelPlan;
use crate::parallel::tensor::Split;

/// The options of ranks that share layers.
#[derive(Debug, Clone, Copy, Args)]
#[command(next_help_heading = "Tensor parallelism")]
pub struct TensorOptions {
    /// Division of layers among the ranks that share them
    #[arg(long, value_enum, default_value = "pairs")]
    pub split: Split,

    /// Between divided layers, also divide the positions of sequences among the ranks that share layers:
    /// norms, dropouts and additions of a transformer, and the memory of their values
    #[arg(long, value_enum, num_args = 0..=1, default_value = "off", default_missing_value = "on")]
    pub sequence_parallel: Switch,
}

impl TensorOptions {
    /// Returns `plan` with the division of layers that these options choose.
    pub fn divide(&self, plan: ParallelPlan) -> ParallelPlan {
        ParallelPlan { split: self.split, sequence_parallel: self.sequence_parallel == Switch::On, ..plan }
    }
}
