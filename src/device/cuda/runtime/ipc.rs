//! Device memory that several processes of a node use: CUDA IPC.
//!
//! A process exports memory by a handle, and another maps it at an address of its own. To free memory that
//! another process maps is undefined behaviour (CUDA Driver API, `cuIpcCloseMemHandle`), so exported memory
//! is never freed: later buffers of the same size take it. Mappings stay until the process ends, as the
//! context does. A CUDA-aware MPI maps memory too, and keeps the mapping when the memory is freed (Open MPI's
//! cache of registrations); then what takes its place cannot be mapped.
#![allow(unsafe_code)]

use std::cell::RefCell;
use std::collections::HashMap;
use std::mem::MaybeUninit;

use cudarc::driver::DriverError;
use cudarc::driver::sys::{self, CUdeviceptr, CUipcMem_flags, CUipcMemHandle};

use crate::memory::MemoryHandle;

thread_local! {
    /// The addresses of other processes' memory, for each device of this process: a handle is opened once.
    static MAPPED: RefCell<HashMap<(usize, MemoryHandle), CUdeviceptr>> = RefCell::default();
}

/// Exported memory of a device that is not in use.
#[derive(Default)]
pub(crate) struct UnusedMemory(RefCell<Vec<ExportedMemory>>);

/// Memory of this process that others may map.
#[derive(Clone, Copy)]
pub(crate) struct ExportedMemory {
    pub(crate) pointer: CUdeviceptr,
    pub(crate) bytes: usize,
    pub(crate) handle: MemoryHandle,
}

impl UnusedMemory {
    /// Returns memory of `bytes`, if there is any.
    pub(crate) fn take(&self, bytes: usize) -> Option<ExportedMemory> {
        let mut unused = self.0.borrow_mut();
        let at = unused.iter().position(|memory| memory.bytes == bytes)?;
        Some(unused.swap_remove(at))
    }

    /// Returns the smallest memory of at least `bytes`, if there is any.
    pub(crate) fn take_at_least(&self, bytes: usize) -> Option<ExportedMemory> {
        let smallest = self.0.borrow().iter().map(|memory| memory.bytes).filter(|has| *has >= bytes).min()?;
        self.take(smallest)
    }

    /// Returns the bytes of all memory that nothing uses.
    pub(crate) fn bytes(&self) -> usize {
        self.0.borrow().iter().map(|memory| memory.bytes).sum()
    }

    /// Keeps memory that nothing uses any more.
    pub(crate) fn keep(&self, memory: ExportedMemory) {
        self.0.borrow_mut().push(memory);
    }
}

/// Returns the address on device `ordinal`, whose context is current, of memory that another process has
/// exported. It is mapped at the first call.
pub(crate) fn address(ordinal: usize, handle: &MemoryHandle) -> Result<CUdeviceptr, DriverError> {
    let key = (ordinal, *handle);
    if let Some(pointer) = MAPPED.with_borrow(|mapped| mapped.get(&key).copied()) {
        return Ok(pointer);
    }
    let pointer = map(handle)?;
    MAPPED.with_borrow_mut(|mapped| mapped.insert(key, pointer));
    Ok(pointer)
}

/// Returns the handle of the allocation at `pointer` (`cuIpcGetMemHandle`).
pub(crate) fn export(pointer: CUdeviceptr) -> Result<MemoryHandle, DriverError> {
    let mut handle = MaybeUninit::<CUipcMemHandle>::uninit();
    // SAFETY: the driver reads the address, which it checks, and writes the handle if it succeeds.
    let handle = unsafe {
        sys::cuIpcGetMemHandle(handle.as_mut_ptr(), pointer).result()?;
        handle.assume_init()
    };
    Ok(handle.reserved.map(|byte| byte as u8))
}

/// Maps memory that another process has exported (`cuIpcOpenMemHandle`).
fn map(handle: &MemoryHandle) -> Result<CUdeviceptr, DriverError> {
    let handle = CUipcMemHandle { reserved: handle.map(|byte| byte as _) };
    let flags = CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
    let mut pointer = 0;
    // SAFETY: the driver checks the handle and writes the address. The memory stays where it is, because
    // the process that exported it never frees it.
    unsafe { sys::cuIpcOpenMemHandle_v2(&raw mut pointer, handle, flags).result()? };
    Ok(pointer)
}
