//! MPI's support of device memory: the query for it, and the route of device buffers.
#![allow(unsafe_code)]

use std::ffi::c_int;

/// The route of device buffers through MPI.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transfers {
    /// CUDA-aware: MPI reads and writes the device's memory.
    Aware,
    /// Staged: values are copied through pinned host memory.
    Staged,
}

/// The CUDA-awareness of this MPI, with the source of the information.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Awareness {
    /// MPI is CUDA-aware, according to this source.
    Yes(&'static str),
    /// MPI is not CUDA-aware, according to this source, and would crash on a device pointer.
    No(&'static str),
    /// Neither MPI nor the environment has the information.
    Unknown,
}

/// Returns the CUDA-awareness of this MPI, from MPI's own query or, if it has none, from the
/// environment. Not collective.
pub fn awareness() -> Awareness {
    const QUERY: &str = "MPIX_Query_cuda_support";
    let program = libloading::os::unix::Library::this();
    // SAFETY: every MPI that has the function declares it with this signature, and it may be called
    // once MPI is initialised.
    let answer = unsafe {
        let query = program.get::<unsafe extern "C" fn() -> c_int>(QUERY.as_bytes());
        query.ok().map(|query| query())
    };
    let is_set = |name: &str| std::env::var(name).is_ok_and(|value| !["", "0"].contains(&value.as_str()));
    match answer {
        Some(0) => Awareness::No("MPIX_Query_cuda_support answers 0"),
        Some(_) => Awareness::Yes("MPIX_Query_cuda_support answers 1"),
        None if is_set("MPICH_GPU_SUPPORT_ENABLED") => Awareness::Yes("MPICH_GPU_SUPPORT_ENABLED is set"),
        None => Awareness::Unknown,
    }
}
