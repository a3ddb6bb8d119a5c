//! What a device and all its buffers share: streams, kernels, and the first thing that went wrong.
//!
//! All computation is in one stream, in order. Copies for messages, each way, and uploads of samples have a stream each, and
//! events tie them to the computation. Operations return nothing, as those of the processor do; the first that fails is remembered, and the next
//! transfer to or from the host, which every step has, returns it.

use std::cell::{Cell, RefCell};
use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::sys::{CUdeviceptr, CUresult};
use cudarc::driver::{CudaContext, CudaEvent, CudaFunction, CudaStream, DriverError, result};

use super::kernels::Kernels;
use super::machine::{Machine, explain};
use crate::{Error, Result};

/// Threads in a block of the kernels that go through arrays.
pub(super) const BLOCK: u32 = 256;

/// Blocks of such kernels on each multiprocessor.
const BLOCKS_PER_MULTIPROCESSOR: u32 = 8;

/// How often the host did what a step at steady state should do seldom or never.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Allocations of device or pinned host memory.
    pub allocations: u64,
    /// Times that the host waited for the device.
    pub synchronisations: u64,
    /// Kernels, products and copies that were started one by one.
    pub launches: u64,
    /// Recorded steps that were started.
    pub replays: u64,
}

/// The streams and kernels of one device.
pub(super) struct Shared {
    pub(super) context: Arc<CudaContext>,
    /// All computation, in order.
    pub(super) compute: Arc<CudaStream>,
    /// Copies to the memory of messages, and from it; there also what has arrived is added up.
    pub(super) departures: Arc<CudaStream>,
    pub(super) arrivals: Arc<CudaStream>,
    /// Copies of samples to the device.
    pub(super) uploads: Arc<CudaStream>,
    pub(super) kernels: Kernels,
    pub(super) ordinal: usize,
    pub(super) name: String,
    num_multiprocessors: u32,
    failure: RefCell<Option<Error>>,
    counters: Cell<Counters>,
}

/// Something that a kernel takes: the type is the one that the kernel declares.
pub(super) trait Argument: Copy {}

impl Argument for u32 {}
impl Argument for i32 {}
impl Argument for f32 {}
/// A pointer to device memory, or a length.
impl Argument for u64 {}

/// How many blocks of how many threads, with how many bytes of dynamic shared memory.
#[derive(Debug, Clone, Copy)]
pub(super) struct Launch {
    pub(super) blocks: (u32, u32),
    pub(super) threads: (u32, u32),
    pub(super) shared_bytes: u32,
}

/// Where a kernel's argument lies.
pub(super) fn argument<T: Argument>(value: &T) -> *mut c_void {
    std::ptr::from_ref(value).cast_mut().cast()
}

/// Starts a kernel in the computing stream: `launch!(shared, kernel, launch, arguments…)`. The arguments' types are the kernel's.
macro_rules! launch {
    ($shared:expr, $kernel:expr, $launch:expr, $($argument:expr),+ $(,)?) => {
        super::shared::launch_in!($shared, $shared.compute, $kernel, $launch, $($argument),+)
    };
}
pub(super) use launch;

/// The same in another stream.
macro_rules! launch_in {
    ($shared:expr, $stream:expr, $kernel:expr, $launch:expr, $($argument:expr),+ $(,)?) => {
        // SAFETY: the arguments are of the number and types that the kernel declares, and its pointers are to memory of the lengths
        // that the callers checked, which is freed only after the stream has been waited for.
        unsafe { $shared.launch(&$stream, $kernel, $launch, &mut [$(super::shared::argument(&$argument)),+]) }
    };
}
pub(super) use launch_in;

impl Shared {
    pub(super) fn new(machine: Machine) -> Result<Shared> {
        let Machine { context, capability, num_multiprocessors, ordinal, name, .. } = machine;
        let failed =
            |error| Error::failed(format!("starting CUDA device {ordinal} ({name})"), explain(error));
        // SAFETY: no memory here is tracked by cudarc's events; all ordering is by ours.
        unsafe { context.disable_event_tracking() };
        let stream = || context.new_stream().map_err(failed);
        let (compute, departures, arrivals, uploads) = (stream()?, stream()?, stream()?, stream()?);
        let kernels = Kernels::load(&context, capability)?;
        let (failure, counters) = (RefCell::default(), Cell::default());
        Ok(Shared {
            context,
            compute,
            departures,
            arrivals,
            uploads,
            kernels,
            ordinal,
            name,
            num_multiprocessors,
            failure,
            counters,
        })
    }

