//! Kernels by name. All but [specialised](super::specialised) ones are loaded at start, so a name that is not
//! in its source fails before training begins.

use std::any::Any;
use std::sync::Arc;

use cudarc::driver::sys::{CUfunction, CUresult};
use cudarc::driver::{CudaContext, CudaFunction, CudaModule};
use cudarc::nvrtc::Ptx;

use super::compile::{Compiled, Constants, KernelSource, compile};
use super::format::Format;
use super::machine::explain;
use crate::{Error, Result};

/// A kernel.
pub(crate) struct Kernel(CudaFunction);

impl Kernel {
    pub(crate) fn load(module: &KernelModule, name: &str) -> Result<Kernel> {
        let name = &format!("{name}{}", module.constants.suffix);
        module.module.load_function(name).map(Kernel).map_err(|error| {
            let why = match error.0 {
                CUresult::CUDA_ERROR_NOT_FOUND => format!("it is not in {}", module.source.name),
                _ => explain(error),
            };
            Error::failed(format!("loading the kernel {name}"), why)
        })
    }

    pub(crate) fn function(&self) -> CUfunction {
        self.0.cu_function()
    }
}

/// A kernel for each format of activations, `NAME_f32` and `NAME_bf16` in the source.
pub(crate) struct KernelPair {
    f32: Kernel,
    bf16: Kernel,
}

impl KernelPair {
    pub(crate) fn load(module: &KernelModule, name: &str) -> Result<KernelPair> {
        let load = |format: Format| Kernel::load(module, &format!("{name}_{}", format.name()));
        Ok(KernelPair { f32: load(Format::F32)?, bf16: load(Format::Bf16)? })
    }

    pub(crate) fn of(&self, format: Format) -> &Kernel {
        match format {
            Format::F32 => &self.f32,
            Format::Bf16 => &self.bf16,
        }
    }
}

/// The kernels of one source file, a field each: use `kernel_table!`.
pub(crate) trait KernelTable: Sized + 'static {
    const SOURCE: KernelSource;

    fn load(module: &KernelModule) -> Result<Self>;
}

/// Defines a `KernelTable` with fields `NAME: Kernel` and `NAME: KernelPair`, named as in the
/// source.
macro_rules! kernel_table {
    ($table:ident in $file:literal { $($name:ident: $kind:ident,)* }) => {
        pub(crate) struct $table {
            $(pub(crate) $name: $crate::device::cuda::runtime::kernels::$kind,)*
        }

        impl $crate::device::cuda::runtime::kernels::KernelTable for $table {
            const SOURCE: $crate::device::cuda::runtime::compile::KernelSource =
                $crate::device::cuda::runtime::compile::KernelSource {
                    name: $file,
                    text: include_str!(concat!(
                        env!("CARGO_MANIFEST_DIR"),
                        "/src/device/cuda/kernels/",
                        $file
                    )),
                };

            fn load(module: &$crate::device::cuda::runtime::kernels::KernelModule) -> $crate::Result<$table> {
                use $crate::device::cuda::runtime::kernels::*;
                Ok($table { $($name: $kind::load(module, stringify!($name))?,)* })
            }
        }
    };
}
pub(crate) use kernel_table;

/// A source file, compiled and loaded.
pub(crate) struct KernelModule {
    source: KernelSource,
    constants: Constants,
    module: Arc<CudaModule>,
}

impl KernelModule {
    /// Loads what `source` was compiled to.
    ///
    /// # Errors
    /// The driver does not take the code.
    pub(crate) fn new(
        context: &Arc<CudaContext>,
        source: KernelSource,
        compiled: Compiled,
    ) -> Result<KernelModule> {
        let Compiled { code, constants, .. } = compiled;
        let failed = |error| Error::failed(format!("loading the kernels of {}", source.name), explain(error));
        let module = context.load_module(Ptx::from_binary(code)).map_err(failed)?;
        Ok(KernelModule { source, constants, module })
    }
}

/// All source files, compiled and loaded.
pub(crate) struct KernelModules(Vec<KernelModule>);

impl KernelModules {
    /// Compiles `sources` for `capability`, each on a thread of its own, and loads them.
    ///
    /// # Errors
    /// A source does not compile, or the driver does not take the code.
    pub(crate) fn compile(
        context: &Arc<CudaContext>,
        capability: i32,
        sources: &[KernelSource],
    ) -> Result<KernelModules> {
        let compiled: Vec<Result<Compiled>> = std::thread::scope(|scope| {
            let start = |source: &KernelSource| {
                let source = *source;
                scope.spawn(move || compile(source, Constants::default(), capability))
            };
            let threads: Vec<_> = sources.iter().map(start).collect();
            let panicked = |_| Err(Error::failed("compiling kernels", "the compiler panicked"));
            threads.into_iter().map(|thread| thread.join().unwrap_or_else(panicked)).collect()
        });
        let mut modules = Vec::new();
        for (compiled, &source) in compiled.into_iter().zip(sources) {
            modules.push(KernelModule::new(context, source, compiled?)?);
        }
        Ok(KernelModules(modules))
    }

    /// Loads the kernels of one source file.
    ///
    /// # Errors
    /// A kernel is not in its source.
    pub(crate) fn load<T: KernelTable>(&self) -> Result<T> {
        let module = self.0.iter().find(|module| module.source.name == T::SOURCE.name);
        T::load(module.expect("every table's source is in the list of sources"))
    }
}

/// The kernels of all families of operations, one table of each type.
#[derive(Default)]
pub(crate) struct KernelTables(Vec<Box<dyn Any>>);

impl KernelTables {
    /// Adds a table, whose kernels are in `modules`.
    ///
    /// # Errors
    /// A kernel is not in its source.
    pub(crate) fn load<T: KernelTable>(&mut self, modules: &KernelModules) -> Result<()> {
        self.0.push(Box::new(modules.load::<T>()?));
        Ok(())
    }

    /// Returns the table of this type. The few tables are compared by the identifier of their type,
    /// which costs less than a hash.
    pub(crate) fn of<T: KernelTable>(&self) -> &T {
        let table = self.0.iter().find_map(|table| table.downcast_ref());
        table.expect("every family's table is loaded when the device is opened")
    }
}
