//! CUDA for tests: a GPU if there is one, else the emulator of `tests/cuda/emulator`.

use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;

use phalanx::device::{Cuda, Precision};

/// Returns the directory in which to look for CUDA's libraries first; `None` if this machine has a
/// working GPU.
///
/// # Errors
/// If there is neither a GPU nor a compiler for the emulator, returns the reason.
pub fn libraries() -> Result<Option<&'static str>, String> {
    static FOUND: OnceLock<Result<Option<String>, String>> = OnceLock::new();
    let found = FOUND.get_or_init(|| match Cuda::open(0, Precision::F32) {
        Ok(_) => Ok(None),
        // a GPU that is there but does not work is a fault, not a reason to test something else
        Err(error) if has_driver() && !error.to_string().contains("finds no device") => panic!("{error}"),
        Err(_) => build_emulator().map(Some),
    });
    found.as_ref().map(Option::as_deref).map_err(Clone::clone)
}

/// Returns the directory of the emulated libraries, whether there is a GPU or not.
///
/// # Errors
/// If the libraries cannot be built, returns the reason.
pub fn emulator() -> Result<&'static str, String> {
    static BUILT: OnceLock<Result<String, String>> = OnceLock::new();
    BUILT.get_or_init(build_emulator).as_deref().map_err(Clone::clone)
}

/// Returns true if this machine has the library of an NVIDIA driver.
#[allow(unsafe_code)]
pub fn has_driver() -> bool {
    // SAFETY: loading a library runs its initialisers; the driver's are made to be run in any
    // process.
    unsafe { cudarc::driver::sys::is_culib_present() }
}

fn build_emulator() -> Result<String, String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cuda_emulator");
    let mut build = Command::new(root.join("tests/cuda/emulator/build"));
    build.arg(&directory).arg(root.join("src/device/cuda/kernels"));
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "g++".into());
    if Command::new(&compiler).arg("--version").output().is_err() {
        return Err(format!("there is no GPU, and no {compiler} to build an emulated one"));
    }
    let done = build.output().map_err(|error| format!("starting {build:?}: {error}"))?;
    // a kernel that the compiler rejects is a fault, not a reason to skip tests
    assert!(done.status.success(), "{build:?}: {}", String::from_utf8_lossy(&done.stderr));
    Ok(directory.display().to_string())
}
