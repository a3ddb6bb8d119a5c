//! A device's buffer on the host, for messages and plans: pieces come from the device, and go back when MPI is done with them.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::ops::Range;

use crate::Result;
use crate::comm::algorithm::Cut;
use crate::comm::extent::Extent;
use crate::comm::host::{Host, Kind};
use crate::comm::ongoing::Order;
use crate::comm::progress::{Arena, Terms};
use crate::comm::raw::Raw;
use crate::comm::{Communicator, Operation};
use crate::device::Staged;

/// A staged buffer.
pub(super) struct Mirror<S> {
    staged: S,
    host: Host,
    cut: Cut,
    /// Which values are to go back.
    arrives: Range<usize>,
}

impl<S: Staged> Mirror<S> {
    /// Starts to bring the values in `departs` to the host, a piece for each chunk of `order`; those in `arrives` are to go back.
    ///
    /// # Errors
    /// There is no memory for what arrives.
    pub(super) fn new(
        communicator: &Communicator,
        mut staged: S,
        order: &Order,
        (len, value_bytes): (usize, usize),
        (departs, arrives): (Range<usize>, Range<usize>),
    ) -> Result<Mirror<S>> {
        let element = if value_bytes == size_of::<u16>() { &Kind::BF16 } else { &Kind::F32 };
        let values = staged.values();
        // SAFETY: they stay where they are until the staged buffer is dropped, which comes with the host's; `start` checked their number.
        let host =
            unsafe { Host::new(&communicator.raw, (values, values), element, Operation::Sum, order.room())? };
        let cut = order.cut(len);
        for chunk in 0..cut.chunks() {
            staged.fetch(chunk, &mut cut.all_pieces(chunk).map(|piece| common(&piece, &departs)));
        }
        Ok(Mirror { staged, host, cut, arrives })
    }

    /// True when the first messages can be posted.
    pub(super) fn is_ready(&mut self) -> bool {
        self.staged.is_here(0)
    }

    /// The buffer; the operation is done.
    pub(super) fn into_staged(self, raw: &Raw) -> S {
        self.host.retire(raw);
        self.staged
    }
}

/// What two ranges have in common.
fn common(one: &Range<usize>, other: &Range<usize>) -> Range<usize> {
    let start = one.start.max(other.start);
    start..one.end.min(other.end).max(start)
}

// SAFETY: the pointers are those of the staged buffer, which stays where it is and is as long as the operation, which `start` checks, and of
// the host's inbox.
unsafe impl<S: Staged> Arena for Mirror<S> {
    fn extent(&self, raw: &Raw, count: usize) -> Extent {
        self.host.extent(raw, count)
    }

    fn value(&self, at: usize) -> *mut c_void {
        self.host.value(at)
    }

    fn inbox(&self, lane: usize, at: usize) -> *mut c_void {
        self.host.inbox(lane, at)
    }

    fn combine(&mut self, lane: usize, terms: &Terms) {
        self.host.combine(lane, terms);
    }

    fn is_combined(&mut self, lane: usize) -> bool {
        self.host.is_combined(lane)
    }

    fn is_here(&mut self, chunk: usize) -> bool {
        self.staged.is_here(chunk)
    }

    fn leave(&mut self, chunk: usize) {
        self.staged.deliver(&mut self.cut.all_pieces(chunk).map(|piece| common(&piece, &self.arrives)));
    }
}
