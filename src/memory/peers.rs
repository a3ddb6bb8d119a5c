//! [`PeerBuffer`], the contract between a device's buffer and the operations of ranks that map each
//! other's device memory.
//!
//! The ranks of a node can map the memory of each other's buffers. Then one of them, the *leader* of a
//! device, does the work of all: one kernel reads every rank's buffer and writes the results where they
//! belong. Nothing is copied to an inbox, and no other rank's device has anything to do. A message between
//! two of them is one copy, by the receiver.

use std::ops::Range;

/// The handle of device memory by which another process of the node maps it: 64 bytes, as CUDA's.
pub type MemoryHandle = [u8; 64];

/// The most ranks whose buffers one kernel reads and writes.
pub const MOST_PEERS: usize = 16;

/// Work of a leader on some elements of all ranks' buffers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerWork {
    /// The elements.
    pub range: Range<usize>,
    /// The kind of the work.
    pub kind: PeerWorkKind,
}

/// A kind of work on the same elements of all ranks' buffers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PeerWorkKind {
    /// Sums over the ranks, in the order of [`Subtrees`](crate::sums::Subtrees), are written to the
    /// buffers of these ranks.
    Sum {
        /// The ranks that get the sums.
        into: Range<usize>,
    },
    /// The elements of one rank are copied to the buffers of these ranks.
    Copy {
        /// The rank whose elements are copied.
        from: usize,
        /// The ranks that get them; `from` may be among them.
        into: Range<usize>,
    },
}

/// A buffer on loan to an operation of ranks that map it.
///
/// The ranks tell each other by messages when their values may be read and when the results are there, so
/// a device never waits for another process.
pub trait PeerBuffer {
    /// Returns true once earlier work on the values is complete, so that other processes may use them.
    fn is_computed(&mut self) -> bool;

    /// Returns the handle of the memory, if others map it. A failure is reported as a device's failures are.
    fn handle(&mut self) -> MemoryHandle;

    /// Starts `work` on the buffers of all ranks, whose memory has the handles `handles`; this one is number
    /// `rank`.
    fn start(&mut self, rank: usize, handles: &[MemoryHandle], work: &[PeerWork]);

    /// Returns true once the work is complete, and other processes may use the results.
    fn is_done(&mut self) -> bool;
}
