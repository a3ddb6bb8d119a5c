//! [`Bucket`], and its [`State`] between gradients and new parameters.

use std::ops::Range;

use crate::comm::Pending;
use crate::device::Device;
use crate::nn::FlatBuffer;

/// A bucket: a segment of the flat buffers.
pub(super) struct Bucket<D: Device> {
    pub(super) segment: usize,
    pub(super) first_tensor: usize,
    /// The part that this rank updates.
    pub(super) owned: Range<usize>,
    pub(super) state: State<D::Buffer>,
}

/// The operation on a bucket that is under way, if there is one.
pub(super) enum State<B> {
    Idle,
    Reducing(Pending<B>),
    Gathering(Pending<B>),
}

impl<D: Device> Bucket<D> {
    /// Waits for the sum, if it is under way, and replaces the gradient by it.
    pub(super) fn put_sum(&mut self, gradients: &mut FlatBuffer<D>) {
        if let State::Reducing(pending) = std::mem::replace(&mut self.state, State::Idle) {
            gradients.put(self.segment, pending.wait());
        }
    }

    /// Returns the part of `range` that this rank updates; an empty range, perhaps with its end
    /// before its start, if there is none.
    pub(super) fn owned_of(&self, range: &Range<usize>) -> Range<usize> {
        range.start.max(self.owned.start)..range.end.min(self.owned.end)
    }
}

impl<B> State<B> {
    /// Advances the operation; returns true when waiting would return at once.
    pub(super) fn test(&mut self) -> bool {
        match self {
            State::Idle => true,
            State::Reducing(pending) | State::Gathering(pending) => pending.test(),
        }
    }
}
