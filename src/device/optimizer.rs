//! Contract of the optimizers' steps over flat slices of parameters.

use super::memory::MemoryOperations;
use crate::sums::ExactSum;

/// Indices into the values of an optimizer that change from step to step.
///
/// They are kept in the device's memory, so that all other operations of a step are the same each
/// time and can be recorded.
pub mod update {
    /// Learning rate.
    pub const LEARNING_RATE: usize = 0;
    /// Factor of the gradient, for clipping.
    pub const GRADIENT_SCALE: usize = 1;
    /// 1 − β₁ᵗ, for Adam.
    pub const BIAS_CORRECTION1: usize = 2;
    /// 1 − β₂ᵗ, for Adam.
    pub const BIAS_CORRECTION2: usize = 3;
    /// Number of values.
    pub const LEN: usize = 4;
}

/// An optimizer's rule with the constants that are the same in every step.
#[derive(Debug, Clone, Copy)]
pub enum OptimizerStep {
    /// Stochastic gradient descent. One slot: the momentum buffer; none if the momentum is 0.
    Sgd(SgdStep),
    /// Adam or AdamW. Two slots: the first and the second moment.
    Adam(AdamStep),
    /// Lion. One slot: the moment.
    Lion(LionStep),
}

/// Constants of stochastic gradient descent, as `torch.optim.SGD` defines them.
#[derive(Debug, Clone, Copy)]
pub struct SgdStep {
    /// Decay rate of the momentum buffer; 0 for none.
    pub momentum: f32,
    /// True for Nesterov's momentum.
    pub nesterov: bool,
    /// Factor of the parameter that is added to the gradient.
    pub weight_decay: f32,
}

/// Constants of Adam (Kingma and Ba, 2015) or of AdamW (Loshchilov and Hutter, 2019), as
/// `torch.optim` defines them.
#[derive(Debug, Clone, Copy)]
pub struct AdamStep {
    /// Decay rate of the first moment.
    pub beta1: f64,
    /// Decay rate of the second moment.
    pub beta2: f64,
    /// Constant added to the root of the second moment.
    pub epsilon: f32,
    /// Weight decay: decoupled (AdamW) or added to the gradient (Adam).
    pub weight_decay: f32,
    /// True for AdamW.
    pub decoupled: bool,
}

/// Constants of Lion (Chen et al., 2023, Algorithm 2).
#[derive(Debug, Clone, Copy)]
pub struct LionStep {
    /// Weight of the moment in the interpolation with the gradient, whose sign is the update.
    pub beta1: f64,
    /// Decay rate of the moment.
    pub beta2: f64,
    /// Decoupled weight decay.
    pub weight_decay: f32,
}

/// Returns the factor that scales a gradient of norm `norm` to at most `largest`, as
/// `torch.nn.utils.clip_grad_norm_`: 0 if the norm is infinite, NaN if it is NaN.
pub fn clip_factor(norm: f64, largest: f64) -> f64 {
    let factor = largest / (norm + 1e-6);
    // `f64::min` would return 1 for NaN
    if factor > 1.0 { 1.0 } else { factor }
}

/// Updates of parameters, and the squares that the gradient's norm is made of.
pub trait OptimizerOperations: MemoryOperations {
    /// Updates `parameters` in one pass and adds the squares of the unscaled gradient to
    /// `sums[totals::GRADIENT_SQUARES]`.
    ///
    /// `update` holds the values that change from step to step (see [`update`]). Each of `slots` is
    /// as long as `parameters`; [`OptimizerStep`] says how many there are.
    fn optimizer_step(
        &self,
        step: &OptimizerStep,
        update: Self::View<'_>,
        parameters: Self::ViewMut<'_>,
        gradients: Self::View<'_>,
        slots: &mut [Self::ViewMut<'_>],
        sums: Self::ViewMut<'_>,
    );

    /// Lets the steps from here on run beside the operations that are started after them, until
    /// [`OptimizerOperations::join_steps`]: these must neither use the parameters and gradients of a step nor
    /// the gradient's squares in `sums`. By default nothing runs beside anything.
    fn fork_steps(&self) {}

    /// Ends what [`OptimizerOperations::fork_steps`] began: operations that are started from here on wait for
    /// all steps.
    fn join_steps(&self) {}

    /// Returns the number of elements in which a sum of squares is kept: by default the words of an
    /// [`ExactSum`].
    fn squares_len(&self) -> usize {
        size_of::<ExactSum>() / size_of::<f32>()
    }

    /// Adds the squares of `values` to the sum in `squares`, which has
    /// [`OptimizerOperations::squares_len`] elements that are 0 at first.
    fn sum_squares(&self, values: Self::View<'_>, squares: Self::ViewMut<'_>);

    /// Writes the factor that scales a gradient to a norm of at most `largest` to
    /// `update[update::GRADIENT_SCALE]`, which is not read: see [`clip_factor`]. `squares` has the sums of
    /// its squares, as [`OptimizerOperations::sum_squares`] forms them, one behind the other.
    fn clip(&self, squares: Self::View<'_>, largest: f64, update: Self::ViewMut<'_>);

    /// Returns the sum in `squares`, which [`OptimizerOperations::sum_squares`] has formed. On the CPU
    /// it is exact; on a GPU it was rounded.
    fn exact_squares(&self, squares: &[f32]) -> ExactSum {
        bytemuck::pod_read_unaligned(bytemuck::cast_slice(squares))
    }
}

#[cfg(test)]
mod tests {
    use super::clip_factor;

    #[test]
    fn clipping_never_lengthens() {
        assert_eq!(clip_factor(0.5, 1.0), 1.0);
        assert!((clip_factor(4.0, 1.0) - 0.25).abs() < 1e-6);
        assert_eq!(clip_factor(f64::INFINITY, 1.0), 0.0);
        assert!(clip_factor(f64::NAN, 1.0).is_nan());
    }
}
