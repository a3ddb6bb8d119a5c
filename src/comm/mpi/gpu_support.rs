//! MPI's support of device memory.
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

/// The answer to whether this MPI is CUDA-aware.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Awareness {
    /// It is; the source of the answer.
    Yes(&'static str),
    /// It is not, and given a device's pointer it would crash; the source of the answer.
    No(&'static str),
    /// Nothing says so.
    Unknown,
}

/// Asks MPI, or the environment where MPI has no query for it. Not collective.
pub fn awareness() -> Awareness {
    const QUERY: &str = "MPIX_Query_cuda_support";
    let program = libloading::os::unix::Library::this();
    // SAFETY: Open MPI, MPICH and their kin declare the function so where it exists, and it may be
    // called once MPI is initialised.
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
