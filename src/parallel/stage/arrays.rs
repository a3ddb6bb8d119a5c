//! The arrays of a stage's passes.

use crate::device::Device;

/// The arrays of one micro-batch on its way through a stage.
pub struct Activations<D: Device> {
    /// `[rows, targets_per_row]`, in the last stage.
    pub(super) targets: D::Buffer,
    pub(super) values: Vec<Option<D::Buffer>>,
    pub(super) saved: Vec<Option<D::Buffer>>,
}

/// All arrays of [`Activations`] but the values at both ends: what recomputation makes again.
pub struct Inner<D: Device> {
    pub(super) values: Vec<Option<D::Buffer>>,
    pub(super) saved: Vec<Option<D::Buffer>>,
}

/// The gradients of one micro-batch's values.
pub struct Gradients<D: Device> {
    pub(super) values: Vec<Option<D::Buffer>>,
    /// Which of them have been turned back through the activation before them.
    pub(super) is_turned: Vec<bool>,
}

impl<D: Device> Activations<D> {
    /// Where the values that come into the stage are, unless they are away.
    pub fn input(&mut self) -> &mut Option<D::Buffer> {
        self.values.first_mut().expect("there is an array for position 0")
    }

    /// Where the values that leave the stage are, unless they are away.
    pub fn output(&mut self) -> &mut Option<D::Buffer> {
        self.values.last_mut().expect("there is an array for position 0")
    }

    /// Where samples go in the stages that take them: inputs and targets.
    pub fn samples(&mut self) -> (&mut Option<D::Buffer>, &mut D::Buffer) {
        (self.values.first_mut().expect("there is an array for position 0"), &mut self.targets)
    }

    /// Exchanges the arrays between the ends for those of `inner`.
    pub fn swap_inner(&mut self, inner: &mut Inner<D>) {
        let len = inner.values.len();
        self.values[1..1 + len].swap_with_slice(&mut inner.values);
        self.saved.swap_with_slice(&mut inner.saved);
    }
}

impl<D: Device> Gradients<D> {
    /// Where the gradient of what comes into the stage is, unless it is away.
    pub fn input(&mut self) -> &mut Option<D::Buffer> {
        self.values.first_mut().expect("there is an array for position 0")
    }

    /// Where the gradient of what leaves the stage is, unless it is away.
    pub fn output(&mut self) -> &mut Option<D::Buffer> {
        self.values.last_mut().expect("there is an array for position 0")
    }
}
