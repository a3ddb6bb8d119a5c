//! Tensors that two layers use, such as the weight of an embedding and of a tied output.
//!
//! Each use has a copy of the parameters, of the optimizer's slots and of the gradients, in a bucket of its
//! own, on the rank of its stage. After the reduction over the replicas the gradients of both uses are
//! added, the same sum on both sides, so the copies are updated alike and stay equal. Both buckets have the
//! same length, so a replica owns the same part of each. Only the first use counts in norms, digests and
//! checkpoints.

use crate::Result;
use crate::device::{Device, Role};
use crate::parallel::layout::TieEnd;

/// A tensor that is used twice, as this rank sees it.
pub(super) struct Tie<D: Device> {
    /// The bucket of a use here.
    pub(super) segment: usize,
    pub(super) other: OtherUse<D>,
}

/// The other use of a tied tensor.
pub(super) enum OtherUse<D: Device> {
    /// In a bucket of this rank.
    Here(usize),
    /// On a rank of the stage axis.
    Peer {
        rank: usize,
        /// The gradient on its way to that rank, and from it.
        messages: [Option<D::Buffer>; 2],
    },
}

impl<D: Device> Tie<D> {
    /// Prepares for a tie whose use here is in bucket `segment`, of which this rank updates `len`
    /// elements; `segment_of` gives the bucket of a tensor. Not collective.
    ///
    /// # Errors
    /// The device does not have enough memory.
    pub(super) fn new(
        device: &D,
        segment: usize,
        other: TieEnd,
        len: usize,
        segment_of: impl Fn(usize) -> usize,
    ) -> Result<Tie<D>> {
        let other = match other {
            TieEnd::Here(tensor) => OtherUse::Here(segment_of(tensor)),
            TieEnd::Peer(rank) => {
                let message = || device.allocate(len, Role::Exact).map(Some);
                OtherUse::Peer { rank, messages: [message()?, message()?] }
            }
        };
        Ok(Tie { segment, other })
    }

    /// Returns the buckets of this rank.
    pub(super) fn segments(&self) -> impl Iterator<Item = usize> {
        let other = match self.other {
            OtherUse::Here(segment) => Some(segment),
            OtherUse::Peer { .. } => None,
        };
        [self.segment].into_iter().chain(other)
    }
}
