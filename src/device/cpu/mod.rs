//! The CPU: one thread or several, the widest vectors that the processor has, `f32`.
//!
//! Gradients have the same bits for any number of threads, and for any division of the batch into
//! calls that continue a sum. The loss, which no parameter depends on, is summed in an order that
//! is fixed for a given number of threads. Subnormal numbers are flushed to zero inside
//! [`flush_subnormals`].

mod activation;
mod convolution;
mod copy;
mod linear;
mod loops;
mod loss;
mod math;
mod matmul;
mod memory;
mod optimizer;
mod pool;
mod subnormal;

#[cfg(test)]
mod tests;

use std::sync::OnceLock;

use super::Device;
use crate::{Error, Result};
pub use subnormal::flush_subnormals;

/// The CPU as a [`Device`].
#[derive(Debug)]
pub struct Cpu {
    threads: usize,
    arch: pulp::Arch,
}

impl Device for Cpu {}

impl Cpu {
    /// Opens the CPU with `threads` threads for this process; the first call in a process fixes the
    /// number.
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
}
