//! The CPU: one thread or several, the widest vectors that the processor has, `f32`.
//!
//! Everything on which parameters depend has the same bits for any number of threads, for any vector
//! instructions, and for any division of the batch into calls, and so has the loss: see [`crate::sums`].
//! Subnormal numbers are flushed to zero inside [`flush_subnormals`].

mod activation;
mod attention;
mod cache;
mod convolution;
mod copy;
mod embedding;
mod fetch;
mod leaf_sums;
mod linear;
mod loops;
mod loss;
mod math;
mod matmul;
mod memory;
mod norm;
mod optimizer;
mod philox;
mod pool;
mod rotary;
mod small_product;
mod softmax;
mod subnormal;
mod transpose;

#[cfg(test)]
mod tests;

use std::sync::OnceLock;

use super::{Device, TuningOperations};
use crate::{Error, Result};
pub use subnormal::flush_subnormals;

/// The CPU as a [`Device`].
#[derive(Debug)]
pub struct Cpu {
    threads: usize,
    arch: pulp::Arch,
}

impl TuningOperations for Cpu {}

impl Device for Cpu {}

/// The vector instructions that the CPU may use. Results have the same bits with any of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Vectors {
    /// The widest that the processor has.
    Widest,
    /// AVX-512.
    Avx512,
    /// AVX2 with fused multiply-adds.
    Avx2,
    /// No more than every processor of the architecture has.
    Portable,
}

impl Vectors {
    /// Returns these instructions, if the processor has them.
    fn arch(self) -> Option<pulp::Arch> {
        match self {
            Vectors::Widest => Some(pulp::Arch::new()),
            Vectors::Portable => Some(pulp::Arch::Scalar),
            #[cfg(target_arch = "x86_64")]
            Vectors::Avx512 => pulp::x86::V4::try_new().map(pulp::Arch::V4),
            #[cfg(target_arch = "x86_64")]
            Vectors::Avx2 => pulp::x86::V3::try_new().map(pulp::Arch::V3),
            #[cfg(not(target_arch = "x86_64"))]
            Vectors::Avx512 | Vectors::Avx2 => None,
        }
    }
}

impl Cpu {
    /// Opens the CPU with `threads` threads. The first call with several starts them, once for the process,
    /// with subnormal numbers treated as on the calling thread.
    ///
    /// # Errors
    /// `threads` is 0, or the threads cannot be started.
    pub fn new(threads: usize) -> Result<Cpu> {
        let doing = "starting the threads of a rank";
        if threads == 0 {
            return Err(Error::input(doing, "at least one is needed"));
        }
        if threads > 1 {
            static POOL: OnceLock<std::result::Result<(), String>> = OnceLock::new();
            let start = || rayon::ThreadPoolBuilder::new().num_threads(threads).build_global();
            let outcome = POOL.get_or_init(|| start().map_err(|error| error.to_string()));
            outcome.clone().map_err(|error| Error::failed(doing, format!("{threads} threads: {error}")))?;
        }
        Ok(Cpu { threads, arch: pulp::Arch::new() })
    }

    /// Uses `vectors` instead of the widest. Returns `None` if the processor does not have them.
    pub fn with_vectors(self, vectors: Vectors) -> Option<Cpu> {
        vectors.arch().map(|arch| Cpu { arch, ..self })
    }
}
