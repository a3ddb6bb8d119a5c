//! The streams of a device, the events that order them, and the first failure of its operations.
//!
//! All computation is in one stream, in order, but for the steps of an optimizer, between a fork and a
//! join. Copies for messages, each way, and uploads of samples have a stream each, and events order them
//! with the computation. Operations return nothing, as those of the CPU do: the first failure is kept, and
//! the next transfer to or from the host, which every step has, returns it.

use std::cell::{Cell, RefCell};
use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::sys::{CUdeviceptr, CUfunction_attribute_enum, CUresult};
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError, result};

use super::ipc::UnusedMemory;
use super::kernels::{Kernel, kernel_table};
use super::launch::{BLOCK, DEFAULT_SHARED_BYTES, Launch};
use super::machine::{Machine, explain};
use crate::{Error, Result};

/// Blocks on each multiprocessor, of the kernels that go through arrays.
const BLOCKS_PER_MULTIPROCESSOR: u32 = 8;

kernel_table!(MemoryKernels in "memory.cu" {
    cast_to_bf16: Kernel,
    cast_to_f32: Kernel,
    take_few: Kernel,
    store_few: Kernel,
    store_some: Kernel,
    add_terms: KernelPair,
    add_partial_sums: Kernel,
    sum_peers: KernelPair,
    copy_to_peers: Kernel,
});

/// Counts of events that are rare or absent in a step at steady state.
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

/// The address at which the kernels that are being recorded read the number of the step.
#[derive(Default)]
pub(crate) struct StepAddress {
    pointer: Cell<CUdeviceptr>,
    is_taken: Cell<bool>,
}

impl StepAddress {
    /// Begins a recording.
    pub(crate) fn begin(&self, pointer: CUdeviceptr) {
        self.pointer.set(pointer);
        self.is_taken.set(false);
    }

    /// Ends the recording. Returns true if one of its kernels takes the address.
    pub(crate) fn end(&self) -> bool {
        self.pointer.set(0);
        self.is_taken.get()
    }

    /// Returns the address for a kernel that is started or recorded next; 0 while nothing is being recorded.
    pub(crate) fn take(&self) -> CUdeviceptr {
        self.is_taken.set(true);
        self.pointer.get()
    }
}

/// The streams of one device, with the state that all operations in them share.
pub(crate) struct Streams {
    pub(crate) context: Arc<CudaContext>,
    /// All computation, in order.
    pub(crate) compute: Arc<CudaStream>,
    /// Copies of messages to the host.
    pub(crate) d2h: Arc<CudaStream>,
    /// Copies of messages to the device, and sums of received values.
    pub(crate) h2d: Arc<CudaStream>,
    /// Copies of samples to the device.
    pub(crate) upload: Arc<CudaStream>,
    /// Work beside the computation, between [`Streams::fork`] and [`Streams::join`].
    pub(crate) beside: Arc<CudaStream>,
    pub(crate) kernels: MemoryKernels,
    /// Memory for buffers, which other processes may still map.
    pub(crate) unused_memory: UnusedMemory,
    pub(crate) ordinal: usize,
    pub(crate) name: String,
    num_multiprocessors: u32,
    /// Ends of work in `compute` and in `beside` that the other waits for.
    turns: [CudaEvent; 2],
    has_forked: Cell<bool>,
    pub(crate) step_address: StepAddress,
    failure: RefCell<Option<Error>>,
    counters: Cell<Counters>,
}

impl Streams {
    pub(crate) fn new(machine: Machine, kernels: MemoryKernels) -> Result<Streams> {
        let Machine { context, num_multiprocessors, ordinal, name, .. } = machine;
        let failed =
            |error| Error::failed(format!("starting CUDA device {ordinal} ({name})"), explain(error));
        // SAFETY: cudarc's events track only memory that it allocated itself; all memory here is
        // allocated through the driver, and our own events order all work.
        unsafe { context.disable_event_tracking() };
        // messages go before computation: others wait for them
        let (_, highest) = result::stream::get_priority_range().map_err(failed)?;
        let stream = || context.new_stream().map_err(failed);
        let urgent = || context.new_stream_with_priority(highest).map_err(failed);
        let (compute, d2h, h2d) = (stream()?, urgent()?, urgent()?);
        let (upload, beside) = (stream()?, stream()?);
        let event = || context.new_event(None).map_err(failed);
        let (turns, has_forked) = ([event()?, event()?], Cell::new(false));
        let (failure, counters) = (RefCell::default(), Cell::default());
        Ok(Streams {
            context,
            compute,
            d2h,
            h2d,
            upload,
            beside,
            kernels,
            unused_memory: UnusedMemory::default(),
            ordinal,
            name,
            num_multiprocessors,
            turns,
            has_forked,
            step_address: StepAddress::default(),
            failure,
            counters,
        })
    }

    pub(crate) fn counters(&self) -> Counters {
        self.counters.get()
    }

    pub(crate) fn count(&self, change: impl FnOnce(&mut Counters)) {
        let mut counters = self.counters.get();
        change(&mut counters);
        self.counters.set(counters);
    }

    /// Keeps the failure of `what`, if it failed and nothing failed before.
    pub(crate) fn note<T>(&self, what: &str, outcome: std::result::Result<T, DriverError>) -> Option<T> {
        match outcome {
            Ok(value) => Some(value),
            Err(error) => {
                self.fail(what, explain(error));
                None
            }
        }
    }

