//! A bucket on its way from gradients to new parameters.

use std::ops::Range;

use crate::comm::Pending;
use crate::device::Device;
use crate::nn::FlatBuffer;

/// One bucket: a segment of the flat buffers.
pub(super) struct Bucket<D: Device> {
    pub(super) segment: usize,
    pub(super) first_tensor: usize,
    /// The part that this rank updates.
    pub(super) owned: Range<usize>,
    pub(super) state: State<D::Buffer>,
}

/// Which operation is under way, if any.
pub(super) enum State<B> {
    Idle,
    Reducing(Pending<B>),
    Gathering(Pending<B>),
}

impl<D: Device> Bucket<D> {
    /// Waits for the sum, if it is under way, and puts it where the gradient was.
    pub(super) fn put_sum(&mut self, gradients: &mut FlatBuffer<D>) {
        if let State::Reducing(pending) = std::mem::replace(&mut self.state, State::Idle) {
            gradients.put(self.segment, pending.wait());
        }
    }

    /// What this rank updates of elements `range` of the segment; empty, perhaps with its end before its start, if nothing.
    pub(super) fn owned_of(&self, range: &Range<usize>) -> Range<usize> {
        range.start.max(self.owned.start)..range.end.min(self.owned.end)
    }
}

impl<B> State<B> {
    /// Moves the operation on; true when waiting would return at once.
    pub(super) fn test(&mut self) -> bool {
        match self {
            State::Idle => true,
            State::Reducing(pending) | State::Gathering(pending) => pending.test(),
        }
    }
}
