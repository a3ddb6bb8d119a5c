//! NVIDIA GPUs: kernels compiled for the device found, some of them for the shapes of the network's layers
//! when these are first used; matrix products by cuBLASLt; all computation in one stream, but for the
//! optimizer's steps, which without replicas run beside the passes of further layers, where some are left.
//!
//! Nothing of CUDA is needed to build, nor to run without it: the driver and its libraries are
//! loaded when [`Cuda::open`] is called. Operations only start work on the device and return;
//! [`MemoryOperations::read`](super::MemoryOperations::read) waits for it. An error in between is
//! kept and returned by the next transfer to or from the host.
//!
//! With [`Precision::Bf16`], activations and their gradients are kept in bf16, and parameters in
//! `f32` with a copy in bf16 that the optimizer renews; sums, losses, gradients of parameters and
//! the optimizer's slots are `f32`.
//!
//! `runtime/` is what the operations are built on: device, streams, memory, kernels. The other
//! files implement a family of operations each, with its kernels in `kernels/`.
//!
//! # In the training programs
//!
//! ```text
//! mpiexec -n 4 sync_sgd --device cuda --precision bf16
//! ```
//!
//! Every training program, strategy and checkpoint works on NVIDIA GPUs: Volta or later, with a
//! driver for CUDA 12.0 or later. `--device cuda` loads the driver, NVRTC and cuBLASLt; whatever is
//! missing is named, with exit code 2. `--device auto` then computes on the CPU and says why. The
//! ranks of a node take its GPUs in turn, and share them if there are more ranks than GPUs.
//!
//! * `--precision f32` (the default) gives the CPU's numbers up to rounding. `tf32` rounds the
//!   operands of products to 10 bits. `bf16` keeps activations and the operands of products in
//!   bfloat16, and everything that accumulates over time (parameters, optimizer, gradients of
//!   parameters, sums) in f32. A run may be resumed in another precision or on another device.
//! * Kernels are compiled at start for the GPU found, in one or two seconds, and those of convolutions
//!   and attention at their first use, in about a second for each shape. A step of a single rank with
//!   one micro-batch is recorded as one CUDA graph, whose dropouts read the number of the step from the
//!   GPU's memory. Training samples stay on the GPU if they fit into an eighth of its free memory and 2 GiB.
//! * With `--tuned-products FILE` the algorithms for the matrix products of a step are measured after the
//!   first one, and the fastest are used and kept in the file. Otherwise those are used that cuBLASLt
//!   expects to be the fastest. Runs that start with all of their products in the file have the same bits.
//! * The host is one step ahead: it reads the result of a step when the next one has begun, so a
//!   requested stop takes effect after at most two steps. The host waits for the GPU only for the
//!   result of the last step, for messages between ranks, and, if several ranks clip the gradient,
//!   for its norm.
//! * With `--trace` the host waits for every layer to measure its time; steps take longer then.
//! * The ranks of a node map each other's GPU memory (CUDA IPC) where a trial at the start shows that they
//!   can. A collective operation of up to 16 ranks, all on one node, is then one kernel of the first rank on
//!   each GPU, which reads and writes the buffers of all; if it is short, of the first rank alone. A message
//!   within a node is one copy by its receiver. On several nodes, if all have the same number of ranks, 2 to
//!   16, these first ranks alone exchange messages: a value travels from one node to another once. Of sums,
//!   only those in `f32` on nodes of 2, 4, 8 or 16 ranks take this way.
//! * For all other messages, if MPI says that it accepts GPU memory (`MPIX_Query_cuda_support`), they use it
//!   directly, and a kernel adds them. Otherwise values are staged through pinned host memory in chunks,
//!   which are copied, sent and added while other chunks are, and while the GPU computes. All ways
//!   give the same bits, except for subnormal numbers, which the CPU treats as zero; bfloat16 is
//!   sent as such. `--device-transfers aware` or `staged` forces one way for all messages, and `--probe FILE`
//!   follows the findings of `probe`. An MPI that would crash is refused.
//!
//! `make bench-gpu` measures steps beside PyTorch's on the same card. On a machine without a GPU,
//! `make test` runs all of this on an emulated one (`tests/cuda/emulator`): the same kernels,
//! compiled for the CPU, run as late and as far out of order as CUDA allows.
#![allow(unsafe_code)]

mod activation;
mod attention;
mod convolution;
mod copy;
mod dropout;
mod embedding;
mod linear;
mod loss;
mod memory;
mod message;
mod norm;
mod optimizer;
mod peers;
mod pool;
mod runtime;
mod tuning;

