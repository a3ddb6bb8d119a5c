//! Buffers that messages carry, and their loan to an operation.
#![allow(unsafe_code)]

use std::ops::Range;

use super::Memory;
use super::arena::Arena;
use super::element::{Element, ElementType, Operation};
use super::host_arena::{HostArena, Places};
use super::peers::PeerBuffer;
use crate::{Error, Result};

/// The requirements of one operation on a buffer.
#[derive(Debug, Clone, Copy)]
pub struct Needs {
    /// The number of chunks into which the buffer is cut.
    pub num_chunks: usize,
    /// The number of elements of the inbox, over all lanes.
    pub inbox_len: usize,
    /// The reduction, if there is one.
    pub operation: Option<Operation>,
    /// True if MPI reads and writes device memory.
    pub is_cuda_aware: bool,
}

/// A buffer on loan to an operation. Host memory is stored inline, so that an operation on it
/// allocates nothing.
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
/// The memory that [`Buffer::lend`] lends stays where it is, and valid, until the value is dropped,
/// also when the value itself is moved or leaked.
#[allow(clippy::len_without_is_empty)] // operations take empty buffers as they take others
pub unsafe trait Buffer: 'static {
    /// True for host memory, which MPI can read at any time.
    const IS_ON_HOST: bool;

    /// Returns the number of values.
    fn len(&self) -> usize;

    /// Returns the type of the values.
    fn element_type(&self) -> ElementType;

    /// Lends the values to an operation.
    ///
    /// # Errors
    /// There is no memory for the inbox or for staging, or the device does not support the
    /// reduction.
    ///
    /// # Safety
    /// Until the loan is dropped, the buffer is not dropped, and only the operation touches it,
    /// within the elements of the buffer and of the inbox.
    unsafe fn lend(&mut self, needs: &Needs) -> Result<Loan>;

    /// Lends the values to a sum, or a copy, of ranks that map each other's device memory. Other ranks map
    /// this one's if `is_mapped`.
    ///
    /// # Errors
    /// They are not in the memory of a device, or the device does not support the reduction.
    ///
    /// # Safety
    /// As for [`Buffer::lend`].
    unsafe fn lend_to_peers(
        &mut self,
        _operation: Option<Operation>,
        _is_mapped: bool,
    ) -> Result<Box<dyn PeerBuffer>> {
        Err(Error::failed("mapping a buffer", "other processes map device memory only"))
    }

    /// Ends the loan; the operation has changed the values in `changed`.
    fn restore(&mut self, _changed: Range<usize>) {}
}

/// Host memory that MPI can be given, because its elements stay in place when the value itself is
/// moved.
///
/// # Safety
/// `as_ref` and `as_mut` give the same memory each time, and moving or leaking the value neither
/// moves nor frees it.
pub unsafe trait HostBuffer: AsRef<[Self::Element]> + AsMut<[Self::Element]> + 'static {
    /// The type of the values.
    type Element: Element;
}

// SAFETY: a vector's elements are on the heap, and only growing or dropping it moves or frees them.
unsafe impl<T: Element> HostBuffer for Vec<T> {
    type Element = T;
}

// SAFETY: the elements are in a memory map, which stays in place as long as the value exists.
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

    unsafe fn lend(&mut self, needs: &Needs) -> Result<Loan> {
        let values = self.as_mut().as_mut_ptr().cast();
        let operation = needs.operation.unwrap_or(Operation::Sum);
        let places = Places { values, sums: values };
        // SAFETY: the caller keeps the buffer until the loan is dropped, and a `HostBuffer` keeps
        // its elements in place.
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

    unsafe fn lend(&mut self, needs: &Needs) -> Result<Loan> {
        // SAFETY: the caller keeps this value, which owns the inner buffer, until the loan is
        // dropped.
        unsafe { self.buffer.lend(needs) }
    }

    unsafe fn lend_to_peers(
        &mut self,
        operation: Option<Operation>,
        is_mapped: bool,
    ) -> Result<Box<dyn PeerBuffer>> {
        // SAFETY: as above.
        unsafe { self.buffer.lend_to_peers(operation, is_mapped) }
    }

    fn restore(&mut self, changed: Range<usize>) {
        self.buffer.restore(changed);
    }
}