    /// What the host did so far.
    pub(super) fn counters(&self) -> Counters {
        self.counters.get()
    }

    pub(super) fn count(&self, change: impl FnOnce(&mut Counters)) {
        let mut counters = self.counters.get();
        change(&mut counters);
        self.counters.set(counters);
    }

    /// Remembers a failure while doing `what`, unless there was one before.
    pub(super) fn note<T>(&self, what: &str, outcome: std::result::Result<T, DriverError>) -> Option<T> {
        match outcome {
            Ok(value) => Some(value),
            Err(error) => {
                self.fail(what, explain(error));
                None
            }
        }
    }

    /// Remembers that doing `what` failed, unless something did before.
    pub(super) fn fail(&self, what: &str, why: impl std::fmt::Display) {
        let place = format!("{what} on CUDA device {} ({})", self.ordinal, self.name);
        self.failure.borrow_mut().get_or_insert_with(|| Error::failed(place, why));
    }

    /// The first failure, if there was any.
    pub(super) fn check(&self) -> Result<()> {
        match &*self.failure.borrow() {
            None => Ok(()),
            Some(error) => Err(error.clone()),
        }
    }

    /// Waits until all computation so far is done.
    pub(super) fn synchronise(&self) {
        self.count(|counters| counters.synchronisations += 1);
        self.note("computing", self.compute.synchronize());
    }

    /// True if `event` has been; also if the device cannot say, which is remembered as a failure: nobody should wait for it.
    pub(super) fn is_complete(&self, event: &CudaEvent) -> bool {
        // SAFETY: the event is alive, being borrowed.
        match unsafe { result::event::query(event.cu_event()) } {
            Err(error) if error.0 == CUresult::CUDA_ERROR_NOT_READY => false,
            outcome => {
                self.note("waiting for an event, or in an earlier operation,", outcome);
                true
            }
        }
    }

    /// Waits for `event`, unless it has been.
    pub(super) fn wait_for(&self, event: &CudaEvent) {
        if !self.is_complete(event) {
            self.count(|counters| counters.synchronisations += 1);
            self.note("waiting for a copy", event.synchronize());
        }
    }

    /// Makes `later` begin only when all that is in `earlier` now is done.
    pub(super) fn order(&self, event: &CudaEvent, earlier: &CudaStream, later: &CudaStream) {
        self.note("ordering streams", event.record(earlier).and_then(|()| later.wait(event)));
    }

    pub(super) fn new_event(&self) -> Result<CudaEvent> {
        self.context.new_event(None).map_err(|error| Error::failed("making a CUDA event", explain(error)))
    }

    /// A launch for an array of `len` elements, each thread with `each` at a time until all are done.
    pub(super) fn over(&self, len: usize, each: usize) -> Launch {
        let wanted = len.div_ceil(BLOCK as usize * each).max(1);
        Launch { blocks: (wanted.min(self.most_blocks()) as u32, 1), threads: (BLOCK, 1), shared_bytes: 0 }
    }

    /// The most blocks that [`Shared::over`] gives.
    pub(super) fn most_blocks(&self) -> usize {
        (self.num_multiprocessors * BLOCKS_PER_MULTIPROCESSOR) as usize
    }

    /// Use [`launch!`].
    ///
    /// # Safety
    /// The arguments are of the number and types that the kernel declares, and its pointers are to memory that it may touch, until
    /// the stream has done it.
    pub(super) unsafe fn launch(
        &self,
        stream: &CudaStream,
        kernel: &CudaFunction,
        launch: Launch,
        arguments: &mut [*mut c_void],
    ) {
        self.count(|counters| counters.launches += 1);
        let Launch { blocks, threads, shared_bytes } = launch;
        // SAFETY: the caller's promise; the driver copies the arguments before it returns.
        let outcome = unsafe {
            result::launch_kernel(
                kernel.cu_function(),
                (blocks.0, blocks.1, 1),
                (threads.0, threads.1, 1),
                shared_bytes,
                stream.cu_stream(),
                arguments,
            )
        };
        self.note("starting a kernel, or in an earlier operation,", outcome);
    }

    /// Copies `bytes` from device memory to device memory, in the computing stream.
    ///
    /// # Safety
    /// Both pointers are to that much device memory.
    pub(super) unsafe fn copy(&self, from: CUdeviceptr, into: CUdeviceptr, bytes: usize) {
        if bytes > 0 {
            self.count(|counters| counters.launches += 1);
            // SAFETY: the caller's promise.
            let outcome = unsafe { result::memcpy_dtod_async(into, from, bytes, self.compute.cu_stream()) };
            self.note("copying", outcome);
        }
    }
}
