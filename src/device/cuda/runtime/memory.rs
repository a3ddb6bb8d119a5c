//! Memory of the device, and pinned memory of the host.
//!
//! Device memory is plain `cuMemAlloc`: only then can MPI hand it to another process. Memory of the
//! stream-ordered pool has no IPC handle, and MPI would copy it through the host.

use std::cell::Cell;
use std::rc::Rc;

use cudarc::driver::sys::{CUdeviceptr, CUresult};
use cudarc::driver::{DriverError, result};

use super::format::Format;
use super::ipc::{ExportedMemory, export};
use super::machine::explain;
use super::streams::Streams;
use crate::memory::MemoryHandle;
use crate::{Error, Result};

/// Device memory, freed when dropped unless it is exported.
pub(crate) struct DeviceMemory {
    pointer: CUdeviceptr,
    bytes: usize,
    /// The handle by which other processes map it, once it is exported.
    handle: Cell<Option<MemoryHandle>>,
    streams: Rc<Streams>,
}

impl DeviceMemory {
    /// Allocates zeroed memory for `len` values.
    pub(crate) fn zeroed(streams: &Rc<Streams>, len: usize, format: Format) -> Result<DeviceMemory> {
        let memory = DeviceMemory::new(streams, len, format)?;
        if len > 0 {
            let (bytes, stream) = (len * format.bytes(), streams.compute.cu_stream());
            // SAFETY: the memory was allocated just now with that many bytes.
            let outcome = unsafe { result::memset_d8_async(memory.pointer, 0, bytes, stream) };
            streams.note("clearing memory", outcome);
        }
        Ok(memory)
    }

    /// Allocates memory for `len` values, with arbitrary contents.
    pub(crate) fn new(streams: &Rc<Streams>, len: usize, format: Format) -> Result<DeviceMemory> {
        let streams = Rc::clone(streams);
        if len == 0 {
            return Ok(DeviceMemory { pointer: 0, bytes: 0, handle: Cell::new(None), streams });
        }
        let bytes = len.checked_mul(format.bytes());
        let again = |memory: ExportedMemory| {
            let ExportedMemory { pointer, bytes, handle } = memory;
            DeviceMemory { pointer, bytes, handle: Cell::new(Some(handle)), streams: Rc::clone(&streams) }
        };
        if let Some(memory) = bytes.and_then(|bytes| streams.unused_memory.take(bytes)) {
            return Ok(again(memory));
        }
        streams.count(|counters| counters.allocations += 1);
        // SAFETY: kernels and copies check lengths before they use the memory, and `drop` frees it
        // once.
        let outcome = bytes.map(|bytes| unsafe { result::malloc_sync(bytes) });
        match outcome {
            Some(Ok(pointer)) => {
                let bytes = bytes.unwrap_or_default();
                Ok(DeviceMemory { pointer, bytes, handle: Cell::new(None), streams })
            }
            Some(Err(error)) if error.0 != CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                Err(Error::failed("allocating CUDA memory", explain(error)))
            }
            _ => match bytes.and_then(|bytes| streams.unused_memory.take_at_least(bytes)) {
                Some(memory) => Ok(again(memory)),
                None => Err(out_of_memory(&streams, len, format)),
            },
        }
    }

    pub(crate) fn pointer(&self) -> CUdeviceptr {
        self.pointer
    }

    /// Exports the memory, if the device has handles for other processes, so that it is never freed.
    pub(crate) fn keep(&self) {
        // without handles nobody maps it
        let _ = self.handle();
    }

    /// Returns the handle by which other processes map the memory, which is exported at the first call: zeros
    /// if it is empty.
    pub(crate) fn handle(&self) -> std::result::Result<MemoryHandle, DriverError> {
        if self.bytes == 0 {
            return Ok([0; 64]);
        }
        if let Some(handle) = self.handle.get() {
            return Ok(handle);
        }
        let handle = export(self.pointer)?;
        self.handle.set(Some(handle));
        Ok(handle)
    }
}

