//! Every CUDA kernel compiles for every generation of devices, with NVRTC; no GPU is needed, but NVRTC is (SKIPPED without).

use phalanx::device::cuda::{SOURCES, compile};

#[test]
#[allow(unsafe_code)]
fn every_kernel_compiles_for_every_generation() {
    // SAFETY: loading the library runs its initialisers; it is made to be loaded so.
    if !unsafe { cudarc::nvrtc::sys::is_culib_present() } {
        eprintln!("SKIPPED: libnvrtc.so cannot be loaded; LD_LIBRARY_PATH may say where it is");
        return;
    }
    for capability in [70, 80, 90] {
        for source in SOURCES {
            let code = compile(source, capability).unwrap_or_else(|error| panic!("{error}"));
            assert!(code.starts_with(b"\x7fELF"), "{} for sm_{capability} is no machine code", source.name);
        }
    }
    // a device that is newer than the compiler gets intermediate code
    let code = compile(SOURCES[0], 999).unwrap_or_else(|error| panic!("{error}"));
    assert!(String::from_utf8_lossy(&code).contains(".target sm_"), "that is no PTX");
}
