//! The settings of the weights of a rank and of the reduction of their gradients.

use crate::optim::OptimizerSettings;
use crate::parallel::batch::BatchDivision;
use crate::parallel::layout::ParallelPlan;
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

impl SyncSettings {
    /// Returns the division of batches among `num_replicas` replicas and the micro-batches of `plan`.
    pub fn division(&self, plan: &ParallelPlan, num_replicas: usize) -> BatchDivision {
        let num_micro_batches = plan.schedule.num_micro_batches;
        let reduces_each = self.reduces_each(num_replicas, num_micro_batches);
        BatchDivision::new(plan.summation, num_replicas, num_micro_batches, reduces_each)
    }

    /// Returns true if each of `num_micro_batches` is reduced over `num_replicas` by itself.
    pub fn reduces_each(&self, num_replicas: usize, num_micro_batches: usize) -> bool {
        let in_parts = self.accumulation == Accumulation::Parts;
        let are_divided = self.zero.is_some_and(ZeroStage::divides_gradients);
        in_parts && are_divided && num_replicas > 1 && num_micro_batches > 1
    }
}

/// The settings of [`Weights`](super::Weights) that depend on the run.
#[derive(Debug, Clone, Copy)]
pub struct WeightSettings {
    /// The settings of the reduction.
    pub sync: SyncSettings,
    /// The optimizer's rule and constants.
    pub optimizer: OptimizerSettings,
    /// The division of batches among replicas and micro-batches.
    pub division: BatchDivision,
    /// The time for which gathered parameters are kept in stage 3.
    pub gathering: Gathering,
    /// The seed of the initial parameters.
    pub seed: u64,
}
