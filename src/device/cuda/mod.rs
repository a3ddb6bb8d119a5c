//! NVIDIA GPUs: kernels compiled at start for the device found, matrix products by cuBLASLt, all
//! computation in one stream.
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
#![allow(unsafe_code)]

mod activation;
mod convolution;
mod copy;
mod linear;
mod loss;
mod memory;
mod message;
mod optimizer;
mod pool;
mod runtime;

use std::rc::Rc;

use super::Device;
use crate::Result;
use activation::ActivationKernels;
use convolution::ConvolutionKernels;
use copy::CopyKernels;
use loss::LossKernels;
use optimizer::OptimizerKernels;
use pool::PoolKernels;
pub use runtime::buffer::{CudaBuffer, CudaView, CudaViewMut};
pub use runtime::compile::{KernelSource, compile};
use runtime::cublaslt::CublasLt;
pub use runtime::format::Precision;
pub use runtime::gpu::Cuda;
pub use runtime::graph::Recording;
use runtime::kernels::{KernelModules, KernelTable, KernelTables};
use runtime::machine;
use runtime::partial_sums::PartialSums;
use runtime::readings::Readings;
pub use runtime::readings::TotalsReading;
pub use runtime::streams::Counters;
use runtime::streams::{MemoryKernels, Streams};
use runtime::upload::Uploads;

/// All source files of kernels.
pub const SOURCES: [KernelSource; 7] = [
    MemoryKernels::SOURCE,
    CopyKernels::SOURCE,
    ActivationKernels::SOURCE,
    ConvolutionKernels::SOURCE,
    PoolKernels::SOURCE,
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
        let num_devices = machine.num_devices;
        let modules = KernelModules::compile(&machine.context, machine.capability, &SOURCES)?;
        let streams = Rc::new(Streams::new(machine, modules.load()?)?);
        let mut kernels = KernelTables::default();
        kernels.load::<CopyKernels>(&modules)?;
        kernels.load::<ActivationKernels>(&modules)?;
        kernels.load::<ConvolutionKernels>(&modules)?;
        kernels.load::<PoolKernels>(&modules)?;
        kernels.load::<LossKernels>(&modules)?;
        kernels.load::<OptimizerKernels>(&modules)?;
        Ok(Cuda {
            kernels,
            cublaslt: CublasLt::new(&streams, precision)?,
            uploads: Uploads::new(),
            readings: Readings::new(&streams)?,
            partial_sums: PartialSums::new(&streams)?,
            precision,
            num_devices,
            streams,
        })
    }
}
