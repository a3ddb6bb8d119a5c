//! CUDA for tests: a GPU if there is one, else the emulator of `tests/cuda_emulator`.

use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;

use phalanx::device::{Cuda, Precision};

/// Where the libraries of CUDA are to be looked for first: nowhere, if this machine has a GPU that works.
///
/// # Errors
/// There is neither a GPU nor a compiler for the emulator; the reason.
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

/// The directory with emulated libraries, whether there is a GPU or not.
///
/// # Errors
/// They cannot be built; the reason.
pub fn emulator() -> Result<&'static str, String> {
    static BUILT: OnceLock<Result<String, String>> = OnceLock::new();
    BUILT.get_or_init(build_emulator).as_deref().map_err(Clone::clone)
}

/// True if this machine has the library of an NVIDIA driver.
#[allow(unsafe_code)]
pub fn has_driver() -> bool {
    // SAFETY: loading the library runs its initialisers; it is made to be loaded so.
    unsafe { cudarc::driver::sys::is_culib_present() }
}

fn build_emulator() -> Result<String, String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cuda_emulator");
    let mut build = Command::new(root.join("tests/cuda_emulator/build"));
    build.arg(&directory).arg(root.join("src/device/cuda/kernels"));
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "g++".into());
    if Command::new(&compiler).arg("--version").output().is_err() {
        return Err(format!("there is no GPU, and no {compiler} to build an emulated one"));
    }
    let done = build.output().map_err(|error| format!("starting {build:?}: {error}"))?;
    // a compiler that does not take the kernels is a fault, not a reason to leave tests out
    assert!(done.status.success(), "{build:?}: {}", String::from_utf8_lossy(&done.stderr));
    Ok(directory.display().to_string())
}
