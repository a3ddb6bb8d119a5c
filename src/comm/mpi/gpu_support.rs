//! Whether MPI reads and writes the memory of devices.
#![allow(unsafe_code)]

use std::ffi::c_int;

/// How buffers of a device become messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transfers {
    /// MPI is given the device's memory.
    Aware,
    /// They go through pinned host memory.
    Staged,
}

/// What is known of this MPI and CUDA.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Awareness {
    /// It takes the memory of devices: who says so.
    Yes(&'static str),
    /// It does not, and says so. Given a device's pointer it would die of it.
    No(&'static str),
    /// It does not say.
    Unknown,
}

/// Asks MPI, or the environment where MPI has no word for it. Not collective.
pub fn awareness() -> Awareness {
    const QUERY: &str = "MPIX_Query_cuda_support";
    let program = libloading::os::unix::Library::this();
    // SAFETY: where the function exists it is declared so, by Open MPI, MPICH and their kin, and may be called once MPI is up.
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
