//! Draws of dropout as arguments of kernels.

use super::runtime::streams::Streams;
use crate::device::DropoutMask;

/// `struct DropoutMask` of the kernels.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(super) struct DropoutDraws {
    seed: u64,
    /// The address at which a recorded kernel reads the step; 0 for one that is started on its own.
    step_address: u64,
    step: u32,
    module: u32,
    threshold: u32,
    scale: f32,
}

impl DropoutDraws {
    /// Returns the draws of `mask`, for a kernel that is started or recorded next.
    pub(super) fn of(mask: &DropoutMask, streams: &Streams) -> DropoutDraws {
        let DropoutMask { seed, step, module, .. } = *mask;
        let (threshold, scale) = (mask.threshold(), mask.scale());
        DropoutDraws { seed, step_address: streams.step_address.take(), step, module, threshold, scale }
    }
}
