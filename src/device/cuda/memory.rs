//! Memory of the device and of the host that both can reach, and views of it.
//!
//! Device memory is plain `cuMemAlloc`: MPI can hand it to another process only then (the stream-ordered pool's memory has no handle,
//! and MPI would copy through the host).

use std::marker::PhantomData;
use std::ops::Range;
use std::rc::Rc;

use cudarc::driver::result;
use cudarc::driver::sys::{CUdeviceptr, CUresult};

use super::machine::explain;
use super::message::MessageMemory;
use super::shared::Shared;
use crate::{Error, Result};

/// How values are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Format {
    F32,
    Bf16,
}

impl Format {
    pub(super) fn bytes(self) -> usize {
        match self {
            Format::F32 => 4,
            Format::Bf16 => 2,
        }
    }
}

/// Device memory, freed with the value.
pub(super) struct DeviceMemory {
    pointer: CUdeviceptr,
    shared: Rc<Shared>,
}

impl DeviceMemory {
    /// Zeroed memory for `len` values.
    pub(super) fn zeroed(shared: &Rc<Shared>, len: usize, format: Format) -> Result<DeviceMemory> {
        let memory = DeviceMemory::new(shared, len, format)?;
        if len > 0 {
            // SAFETY: the memory is that long.
            let outcome = unsafe {
                result::memset_d8_async(memory.pointer, 0, len * format.bytes(), shared.compute.cu_stream())
            };
            shared.note("clearing memory", outcome);
        }
        Ok(memory)
    }

    /// Memory for `len` values, with anything in it.
    pub(super) fn new(shared: &Rc<Shared>, len: usize, format: Format) -> Result<DeviceMemory> {
        let shared = Rc::clone(shared);
        if len == 0 {
            return Ok(DeviceMemory { pointer: 0, shared });
        }
        shared.count(|counters| counters.allocations += 1);
        let bytes = len.checked_mul(format.bytes());
        // SAFETY: the memory is used only within its length and freed once.
        let outcome = bytes.map(|bytes| unsafe { result::malloc_sync(bytes) });
        match outcome {
            Some(Ok(pointer)) => Ok(DeviceMemory { pointer, shared }),
            Some(Err(error)) if error.0 != CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                Err(Error::failed("allocating CUDA memory", explain(error)))
            }
            _ => Err(out_of_memory(&shared, len, format)),
        }
    }

    pub(super) fn pointer(&self) -> CUdeviceptr {
        self.pointer
    }
}

fn out_of_memory(shared: &Shared, len: usize, format: Format) -> Error {
    let gibibytes = |bytes: f64| bytes / f64::from(1 << 30);
    let wanted = gibibytes(len as f64 * format.bytes() as f64);
    let rest = match result::mem_get_info() {
        Ok((free, total)) => {
            format!("{:.2} of its {:.2} GiB are free", gibibytes(free as f64), gibibytes(total as f64))
        }
        Err(_) => "it has not that much left".to_owned(),
    };
    let way_out = "a smaller --batch-size, more --micro-batches or more ranks would need less";
    let doing = format!("allocating {wanted:.2} GiB on CUDA device {} ({})", shared.ordinal, shared.name);
    Error::input(doing, format!("{rest}; {way_out}"))
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if self.pointer != 0 {
            // SAFETY: it was allocated here; `cuMemFree` waits for all work of the device.
            let outcome = unsafe { result::free_sync(self.pointer) };
            self.shared.note("freeing memory", outcome);
        }
    }
}

/// Host memory that does not move, which the device copies from and to while both go on with other work.
pub(super) struct Pinned {
    pointer: *mut f32,
    len: usize,
    shared: Rc<Shared>,
}

