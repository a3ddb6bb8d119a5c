//! Draws of dropout as arguments of kernels.

use crate::device::DropoutMask;

/// `struct DropoutMask` of the kernels.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(super) struct DropoutDraws {
    seed: u64,
    step: u32,
    module: u32,
    threshold: u32,
    scale: f32,
}

impl DropoutDraws {
    /// Returns the draws of `mask`.
    pub(super) fn of(mask: &DropoutMask) -> DropoutDraws {
        let DropoutMask { seed, step, module, .. } = *mask;
        DropoutDraws { seed, step, module, threshold: mask.threshold(), scale: mask.scale() }
    }
}
