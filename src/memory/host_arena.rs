//! [`HostArena`]: host memory as an [`Arena`].
#![allow(unsafe_code)]

use half::bf16;
use smallvec::SmallVec;

use super::arena::{Arena, Terms};
use super::combine::{add_bf16_terms, fold_terms};
use super::element::{ElementType, Operation};
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

    /// Returns the elements of all `terms`, which are of type `T`.
    ///
    /// # Safety
    /// The terms are in the values and the inbox that were given to `HostArena::new`, and MPI accesses
    /// none of them.
    unsafe fn slices<'a, T: bytemuck::Pod>(&self, terms: &Terms<'_>) -> SmallVec<[&'a mut [T]; 32]> {
        let Terms { range, own_stride, first, num_received, stride, own, .. } = terms;
        let term = |index: usize| {
            let place = if own.contains(&index) {
                let start = range.start + (index - own.start) * own_stride;
                self.places.sums.wrapping_add(start * size_of::<T>())
            } else {
                let slot = if index < own.start { index } else { index - own.len() };
                self.inbox_start.wrapping_add((first + slot * stride) * size_of::<T>())
            };
            // SAFETY: the caller guarantees the terms, which do not overlap.
            unsafe { std::slice::from_raw_parts_mut(place.cast(), range.len()) }
        };
        (0..num_received + own.len()).map(term).collect()
    }
}

// SAFETY: the caller of `HostArena::new` guarantees the values; the arena owns the inbox.
unsafe impl Arena for HostArena {
    fn values(&self) -> *mut u8 {
        self.places.values
    }

    fn inbox(&self) -> *mut u8 {
        self.inbox_start
    }

    fn combine(&mut self, _lane: usize, terms: &Terms<'_>) {
        if terms.range.is_empty() {
            // there may be no inbox
            return;
        }
        macro_rules! fold {
            ($element:ty) => {{
                // SAFETY: the caller of `HostArena::new` guarantees these values, the received terms
                // fit the inbox, and between the rounds of a chunk MPI accesses neither.
                let mut slices = unsafe { self.slices::<$element>(terms) };
                let result = fold_terms(&mut slices, terms.own.start, terms.merges, self.operation);
                if terms.own.is_empty() {
                    let start = terms.range.start * size_of::<$element>();
                    let into = self.places.sums.wrapping_add(start).cast::<$element>();
                    // SAFETY: as above; the result is in the inbox, which does not overlap the values.
                    unsafe { into.copy_from_nonoverlapping(slices[result].as_ptr(), terms.range.len()) };
                }
            }};
        }
        match self.element {
            ElementType::F32 => fold!(f32),
            ElementType::F64 => fold!(f64),
            ElementType::I32 => fold!(i32),
            ElementType::I64 => fold!(i64),
            ElementType::U8 => fold!(u8),
            ElementType::Bf16 => {
                assert!(
                    self.operation == Operation::Sum && !terms.own.is_empty(),
                    "bfloat16 has sums only, with a term of each rank"
                );
                // SAFETY: as for the other types.
                let mut slices = unsafe { self.slices::<bf16>(terms) };
                add_bf16_terms(&mut slices, terms.own.start, terms.merges);
            }
        }
    }
}

impl Drop for HostArena {
    fn drop(&mut self) {
        self.inbox.take().into_iter().for_each(scratch::give_back);
    }
}
