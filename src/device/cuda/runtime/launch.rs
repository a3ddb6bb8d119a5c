//! Launches of kernels: sizes of grids, and arguments.

use std::ffi::c_void;

/// Threads in a block of the kernels that go through arrays.
pub(crate) const BLOCK: u32 = 256;

/// Dynamic shared memory, in bytes, that every device gives a block without a request for more.
pub(crate) const DEFAULT_SHARED_BYTES: u32 = 48 << 10;

/// A type of kernel arguments: the type in Rust is the one that the kernel declares.
pub(crate) trait KernelArgument: Copy {}

impl KernelArgument for u32 {}
impl KernelArgument for i32 {}
impl KernelArgument for f32 {}
impl KernelArgument for f64 {}
/// A pointer to device memory, or a length.
impl KernelArgument for u64 {}

/// The size of a grid.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Launch {
    /// Blocks of the grid, in x and y.
    pub(crate) blocks: (u32, u32),
    /// Threads of a block, in x and y.
    pub(crate) threads: (u32, u32),
    /// Bytes of dynamic shared memory of a block.
    pub(crate) shared_bytes: u32,
}

/// Returns a number of rows, columns or blocks as kernels take it.
///
/// # Panics
/// It is over 2³² − 1.
#[track_caller]
pub(crate) fn size32(size: usize) -> u32 {
    u32::try_from(size).expect("kernels take sizes below 2^32")
}

/// Returns the address of a kernel's argument.
pub(crate) fn address<T: KernelArgument>(value: &T) -> *mut c_void {
    std::ptr::from_ref(value).cast_mut().cast()
}

/// Starts a kernel in the compute stream: `launch!(streams, kernel, launch, arguments…)`. The
/// arguments have the types that the kernel declares.
macro_rules! launch {
    ($streams:expr, $kernel:expr, $launch:expr, $($argument:expr),+ $(,)?) => {
        $crate::device::cuda::runtime::launch::launch_in!(
            $streams, $streams.compute, $kernel, $launch, $($argument),+
        )
    };
}
pub(crate) use launch;

/// Starts a kernel in any stream: `launch_in!(streams, stream, kernel, launch, arguments…)`.
macro_rules! launch_in {
    ($streams:expr, $stream:expr, $kernel:expr, $launch:expr, $($argument:expr),+ $(,)?) => {
        // SAFETY: the arguments have the number and the types that the kernel declares. Its
        // pointers are to memory of the lengths that the callers have checked, and freeing device
        // memory waits for all work of the device.
        unsafe {
            $streams.launch(
                &$stream,
                $kernel,
                $launch,
                &mut [$($crate::device::cuda::runtime::launch::address(&$argument)),+],
            )
        }
    };
}
pub(crate) use launch_in;
