//! Host memory for plans: where values are, what arrives, and sums of the two.
#![allow(unsafe_code)]

use std::ffi::c_void;

use super::extent::Extent;
use super::progress::{Arena, Terms};
use super::raw::Raw;
use super::{Element, Operation, bf16};
use crate::Result;
use crate::memory::Memory;

/// Host memory, of elements whose type only its functions know.
pub(super) struct Host {
    /// What is sent, and received into.
    values: *mut u8,
    /// Where combinations are: `values`, or other memory, taken to begin as far before it as theirs does in `values`.
    sums: *mut u8,
    /// Where `memory` is.
    inbox: *mut u8,
    /// None where nothing is combined.
    memory: Option<Memory<u64>>,
    /// The elements of one lane's inbox.
    room: usize,
    operation: Operation,
    element: &'static Kind,
}

/// What there is to know about a type of elements.
pub(super) struct Kind {
    bytes: usize,
    extent: fn(&Raw, usize) -> Extent,
    /// Combines elements at a place with terms that begin somewhere in an inbox.
    combine: unsafe fn(*mut u8, *mut u8, &Terms, Operation),
}

impl Kind {
    /// Values that a device keeps in bfloat16, which MPI knows nothing of: it need not look at what it carries.
    pub(super) const BF16: Kind =
        Kind { bytes: size_of::<u16>(), extent: Raw::extent::<u16>, combine: combine_bf16 };

    /// Values of `f32`.
    pub(super) const F32: Kind = Kind::of::<f32>();

    pub(super) const fn of<T: Element>() -> Kind {
        Kind { bytes: size_of::<T>(), extent: Raw::extent::<T>, combine: combine::<T> }
    }
}

/// # Safety
/// There are as many elements at `own`, and terms at `inbox`, as `terms` says, and nobody else's.
unsafe fn combine<T: Element>(own: *mut u8, inbox: *mut u8, terms: &Terms, operation: Operation) {
    // SAFETY: the caller's promise.
    let (own, inbox) = unsafe {
        let own = std::slice::from_raw_parts_mut(own.cast::<T>(), terms.range.len());
        (own, std::slice::from_raw_parts_mut(inbox.cast::<T>(), terms.count * terms.stride))
    };
    fold(own, inbox, terms, operation);
}

/// The same for sums of bfloat16, formed in `f32` and rounded once.
///
/// # Safety
/// As for [`combine`].
unsafe fn combine_bf16(own: *mut u8, inbox: *mut u8, terms: &Terms, operation: Operation) {
    assert_eq!(operation, Operation::Sum, "of bfloat16 there are sums only");
    // SAFETY: the caller's promise.
    let (own, inbox) = unsafe {
        let own = std::slice::from_raw_parts_mut(own.cast::<u16>(), terms.range.len());
        (own, std::slice::from_raw_parts(inbox.cast::<u16>(), terms.count * terms.stride))
    };
    bf16::add(own, inbox, terms);
}

// SAFETY: whoever makes one promises that `values` and `sums` stay valid; the inbox has `room` elements for each lane.
unsafe impl Arena for Host {
    fn extent(&self, raw: &Raw, count: usize) -> Extent {
        (self.element.extent)(raw, count)
    }

    fn value(&self, at: usize) -> *mut c_void {
        self.values.wrapping_add(at * self.element.bytes).cast()
    }

    fn inbox(&self, lane: usize, at: usize) -> *mut c_void {
        self.inbox.wrapping_add((lane * self.room + at) * self.element.bytes).cast()
    }

    fn combine(&mut self, lane: usize, terms: &Terms) {
        if terms.range.is_empty() {
            // there may be no inbox
            return;
        }
        let own = self.sums.wrapping_add(terms.range.start * self.element.bytes);
        let inbox: *mut c_void = self.inbox(lane, 0);
        // SAFETY: the range is within the buffer, the terms within the lane's part of the inbox, and between the rounds MPI has nothing to do
        // with either.
        unsafe { (self.element.combine)(own, inbox.cast(), terms, self.operation) }
    }

    fn is_combined(&mut self, _: usize) -> bool {
        true
    }
}

impl Host {
    /// Elements at `values`, whose combinations are to be at `sums`; what arrives has `room` elements in each lane and `inbox` in all.
    ///
    /// # Errors
    /// There is no memory for what arrives.
    ///
    /// # Safety
    /// There are as many elements as the operation has, at `sums` as far as it combines them; they are valid and nobody else's until it is done.
    pub(super) unsafe fn new(
        raw: &Raw,
        (values, sums): (*mut u8, *mut u8),
        element: &'static Kind,
        operation: Operation,
        (room, inbox): (usize, usize),
    ) -> Result<Host> {
        let memory = if inbox > 0 { Some(raw.take_scratch(inbox * element.bytes)?) } else { None };
        let mut host = Host { values, sums, inbox: std::ptr::null_mut(), memory, room, operation, element };
        if let Some(memory) = &mut host.memory {
            host.inbox = memory.as_mut_ptr().cast();
        }
        Ok(host)
    }

    /// Gives back the memory that others can use.
    pub(super) fn retire(self, raw: &Raw) {
        self.memory.into_iter().for_each(|memory| raw.recycle(memory));
    }
}

/// Combines `own` with the terms in `inbox`, in order, a block at a time so that it stays in cache.
fn fold<T: Element>(own: &mut [T], inbox: &mut [T], terms: &Terms, operation: Operation) {
    const BLOCK: usize = 4096;
    let len = own.len();
    for start in (0..len).step_by(BLOCK) {
        let end = len.min(start + BLOCK);
        let term = |index: usize| index * terms.stride + start..index * terms.stride + end;
        let own = &mut own[start..end];
        // the terms before this rank's own in order, then that (a + b is b + a to the bit), then the others
        if terms.own > 0 {
            for index in 1..terms.own {
                let (first, later) = inbox.split_at_mut(terms.stride);
                let from = term(index - 1);
                T::fold(operation, &mut first[start..end], &later[from]);
            }
            T::fold(operation, own, &inbox[start..end]);
        }
        for index in terms.own..terms.count {
            T::fold(operation, own, &inbox[term(index)]);
        }
    }
}
