//! A device's buffer where it is, for messages and plans: the device adds up what arrives.
#![allow(unsafe_code)]

use std::ffi::c_void;

use crate::comm::extent::Extent;
use crate::comm::progress::{Arena, Terms};
use crate::comm::raw::Raw;
use crate::device::{Addition, Settled};

/// A settled buffer.
pub(super) struct Settlement<S> {
    settled: S,
    value_bytes: usize,
    /// The values of one lane's inbox.
    room: usize,
}

impl<S: Settled> Settlement<S> {
    /// Values of `value_bytes` each, with `room` values in one lane's inbox.
    pub(super) fn new(settled: S, value_bytes: usize, room: usize) -> Settlement<S> {
        Settlement { settled, value_bytes, room }
    }

    /// The buffer; the operation is done.
    pub(super) fn into_settled(self) -> S {
        self.settled
    }
}

// SAFETY: the pointers are those of the settled buffer, which stays where it is and is as long as the operation, which `start` checks; the
// inbox was made to hold what the layout says.
unsafe impl<S: Settled> Arena for Settlement<S> {
    fn extent(&self, raw: &Raw, count: usize) -> Extent {
        // MPI has no type for bfloat16, and need not look at it
        if self.value_bytes == size_of::<u16>() { raw.extent::<u16>(count) } else { raw.extent::<f32>(count) }
    }

    fn value(&self, at: usize) -> *mut c_void {
        self.settled.values().wrapping_add(at * self.value_bytes).cast()
    }

    fn inbox(&self, lane: usize, at: usize) -> *mut c_void {
        self.settled.inbox().wrapping_add((lane * self.room + at) * self.value_bytes).cast()
    }

    fn combine(&mut self, lane: usize, terms: &Terms) {
        let Terms { range, count, stride, own } = terms.clone();
        self.settled.add(lane, &Addition { into: range, first: lane * self.room, terms: count, stride, own });
    }

    fn is_combined(&mut self, lane: usize) -> bool {
        self.settled.is_added(lane)
    }
}