    /// Keeps the failure of `what`, unless something failed before.
    pub(crate) fn fail(&self, what: &str, why: impl std::fmt::Display) {
        let place = format!("{what} on CUDA device {} ({})", self.ordinal, self.name);
        self.keep(Error::failed(place, why));
    }

    /// Keeps a failure, unless something failed before.
    pub(crate) fn keep(&self, failure: Error) {
        self.failure.borrow_mut().get_or_insert(failure);
    }

    /// Returns the first failure, if there was any.
    pub(crate) fn check(&self) -> Result<()> {
        match &*self.failure.borrow() {
            None => Ok(()),
            Some(error) => Err(error.clone()),
        }
    }

    /// Makes work that is started in `beside` from now on wait for all computation so far.
    pub(crate) fn fork(&self) {
        self.order(&self.turns[0], &self.compute, &self.beside);
        self.has_forked.set(true);
    }

    /// Makes computation from now on wait for all work in `beside`.
    pub(crate) fn join(&self) {
        // a stream without work is not part of a step that is being recorded
        if self.has_forked.replace(false) {
            self.order(&self.turns[1], &self.beside, &self.compute);
        }
    }

    /// Blocks until all computation started so far is complete.
    pub(crate) fn synchronise(&self) {
        self.join();
        self.count(|counters| counters.synchronisations += 1);
        self.note("computing", self.compute.synchronize());
    }

    /// Returns true if `event` is complete, or if the query fails: the failure is kept, and waiting
    /// would be useless.
    pub(crate) fn is_complete(&self, event: &CudaEvent) -> bool {
        // SAFETY: the event is borrowed, so it has not been destroyed.
        match unsafe { result::event::query(event.cu_event()) } {
            Err(error) if error.0 == CUresult::CUDA_ERROR_NOT_READY => false,
            outcome => {
                self.note("waiting for an event, or in an earlier operation,", outcome);
                true
            }
        }
    }

    /// Blocks until `event` is complete.
    pub(crate) fn wait_for(&self, event: &CudaEvent) {
        if !self.is_complete(event) {
            self.count(|counters| counters.synchronisations += 1);
            self.note("waiting for a copy", event.synchronize());
        }
    }

    /// Makes work that is started in `later` from now on wait for all work in `earlier`.
    pub(crate) fn order(&self, event: &CudaEvent, earlier: &CudaStream, later: &CudaStream) {
        self.note("ordering streams", event.record(earlier).and_then(|()| later.wait(event)));
    }

    pub(crate) fn new_event(&self) -> Result<CudaEvent> {
        self.context.new_event(None).map_err(|error| Error::failed("making a CUDA event", explain(error)))
    }

    /// Returns a launch for an array of `len` elements, of which each thread takes `each` at a time
    /// until none are left.
    pub(crate) fn over(&self, len: usize, each: usize) -> Launch {
        let wanted = len.div_ceil(BLOCK as usize * each).max(1);
        Launch { blocks: (wanted.min(self.max_blocks()) as u32, 1), threads: (BLOCK, 1), shared_bytes: 0 }
    }

    /// Returns the largest number of blocks of a launch by [`Streams::over`].
    pub(crate) fn max_blocks(&self) -> usize {
        (self.num_multiprocessors * BLOCKS_PER_MULTIPROCESSOR) as usize
    }

    /// Starts a kernel: use `launch!`.
    ///
    /// # Safety
    /// The arguments have the number and the types that the kernel declares, and its pointers are
    /// to memory that it may use until the stream has run it.
    pub(crate) unsafe fn launch(
        &self,
        stream: &CudaStream,
        kernel: &Kernel,
        launch: Launch,
        arguments: &mut [*mut c_void],
    ) {
        self.count(|counters| counters.launches += 1);
        let Launch { blocks, threads, shared_bytes } = launch;
        if shared_bytes > DEFAULT_SHARED_BYTES {
            let attribute = CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the kernel is borrowed, so its module is loaded.
            let outcome = unsafe {
                result::function::set_function_attribute(kernel.function(), attribute, shared_bytes as i32)
            };
            self.note("allowing a kernel more shared memory", outcome);
        }
        // SAFETY: this function's caller guarantees that the arguments are the kernel's; the driver
        // copies them before it returns.
        let outcome = unsafe {
            result::launch_kernel(
                kernel.function(),
                (blocks.0, blocks.1, 1),
                (threads.0, threads.1, 1),
                shared_bytes,
                stream.cu_stream(),
                arguments,
            )
        };
        self.note("starting a kernel, or in an earlier operation,", outcome);
    }

    /// Copies `bytes` within device memory, in the compute stream.
    ///
    /// # Safety
    /// Both pointers are to at least `bytes` of device memory.
    pub(crate) unsafe fn copy(&self, from: CUdeviceptr, into: CUdeviceptr, bytes: usize) {
        if bytes > 0 {
            self.count(|counters| counters.launches += 1);
            // SAFETY: this function's caller guarantees the lengths; freeing device memory waits
            // for the copy.
            let outcome = unsafe { result::memcpy_dtod_async(into, from, bytes, self.compute.cu_stream()) };
            self.note("copying", outcome);
        }
    }
}
