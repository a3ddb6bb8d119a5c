//! The contract between a buffer and what moves or adds its parts.
//!
//! An operation borrows a [`Buffer`] as an [`Arena`]: two places that MPI may read and write, one for the
//! buffer's values and one, the *inbox*, for what arrives and is yet to be combined with them. Host memory is
//! such a place as it is ([`HostArena`]). A device lends its own memory to a CUDA-aware MPI, or copies the
//! values to pinned host memory chunk by chunk and back (*staged*).
//!
//! A chunk travels in this order: [`Arena::fetch`] brings its values to where MPI may read them;
//! [`Arena::is_here`] says that they are there, and the messages of a round are posted; when they are complete,
//! [`Arena::combine`] combines the buffer with the inbox and [`Arena::is_combined`] says that it has; after the
//! last round [`Arena::deliver`] brings the new values back to the buffer.
#![allow(unsafe_code)]

use std::ops::Range;

use half::bf16;

use super::element::{add_bf16_terms, fold_terms};
use super::{Element, ElementType, Memory, Operation, scratch};
use crate::Result;

/// The requirements of one operation on a buffer.
#[derive(Debug, Clone, Copy)]
pub struct Needs {
    /// Chunks into which the buffer is cut.
    pub num_chunks: usize,
    /// Elements of the inbox, over all lanes.
    pub inbox_len: usize,
    /// The reduction, if there is one.
    pub operation: Option<Operation>,
    /// MPI reads and writes device memory.
    pub is_cuda_aware: bool,
}

/// Terms in the inbox that are combined with elements of the buffer, in rank order.
#[derive(Debug, Clone)]
pub struct Terms {
    /// The elements of the buffer.
    pub range: Range<usize>,
    /// The position of the first term in the inbox, in elements.
    pub first: usize,
    /// The number of terms in the inbox.
    pub count: usize,
    /// The distance from one term to the next, in elements.
    pub stride: usize,
    /// The position of the buffer's own term among them.
    pub own: usize,
}

/// Memory that an operation works on.
///
/// # Safety
/// `values` and `inbox` point to memory that MPI may read and write, that stays where it is until the value is
/// dropped, and that holds the elements of the buffer and of the inbox that it was made for.
pub unsafe trait Arena {
    /// Returns the place of element 0 of the buffer.
    fn values(&self) -> *mut u8;

    /// Returns the place of element 0 of the inbox.
    fn inbox(&self) -> *mut u8;

    /// Starts bringing `ranges`, the values of chunk `chunk` that are sent, to `values`.
    fn fetch(&mut self, _chunk: usize, _ranges: &mut dyn Iterator<Item = Range<usize>>) {}

    /// Returns true when MPI may read and write the values of chunk `chunk`.
    fn is_here(&mut self, _chunk: usize) -> bool {
        true
    }

    /// Starts combining elements of the buffer with `terms`. At most one combination is under way in a lane.
    fn combine(&mut self, lane: usize, terms: &Terms);

    /// Returns true when the combination in lane `lane` is complete and MPI may read the result.
    fn is_combined(&mut self, _lane: usize) -> bool {
        true
    }

    /// Starts bringing `ranges`, the values of a chunk that have changed, back to the buffer.
    fn deliver(&mut self, _ranges: &mut dyn Iterator<Item = Range<usize>>) {}
}

/// A buffer on loan to an operation. Host memory is stored inline, so that an operation on it allocates nothing.
pub enum Loan {
    /// Host memory.
    Host(HostArena),
    /// Memory of a device, or its staging memory.
    Device(Box<dyn Arena>),
}

impl Loan {
    /// Returns the arena.
    pub fn arena(&mut self) -> &mut dyn Arena {
        match self {
            Loan::Host(arena) => arena,
            Loan::Device(arena) => &mut **arena,
        }
    }
}

