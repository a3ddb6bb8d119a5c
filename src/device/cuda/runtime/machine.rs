//! The CUDA driver, its devices, and the libraries that are loaded at run time. Errors name what is
//! missing, because programs also start on nodes without CUDA.

use std::sync::Arc;

use cudarc::driver::sys::{CUdevice_attribute, CUresult};
use cudarc::driver::{CudaContext, DriverError, result, sys};

use crate::{Error, Result};

/// The oldest driver that is supported, as CUDA numbers it: 12.0.
const OLDEST_DRIVER: i32 = 12_000;

/// The oldest devices that the kernels are compiled for: Volta.
pub const OLDEST_CAPABILITY: i32 = 70;

/// The beginning of error messages.
pub(crate) const DOING: &str = "using CUDA";

/// A device that meets all requirements.
pub(crate) struct Machine {
    pub(crate) context: Arc<CudaContext>,
    /// Major version times ten plus minor.
    pub(crate) capability: i32,
    pub(crate) num_multiprocessors: u32,
    /// Number of the device, below `num_devices`.
    pub(crate) ordinal: usize,
    pub(crate) num_devices: usize,
    pub(crate) name: String,
}

/// Opens device `local_rank` modulo the number of devices, so ranks of a node may share a device.
///
/// # Errors
/// A library or a device is missing or too old; the message says what to do about it.
pub(crate) fn open(local_rank: usize) -> Result<Machine> {
    check_libraries()?;
    let num_devices = count_devices()?;
    let ordinal = local_rank % num_devices;
    let failed = |error: DriverError| Error::failed(format!("opening CUDA device {ordinal}"), explain(error));
    let context = CudaContext::new(ordinal).map_err(|error| match error.0 {
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
            let why =
                "it has no memory left for another rank; start fewer ranks per device, or choose another";
            Error::input(format!("opening CUDA device {ordinal}"), why)
        }
        _ => failed(error),
    })?;
    // kept until the process ends: MPI closes its mappings of device memory in MPI_Finalize, after the
    // device has been dropped
    std::mem::forget(Arc::clone(&context));
    let (major, minor) = context.compute_capability().map_err(failed)?;
    let (capability, name) = (10 * major + minor, context.name().map_err(failed)?);
    if capability < OLDEST_CAPABILITY {
        let why = format!("{name} has compute capability {major}.{minor}; 7.0 (Volta) or later is needed");
        return Err(Error::input(DOING, why));
    }
    let attribute = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
    let num_multiprocessors = context.attribute(attribute).map_err(failed)?.unsigned_abs();
    Ok(Machine { context, capability, num_multiprocessors, ordinal, num_devices, name })
}

/// Checks that the libraries can be loaded: cudarc panics where one cannot.
fn check_libraries() -> Result<()> {
    let missing = |name: &str, what: &str, way_out: &str| {
        Err(Error::input(
            DOING,
            format!("{name}, {what}, cannot be loaded; {way_out}, or choose --device cpu"),
        ))
    };
    // SAFETY: loading a library runs its initialisers; NVIDIA supports loading these at run time.
    let [driver, compiler, products] = unsafe {
        [
            sys::is_culib_present(),
            cudarc::nvrtc::sys::is_culib_present(),
            cudarc::cublaslt::sys::is_culib_present(),
        ]
    };
    if !driver {
        return missing(
            "libcuda.so.1",
            "the NVIDIA driver's library",
            "run on a node with a GPU and its driver",
        );
    }
    let driver_version = check_driver()?;
    let toolkit = "put the CUDA toolkit's lib64 into LD_LIBRARY_PATH (often `module load cuda`)";
    if !compiler {
        return missing("libnvrtc.so", "which compiles kernels for the device", toolkit);
    }
    if !products {
        return missing("libcublasLt.so", "which multiplies matrices", toolkit);
    }
    check_toolkit(driver_version)
}

/// Checks that the libraries are not of a later major version than the driver.
fn check_toolkit(driver: i32) -> Result<()> {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: both libraries have been loaded, and the pointers are to local integers.
    let products = unsafe {
        let answer = cudarc::nvrtc::sys::nvrtcVersion(&raw mut major, &raw mut minor);
        answer.result().map_err(|error| Error::failed("asking for the version of NVRTC", error))?;
        cudarc::cublaslt::sys::cublasLtGetVersion()
    };
    // 12.9.1 is 120901
    let products = products as i32 / 10_000;
    if major.max(products) > driver / 1000 {
        let why = format!(
            "NVRTC is of CUDA {major}.{minor} and cuBLASLt of CUDA {products}, but the NVIDIA driver of \
             this node is for CUDA {}.{} only; load an older CUDA toolkit",
            driver / 1000,
            driver % 1000 / 10
        );
        return Err(Error::input(DOING, format!("{why}, or choose --device cpu")));
    }
    Ok(())
}

/// Returns the driver's version, after checking that it has all functions that are used.
fn check_driver() -> Result<i32> {
    let mut version = 0;
    // SAFETY: the driver's library has been loaded, and the pointer is to a local integer.
    let answer = unsafe { sys::cuDriverGetVersion(&raw mut version) };
    if answer != CUresult::CUDA_SUCCESS {
        return Err(Error::failed(
            "asking for the version of the NVIDIA driver",
            explain(DriverError(answer)),
        ));
    }
    if version < OLDEST_DRIVER {
        let (major, minor) = (version / 1000, version % 1000 / 10);
        let why = format!(
            "the NVIDIA driver of this node is for CUDA {major}.{minor}; one for CUDA 12.0 or later is needed"
        );
        return Err(Error::input(DOING, format!("{why}, or choose --device cpu")));
    }
    Ok(version)
}

fn count_devices() -> Result<usize> {
    let count = result::init().and_then(|()| result::device::get_count());
    let visible = || match std::env::var("CUDA_VISIBLE_DEVICES") {
        Ok(value) => format!("CUDA_VISIBLE_DEVICES is '{value}'; "),
        Err(_) => String::new(),
    };
    match count {
        Ok(count) if count > 0 => Ok(count.unsigned_abs() as usize),
        Ok(_) | Err(DriverError(CUresult::CUDA_ERROR_NO_DEVICE)) => {
            let way_out = "ask Slurm for one (--gpus-per-task=1), or choose --device cpu";
            Err(Error::input(DOING, format!("the driver finds no device; {}{way_out}", visible())))
        }
        Err(error) => Err(Error::failed("starting CUDA", explain(error))),
    }
}

/// Returns the driver's description of an error.
pub(crate) fn explain(error: DriverError) -> String {
    let words = |text: std::result::Result<&std::ffi::CStr, DriverError>| {
        text.map_or_else(|_| "unknown".to_owned(), |text| text.to_string_lossy().into_owned())
    };
    format!("{} ({})", words(error.error_string()), words(error.error_name()))
}
