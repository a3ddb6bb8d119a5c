//! All kernels, loaded at start: a name that is not in the sources fails then, not at step 900.

use std::sync::Arc;

use cudarc::driver::sys::CUresult;
use cudarc::driver::{CudaContext, CudaFunction, CudaModule};
use cudarc::nvrtc::Ptx;

use super::compile::{SOURCES, compile};
use super::machine::explain;
use super::memory::Format;
use crate::{Error, Result};

/// A kernel for both ways of keeping activations.
pub(super) struct Both {
    f32: CudaFunction,
    bf16: CudaFunction,
}

impl Both {
    pub(super) fn of(&self, format: Format) -> &CudaFunction {
        match format {
            Format::F32 => &self.f32,
            Format::Bf16 => &self.bf16,
        }
    }
}

struct Modules(Vec<Arc<CudaModule>>);

impl Modules {
    fn one(&self, name: &str) -> Result<CudaFunction> {
        let failed = |why: String| Error::failed(format!("loading the kernel {name}"), why);
        for module in &self.0 {
            match module.load_function(name) {
                Err(error) if error.0 == CUresult::CUDA_ERROR_NOT_FOUND => {}
                found => return found.map_err(|error| failed(explain(error))),
            }
        }
        Err(failed("it is in none of the sources".to_owned()))
    }

    fn both(&self, name: &str) -> Result<Both> {
        Ok(Both { f32: self.one(&format!("{name}_f32"))?, bf16: self.one(&format!("{name}_bf16"))? })
    }
}

macro_rules! kernels {
    ($($name:ident: $kind:ident = $load:ident,)*) => {
        /// Every kernel, by the name that it has in the sources.
        pub(super) struct Kernels {
            $(pub(super) $name: $kind,)*
        }

        impl Kernels {
            fn find(modules: &Modules) -> Result<Kernels> {
                Ok(Kernels { $($name: modules.$load(stringify!($name))?,)* })
            }
        }
    };
}

kernels! {
    bias_activation: Both = both,
    unactivate: Both = both,
    unactivate_sum: Both = both,
    copy_block: Both = both,
    transpose_each: Both = both,
    gather_rows: Both = both,
    fill: Both = both,
    add_terms: Both = both,
    cast_to_bf16: CudaFunction = one,
    cast_to_f32: CudaFunction = one,
    store_few: CudaFunction = one,
    store_some: CudaFunction = one,
    sum_parts: CudaFunction = one,
    cross_entropy: Both = both,
    squared_error: Both = both,
    sgd_step: CudaFunction = one,
    adam_step: CudaFunction = one,
    sum_squares: CudaFunction = one,
    convolution_forward: Both = both,
    convolution_backward_weight: Both = both,
    convolution_backward_input: Both = both,
    max_pool_forward: Both = both,
    max_pool_backward: Both = both,
}

impl Kernels {
    /// Compiles all sources for `capability`, on as many threads as there are files, and loads them.
    ///
    /// # Errors
    /// A source does not compile, or the driver does not take the code.
    pub(super) fn load(context: &Arc<CudaContext>, capability: i32) -> Result<Kernels> {
        let codes: Vec<Result<Vec<u8>>> = std::thread::scope(|scope| {
            let start = |source| scope.spawn(move || compile(source, capability));
            let threads: Vec<_> = SOURCES.into_iter().map(start).collect();
            let join = |thread: std::thread::ScopedJoinHandle<'_, _>| thread.join();
            let lost = |_| Err(Error::failed("compiling kernels", "the compiler panicked"));
            threads.into_iter().map(|thread| join(thread).unwrap_or_else(lost)).collect()
        });
        let mut modules = Vec::new();
        for (code, source) in codes.into_iter().zip(SOURCES) {
            let module = context.load_module(Ptx::from_binary(code?));
            let failed =
                |error| Error::failed(format!("loading the kernels of {}", source.name), explain(error));
            modules.push(module.map_err(failed)?);
        }
        Kernels::find(&Modules(modules))
    }
}
