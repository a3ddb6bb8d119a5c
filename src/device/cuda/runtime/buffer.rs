//! Buffers on the device and views of them.

use std::marker::PhantomData;
use std::ops::Range;
use std::rc::Rc;

use cudarc::driver::sys::CUdeviceptr;

use super::format::Format;
use super::memory::DeviceMemory;
use super::message_memory::MessageMemory;
use super::streams::Streams;

/// Values on the device.
pub struct CudaBuffer {
    pub(crate) streams: Rc<Streams>,
    pub(crate) memory: DeviceMemory,
    pub(crate) len: usize,
    pub(crate) format: Format,
    /// A copy of the values in bf16: of parameters, where products read bf16.
    pub(crate) copy: Option<DeviceMemory>,
    pub(crate) messages: MessageMemory,
}

/// A range of a buffer, to read.
#[derive(Debug, Clone, Copy)]
pub struct CudaView<'a> {
    pub(crate) pointer: CUdeviceptr,
    pub(crate) len: usize,
    pub(crate) format: Format,
    /// Address of the copy in bf16; 0 if there is none.
    pub(crate) copy: CUdeviceptr,
    buffer: PhantomData<&'a CudaBuffer>,
}

/// A range of a buffer, to write.
#[derive(Debug)]
pub struct CudaViewMut<'a> {
    pub(crate) pointer: CUdeviceptr,
    pub(crate) len: usize,
    pub(crate) format: Format,
    /// Address of the copy in bf16; 0 if there is none.
    pub(crate) copy: CUdeviceptr,
    buffer: PhantomData<&'a mut CudaBuffer>,
}

impl CudaViewMut<'_> {
    /// Borrows the range, to read.
    pub(crate) fn as_view(&self) -> CudaView<'_> {
        let CudaViewMut { pointer, len, format, copy, .. } = *self;
        CudaView { pointer, len, format, copy, buffer: PhantomData }
    }
}

impl CudaBuffer {
    /// Returns the addresses of the values in `range` and of their copies in bf16.
    fn addresses(&self, range: &Range<usize>) -> (CUdeviceptr, CUdeviceptr) {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {} values", self.len);
        let start = (range.start * self.format.bytes()) as u64;
        let copy = self.copy.as_ref().map_or(0, |copy| copy.pointer() + 2 * range.start as u64);
        (self.memory.pointer() + start, copy)
    }

    pub(crate) fn view(&self, range: Range<usize>) -> CudaView<'_> {
        let (pointer, copy) = self.addresses(&range);
        CudaView { pointer, len: range.len(), format: self.format, copy, buffer: PhantomData }
    }

    pub(crate) fn view_mut(&mut self, range: Range<usize>) -> CudaViewMut<'_> {
        let (pointer, copy) = self.addresses(&range);
        CudaViewMut { pointer, len: range.len(), format: self.format, copy, buffer: PhantomData }
    }
}
