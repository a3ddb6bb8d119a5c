//! [`HostArena`]: host memory as an [`Arena`].
#![allow(unsafe_code)]

use half::bf16;

use super::arena::{Arena, Terms};
use super::combine::{add_bf16_terms, fold_terms};
use super::element::{Element, ElementType, Operation};
use super::{Memory, scratch};
use crate::Result;

/// Host memory as an [`Arena`], of elements whose type is known at run time.
pub struct HostArena {
    places: Places,
    inbox: Option<Memory<u64>>,
    /// The address of the inbox's element 0.
    inbox_start: *mut u8,
    element: ElementType,
    operation: Operation,
}

/// The addresses of a host buffer's values.
#[derive(Debug, Clone, Copy)]
pub struct Places {
    /// The address of value 0, from which values are sent and into which they are received.
    pub values: *mut u8,
    /// The address of combined value 0: `values`, or a pointer offset so that element i matches
    /// `values[i]`.
    pub sums: *mut u8,
}

impl HostArena {
    /// Makes an arena with an inbox of `inbox_len` elements from the scratch memory.
    ///
    /// # Errors
    /// There is no memory for the inbox.
    ///
    /// # Safety
    /// Until the arena is dropped, nobody else accesses the values at `places`, and these are
    /// valid: at `values` all that the operation sends or receives, at `sums` all that it combines.
    pub unsafe fn new(
        places: Places,
        element: ElementType,
        operation: Operation,
        inbox_len: usize,
    ) -> Result<HostArena> {
        let mut inbox = (inbox_len > 0).then(|| scratch::take(inbox_len * element.bytes())).transpose()?;
        let inbox_start = inbox.as_mut().map_or(std::ptr::null_mut(), |memory| memory.as_mut_ptr().cast());
        Ok(HostArena { places, inbox, inbox_start, element, operation })
    }

    /// Combines elements of type `T` in place.
    fn combine_as<T: Element>(&mut self, terms: &Terms) {
        let own = self.places.sums.wrapping_add(terms.range.start * size_of::<T>());
        // SAFETY: the caller of `HostArena::new` guarantees these values, `inbox_len` terms fit the
        // inbox, and between the rounds of a chunk MPI accesses neither.
        let (own, inbox) = unsafe {
            let own = std::slice::from_raw_parts_mut(own.cast::<T>(), terms.range.len());
            (own, terms_in(self.inbox_start, terms))
        };
        fold_terms(own, inbox, terms, self.operation);
    }
}

/// Returns the part of `inbox` that holds `terms`.
///
/// # Safety
/// The terms are within the inbox and of type `T`, and MPI does not access them.
unsafe fn terms_in<'a, T: bytemuck::Pod>(inbox: *mut u8, terms: &Terms) -> &'a mut [T] {
    let first = inbox.wrapping_add(terms.first * size_of::<T>());
    // SAFETY: the caller guarantees the terms; the slice does not contain the other lane's part,
    // which MPI may access.
    unsafe { std::slice::from_raw_parts_mut(first.cast(), terms.count * terms.stride) }
}

// SAFETY: the caller of `HostArena::new` guarantees the values; the arena owns the inbox.
unsafe impl Arena for HostArena {
    fn values(&self) -> *mut u8 {
        self.places.values
    }

    fn inbox(&self) -> *mut u8 {
        self.inbox_start
    }

    fn combine(&mut self, _lane: usize, terms: &Terms) {
        if terms.range.is_empty() {
            // there may be no inbox
            return;
        }
        match self.element {
            ElementType::F32 => self.combine_as::<f32>(terms),
            ElementType::F64 => self.combine_as::<f64>(terms),
            ElementType::I32 => self.combine_as::<i32>(terms),
            ElementType::I64 => self.combine_as::<i64>(terms),
            ElementType::U8 => self.combine_as::<u8>(terms),
            ElementType::Bf16 => {
                assert_eq!(self.operation, Operation::Sum, "bfloat16 has sums only");
                let own = self.places.sums.wrapping_add(terms.range.start * size_of::<bf16>());
                // SAFETY: the caller of `HostArena::new` guarantees these values, `inbox_len` terms
                // fit the inbox, and between the rounds of a chunk MPI accesses neither.
                let (own, inbox) = unsafe {
                    let own = std::slice::from_raw_parts_mut(own.cast::<bf16>(), terms.range.len());
                    (own, terms_in(self.inbox_start, terms))
                };
                add_bf16_terms(own, inbox, terms);
            }
        }
    }
}

impl Drop for HostArena {
    fn drop(&mut self) {
        self.inbox.take().into_iter().for_each(scratch::give_back);
    }
}