fn out_of_memory(streams: &Streams, len: usize, format: Format) -> Error {
    let gibibytes = |bytes: f64| bytes / f64::from(1 << 30);
    let wanted = gibibytes(len as f64 * format.bytes() as f64);
    let free = match result::mem_get_info() {
        Ok((free, total)) => {
            format!("{:.2} of its {:.2} GiB are free", gibibytes(free as f64), gibibytes(total as f64))
        }
        Err(_) => "less than that is free".to_owned(),
    };
    let kept = match gibibytes(streams.unused_memory.bytes() as f64) {
        kept if kept >= 0.01 => format!("; {kept:.2} GiB are kept because other ranks map them"),
        _ => String::new(),
    };
    let way_out = "a smaller --batch-size, more --micro-batches or more ranks would need less";
    let doing = format!("allocating {wanted:.2} GiB on CUDA device {} ({})", streams.ordinal, streams.name);
    Error::input(doing, format!("{free}{kept}; {way_out}"))
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if let Some(handle) = self.handle.get() {
            // as `cuMemFree` would: whoever gets the memory next may use it at once
            self.streams.note("giving memory back", self.streams.context.synchronize());
            let (pointer, bytes) = (self.pointer, self.bytes);
            self.streams.unused_memory.keep(ExportedMemory { pointer, bytes, handle });
        } else if self.pointer != 0 {
            // SAFETY: `new` allocated the memory; `cuMemFree` waits for all work of the device.
            let outcome = unsafe { result::free_sync(self.pointer) };
            self.streams.note("freeing memory", outcome);
        }
    }
}

/// Page-locked host memory, which the device copies from and to while the host continues.
pub(crate) struct Pinned {
    pointer: *mut f32,
    len: usize,
    streams: Rc<Streams>,
}

impl Pinned {
    /// Allocates zeroed memory for `len` values.
    pub(crate) fn new(streams: &Rc<Streams>, len: usize) -> Result<Pinned> {
        let streams = Rc::clone(streams);
        if len == 0 {
            return Ok(Pinned { pointer: std::ptr::dangling_mut(), len, streams });
        }
        streams.count(|counters| counters.allocations += 1);
        let failed = |why| {
            let mebibytes = len as f64 * 4.0 / f64::from(1 << 20);
            Error::failed(format!("allocating {mebibytes:.1} MiB of pinned host memory"), why)
        };
        let bytes =
            len.checked_mul(4).ok_or_else(|| failed("that is more than can be addressed".to_owned()))?;
        // SAFETY: all `len` values are zeroed before anything reads them, and `drop` frees them
        // once.
        unsafe {
            let pointer =
                result::malloc_host(bytes, 0).map_err(|error| failed(explain(error)))?.cast::<f32>();
            pointer.write_bytes(0, len);
            Ok(Pinned { pointer, len, streams })
        }
    }

    /// Returns the address of the values.
    pub(crate) fn pointer(&self) -> *mut f32 {
        self.pointer
    }
}

impl AsRef<[f32]> for Pinned {
    fn as_ref(&self) -> &[f32] {
        // SAFETY: the pointer is to `len` initialised values, which nobody borrows while the device
        // copies to them.
        unsafe { std::slice::from_raw_parts(self.pointer, self.len) }
    }
}

impl AsMut<[f32]> for Pinned {
    fn as_mut(&mut self) -> &mut [f32] {
        // SAFETY: the pointer is to `len` initialised values, which are borrowed exclusively, and
        // which nobody borrows while the device copies from or to them.
        unsafe { std::slice::from_raw_parts_mut(self.pointer, self.len) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: `new` allocated the memory; freeing waits for the copies that are under way.
            let outcome = unsafe { result::free_host(self.pointer.cast()) };
            self.streams.note("freeing pinned memory", outcome);
        }
    }
}
