//! A bucket on its way from gradients to new parameters.

use std::ops::Range;

use crate::comm::Transfer;
use crate::device::{Device, Portable};
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
pub(super) enum State<B: Portable> {
    Idle,
    Reducing(Transfer<B>),
    Gathering(Transfer<B>),
}

impl<D: Device> Bucket<D> {
    /// Waits for the sum, if it is under way, and puts it where the gradient was.
    pub(super) fn put_sum(&mut self, gradients: &mut FlatBuffer<D>) {
        if let State::Reducing(transfer) = std::mem::replace(&mut self.state, State::Idle) {
            gradients.put(self.segment, transfer.wait());
        }
    }

    /// What this rank updates of elements `range` of the segment; empty, perhaps with its end before its start, if nothing.
    pub(super) fn owned_of(&self, range: &Range<usize>) -> Range<usize> {
        range.start.max(self.owned.start)..range.end.min(self.owned.end)
    }
}

impl<B: Portable> State<B> {
    /// Moves the operation on; true when waiting would return at once.
    pub(super) fn test(&mut self) -> bool {
        match self {
            State::Idle => true,
            State::Reducing(transfer) | State::Gathering(transfer) => transfer.test(),
        }
    }
}