impl Pinned {
    pub(super) fn new(shared: &Rc<Shared>, len: usize) -> Result<Pinned> {
        let shared = Rc::clone(shared);
        if len == 0 {
            return Ok(Pinned { pointer: std::ptr::dangling_mut(), len, shared });
        }
        shared.count(|counters| counters.allocations += 1);
        let failed = |why| {
            let mebibytes = len as f64 * 4.0 / f64::from(1 << 20);
            Error::failed(format!("allocating {mebibytes:.1} MiB of pinned host memory"), why)
        };
        let bytes =
            len.checked_mul(4).ok_or_else(|| failed("that is more than can be addressed".to_owned()))?;
        // SAFETY: the memory is freed once, and zeroed before anything reads it.
        unsafe {
            let pointer =
                result::malloc_host(bytes, 0).map_err(|error| failed(explain(error)))?.cast::<f32>();
            pointer.write_bytes(0, len);
            Ok(Pinned { pointer, len, shared })
        }
    }
}

impl Pinned {
    /// Where the values are.
    pub(super) fn pointer(&self) -> *mut f32 {
        self.pointer
    }
}

impl AsRef<[f32]> for Pinned {
    fn as_ref(&self) -> &[f32] {
        // SAFETY: `len` initialised values; whoever holds the memory while the device copies does not look at it.
        unsafe { std::slice::from_raw_parts(self.pointer, self.len) }
    }
}

impl AsMut<[f32]> for Pinned {
    fn as_mut(&mut self) -> &mut [f32] {
        // SAFETY: as above, and the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.pointer, self.len) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: it was allocated here; freeing waits for the copies under way.
            let outcome = unsafe { result::free_host(self.pointer.cast()) };
            self.shared.note("freeing pinned memory", outcome);
        }
    }
}

/// Values on the device.
pub struct CudaBuffer {
    pub(super) shared: Rc<Shared>,
    pub(super) memory: DeviceMemory,
    pub(super) len: usize,
    pub(super) format: Format,
    /// The same values in bf16, of parameters where products want them so.
    pub(super) copy: Option<DeviceMemory>,
    pub(super) messages: MessageMemory,
}

/// A range of a buffer, to read.
#[derive(Debug, Clone, Copy)]
pub struct CudaView<'a> {
    pub(super) pointer: CUdeviceptr,
    pub(super) len: usize,
    pub(super) format: Format,
    /// The same values in bf16, if they are kept; else 0.
    pub(super) copy: CUdeviceptr,
    buffer: PhantomData<&'a CudaBuffer>,
}

/// A range of a buffer, to write.
#[derive(Debug)]
pub struct CudaViewMut<'a> {
    pub(super) pointer: CUdeviceptr,
    pub(super) len: usize,
    pub(super) format: Format,
    /// The same values in bf16, if they are kept; else 0.
    pub(super) copy: CUdeviceptr,
    buffer: PhantomData<&'a mut CudaBuffer>,
}

impl CudaViewMut<'_> {
    /// The same range, to read.
    pub(super) fn read(&self) -> CudaView<'_> {
        let CudaViewMut { pointer, len, format, copy, .. } = *self;
        CudaView { pointer, len, format, copy, buffer: PhantomData }
    }
}

impl CudaBuffer {
    fn places(&self, range: &Range<usize>) -> (CUdeviceptr, CUdeviceptr) {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {} values", self.len);
        let start = (range.start * self.format.bytes()) as u64;
        let copy = self.copy.as_ref().map_or(0, |copy| copy.pointer() + 2 * range.start as u64);
        (self.memory.pointer() + start, copy)
    }

    pub(super) fn view(&self, range: Range<usize>) -> CudaView<'_> {
        let (pointer, copy) = self.places(&range);
        CudaView { pointer, len: range.len(), format: self.format, copy, buffer: PhantomData }
    }

    pub(super) fn view_mut(&mut self, range: Range<usize>) -> CudaViewMut<'_> {
        let (pointer, copy) = self.places(&range);
        CudaViewMut { pointer, len: range.len(), format: self.format, copy, buffer: PhantomData }
    }
}