use std::cell::Cell;
use std::rc::Rc;

use super::{CopyOperations, Device, RowSums};
use crate::Result;
use activation::ActivationKernels;
use attention::RotaryKernels;
pub use attention::{SOURCE as ATTENTION_SOURCE, variants as attention_variants};
pub use convolution::{SOURCE as CONVOLUTION_SOURCE, variants as convolution_variants};
use copy::CopyKernels;
use embedding::EmbeddingKernels;
use linear::LinearKernels;
use loss::LossKernels;
use norm::NormKernels;
use optimizer::OptimizerKernels;
pub use peers::PeerDirection;
use pool::PoolKernels;
pub use runtime::buffer::{CudaBuffer, CudaView, CudaViewMut};
pub use runtime::compile::{Compiled, Constants, KernelSource, compile, known_capabilities};
use runtime::cublaslt::CublasLt;
pub use runtime::format::Precision;
pub use runtime::gpu::Cuda;
pub use runtime::graph::Recording;
use runtime::kernels::{KernelModules, KernelTable, KernelTables};
use runtime::machine;
pub use runtime::machine::OLDEST_CAPABILITY;
use runtime::partial_sums::{PartialSums, Total};
use runtime::readings::Readings;
pub use runtime::readings::TotalsReading;
use runtime::specialised::SpecialisedKernels;
pub use runtime::streams::Counters;
use runtime::streams::{MemoryKernels, Streams};
use runtime::upload::Uploads;

/// The source files of kernels that are compiled when a device is opened.
pub const SOURCES: [KernelSource; 10] = [
    MemoryKernels::SOURCE,
    CopyKernels::SOURCE,
    LinearKernels::SOURCE,
    ActivationKernels::SOURCE,
    PoolKernels::SOURCE,
    NormKernels::SOURCE,
    RotaryKernels::SOURCE,
    EmbeddingKernels::SOURCE,
    LossKernels::SOURCE,
    OptimizerKernels::SOURCE,
];

impl Device for Cuda {}

impl Cuda {
    /// Opens device `local_rank` modulo the number of devices, so ranks of a node may share a
    /// device. Not collective.
    ///
    /// # Errors
    /// The driver, a library or a device is missing or too old, or the device is out of memory.
    pub fn open(local_rank: usize, precision: Precision) -> Result<Cuda> {
        let machine = machine::open(local_rank)?;
        let (num_devices, capability) = (machine.num_devices, machine.capability);
        let modules = KernelModules::compile(&machine.context, machine.capability, &SOURCES)?;
        let streams = Rc::new(Streams::new(machine, modules.load()?)?);
        let mut kernels = KernelTables::default();
        kernels.load::<CopyKernels>(&modules)?;
        kernels.load::<LinearKernels>(&modules)?;
        kernels.load::<ActivationKernels>(&modules)?;
        kernels.load::<PoolKernels>(&modules)?;
        kernels.load::<NormKernels>(&modules)?;
        kernels.load::<RotaryKernels>(&modules)?;
        kernels.load::<EmbeddingKernels>(&modules)?;
        kernels.load::<LossKernels>(&modules)?;
        kernels.load::<OptimizerKernels>(&modules)?;
        Ok(Cuda {
            kernels,
            specialised: SpecialisedKernels::new(capability),
            cublaslt: CublasLt::new(&streams, precision)?,
            uploads: Uploads::new(),
            readings: Readings::new(&streams)?,
            partial_sums: PartialSums::new(&streams)?,
            step_sums: PartialSums::new(&streams)?,
            forks_steps: Cell::new(false),
            precision,
            num_devices,
            streams,
        })
    }

    /// Returns the single array of `sums`, `len` long, and true if the rows of the pass are added to
    /// it. If there are no rows, it sets the array to 0 if need be and returns nothing.
    fn single_sum<'a>(&self, sums: RowSums<CudaViewMut<'a>>, len: usize) -> Option<(CudaViewMut<'a>, bool)> {
        let RowSums { stack, rows, .. } = sums;
        assert!(stack.len == len && rows.depth_after() == 1, "a GPU adds up one array");
        let accumulate = rows.depth_before() > 0;
        if !rows.is_empty() {
            return Some((stack, accumulate));
        }
        if !accumulate {
            self.fill(stack, 0.0);
        }
        None
    }

    /// Returns what [`Cuda::single_sum`] does, as the total of partial sums.
    fn single_total(&self, sums: RowSums<CudaViewMut<'_>>, len: usize) -> Option<Total> {
        self.single_sum(sums, len).map(|(sum, accumulate)| Total::new(&sum, accumulate))
    }
}