/// Values that messages carry: host memory, or a device's.
///
/// # Safety
/// The memory that [`Buffer::lend`] lends stays where it is, and valid, until [`Buffer::restore`] is called,
/// also when the value itself is moved or leaked.
#[allow(clippy::len_without_is_empty)] // operations take empty buffers as they take others
pub unsafe trait Buffer: 'static {
    /// True for host memory, which MPI can read at any time.
    const IS_ON_HOST: bool;

    /// Returns the number of values.
    fn len(&self) -> usize;

    /// Returns the type of the values.
    fn element_type(&self) -> ElementType;

    /// Lends the values to an operation. Nobody but the operation touches them until [`Buffer::restore`].
    ///
    /// # Errors
    /// There is no memory for the inbox or for staging, or the device does not know the reduction.
    fn lend(&mut self, needs: &Needs) -> Result<Loan>;

    /// Ends the loan; the operation has changed the values in `changed`.
    fn restore(&mut self, _changed: Range<usize>) {}
}

/// Host memory whose elements stay where they are when the value itself is moved: MPI can be given it.
///
/// # Safety
/// `as_ref` and `as_mut` give the same memory each time, and moving or leaking the value neither moves nor frees
/// it.
pub unsafe trait HostBuffer: AsRef<[Self::Element]> + AsMut<[Self::Element]> + 'static {
    /// The type of the values.
    type Element: Element;
}

// SAFETY: a vector's elements are on the heap, and only growing or dropping it moves or frees them.
unsafe impl<T: Element> HostBuffer for Vec<T> {
    type Element = T;
}

// SAFETY: the elements are in a memory map of their own, which lives as long as the value.
unsafe impl<T: Element> HostBuffer for Memory<T> {
    type Element = T;
}

// SAFETY: a `HostBuffer` keeps its elements in place.
unsafe impl<B: HostBuffer> Buffer for B {
    const IS_ON_HOST: bool = true;

    fn len(&self) -> usize {
        self.as_ref().len()
    }

    fn element_type(&self) -> ElementType {
        B::Element::TYPE
    }

    fn lend(&mut self, needs: &Needs) -> Result<Loan> {
        let values = self.as_mut().as_mut_ptr().cast();
        let operation = needs.operation.unwrap_or(Operation::Sum);
        let places = Places { values, sums: values };
        // SAFETY: the buffer keeps its elements in place until the loan ends.
        unsafe { HostArena::new(places, B::Element::TYPE, operation, needs.inbox_len) }.map(Loan::Host)
    }
}

/// The first values of a buffer, to be sent, received or reduced without the rest.
#[derive(Debug)]
pub struct Front<B> {
    /// The whole buffer.
    pub buffer: B,
    /// The number of values, at most those of the buffer.
    pub len: usize,
}

// SAFETY: the values are those of the inner buffer, of which there are at least as many.
unsafe impl<B: Buffer> Buffer for Front<B> {
    const IS_ON_HOST: bool = B::IS_ON_HOST;

    fn len(&self) -> usize {
        assert!(self.len <= self.buffer.len(), "{} of {} values", self.len, self.buffer.len());
        self.len
    }

    fn element_type(&self) -> ElementType {
        self.buffer.element_type()
    }

    fn lend(&mut self, needs: &Needs) -> Result<Loan> {
        self.buffer.lend(needs)
    }

    fn restore(&mut self, changed: Range<usize>) {
        self.buffer.restore(changed);
    }
}

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
    /// The place of combined value 0: `values`, or a pointer offset so that element i matches `values[i]`.
    pub sums: *mut u8,
}

impl HostArena {
    /// Makes an arena with an inbox of `inbox_len` elements from the scratch memory.
    ///
    /// # Errors
    /// There is no memory for the inbox.
    ///
    /// # Safety
    /// The values at `places` are valid, and nobody else's, until the arena is dropped: at `values` all that the
    /// operation sends or receives, at `sums` all that it combines.
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
        // SAFETY: `HostArena::new` was promised these values, and between rounds MPI has none of them.
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
                // SAFETY: `HostArena::new` was promised these values, and between rounds MPI has none of them.
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
