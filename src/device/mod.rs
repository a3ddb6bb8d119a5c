//! Arithmetic: the complete list of operations that training needs, and the devices that run them.
//!
//! [`Device`] is the sum of twelve families of operations. The file of a family holds its contract
//! and its shapes; the file of the same name in `cpu/` and in `cuda/` is its implementation, and
//! the one in `cuda/kernels/` its CUDA kernels.
//!
//! | family | trait | operations |
//! |---|---|---|
//! | `memory` | [`MemoryOperations`] | allocation, transfers, a step's totals, recorded steps |
//! | `copy` | [`CopyOperations`] | fills, copies, sums, transposition, gathered rows |
//! | `activation` | [`ActivationOperations`] | elementwise functions and their derivatives |
//! | `linear` | [`LinearOperations`] | matrix products with bias and activation |
//! | `convolution` | [`ConvolutionOperations`] | convolution with pooling and ReLU |
//! | `pool` | [`PoolOperations`] | maxima and means over windows |
//! | `norm` | [`NormOperations`] | normalisations |
//! | `attention` | [`AttentionOperations`] | attention by heads |
//! | `embedding` | [`EmbeddingOperations`] | tables of tokens and of positions |
//! | `loss` | [`LossOperations`] | cross-entropy, of some of the classes too, mean squared error |
//! | `optimizer` | [`OptimizerOperations`] | optimizer steps, the gradient's norm |
//! | `tuning` | [`TuningOperations`] | the choice of algorithms for matrix products by measuring |
//!
//! Operations are as coarse as a fused kernel and write into buffers that the caller allocated
//! once; at steady state they allocate nothing except what starting several threads takes. Arrays
//! are dense and row-major. Images are *channels last*, `[rows, height, width, channels]`, between
//! layers, so that the innermost loop of a convolution runs over consecutive memory whatever the
//! width; [`CopyOperations::transpose_each`] makes them channels first where a `Linear` layer with
//! PyTorch's order of weights follows.
//!
//! The CPU is the reference that the GPU is tested against. Operations of a GPU only start when
//! they are called, so they return nothing; the next transfer to or from the host returns the first
//! error.
//!
//! No operation is collective, and nothing here depends on layers, parameter names or ranks.
//! `cuda/` is the only folder that names CUDA.

mod activation;
mod attention;
mod convolution;
mod copy;
mod cpu;
pub mod cuda;
mod dropout;
mod embedding;
mod linear;
mod loss;
mod memory;
mod norm;
mod optimizer;
mod pool;
mod row_sums;
mod tuning;

// all that a family's file makes public is part of the contract
pub use activation::*;
pub use attention::*;
pub use convolution::*;
pub use copy::*;
pub use cpu::{Cpu, Vectors, flush_subnormals};
pub use cuda::{Cuda, CudaBuffer, PeerDirection, Precision};
pub use dropout::*;
pub use embedding::*;
pub use linear::*;
pub use loss::*;
pub use memory::*;
pub use norm::*;
pub use optimizer::*;
pub use pool::*;
pub use row_sums::{ParameterSums, RowSums, ViewedSums};
pub use tuning::*;

/// A processor or GPU with all operations of training.
pub trait Device:
    MemoryOperations
    + CopyOperations
    + ActivationOperations
    + LinearOperations
    + ConvolutionOperations
    + PoolOperations
    + NormOperations
    + AttentionOperations
    + EmbeddingOperations
    + LossOperations
    + OptimizerOperations
    + TuningOperations
{
}

/// The traits of all families: `use phalanx::device::prelude::*` lets code call the operations of
/// [`Cpu`] or [`Cuda`] itself. Code that is generic over [`Device`] does not need it.
pub mod prelude {
    pub use super::{
        ActivationOperations, AttentionOperations, ConvolutionOperations, CopyOperations, Device,
        EmbeddingOperations, LinearOperations, LossOperations, MemoryOperations, NormOperations,
        OptimizerOperations, PoolOperations, TuningOperations,
    };
}
