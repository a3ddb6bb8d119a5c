//! Host memory as an operation works on it.
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
    element: ElementType,
    operation: Operation,
}

/// The places of a host buffer's values.
#[derive(Debug, Clone, Copy)]
pub struct Places {
    /// The place of value 0, to be sent and received into.
    pub values: *mut u8,
    /// The place of combined value 0: `values`, or a pointer offset so that element i matches
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
    /// The values at `places` are valid, and nobody else's, until the arena is dropped: at `values`
    /// all that the operation sends or receives, at `sums` all that it combines.
    pub unsafe fn new(
        places: Places,
        element: ElementType,
        operation: Operation,
        inbox_len: usize,
    ) -> Result<HostArena> {
        let inbox = (inbox_len > 0).then(|| scratch::take(inbox_len * element.bytes())).transpose()?;
        Ok(HostArena { places, inbox, element, operation })
    }

    /// Combines in place elements of type `T`.
    fn combine_as<T: Element>(&mut self, terms: &Terms) {
        let own = self.places.sums.wrapping_add(terms.range.start * size_of::<T>());
        // SAFETY: `HostArena::new` was promised these values, and between rounds MPI has none of
        // them.
        let own = unsafe { std::slice::from_raw_parts_mut(own.cast::<T>(), terms.range.len()) };
        fold_terms(own, inbox_of(&mut self.inbox, terms), terms, self.operation);
    }
}

/// Returns the part of the inbox that holds `terms`.
fn inbox_of<'a, T: bytemuck::Pod>(inbox: &'a mut Option<Memory<u64>>, terms: &Terms) -> &'a mut [T] {
    let inbox: &mut [u64] = inbox.as_mut().map_or(&mut [], |memory| memory);
    &mut bytemuck::cast_slice_mut(inbox)[terms.first..][..terms.count * terms.stride]
}

// SAFETY: `HostArena::new` was promised the values; the inbox is memory of its own.
unsafe impl Arena for HostArena {
    fn values(&self) -> *mut u8 {
        self.places.values
    }

    fn inbox(&self) -> *mut u8 {
        self.inbox.as_ref().map_or(std::ptr::null_mut(), |memory| memory.as_ptr().cast_mut().cast())
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
                // SAFETY: `HostArena::new` was promised these values, and between rounds MPI has
                // none of them.
                let own = unsafe { std::slice::from_raw_parts_mut(own.cast::<bf16>(), terms.range.len()) };
                add_bf16_terms(own, inbox_of(&mut self.inbox, terms), terms);
            }
        }
    }
}

impl Drop for HostArena {
    fn drop(&mut self) {
        self.inbox.take().into_iter().for_each(scratch::give_back);
    }
}
