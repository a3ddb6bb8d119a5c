//! Every CUDA kernel compiles with NVRTC for every generation of GPUs. This needs NVRTC (SKIPPED
//! without it) but no GPU.

use phalanx::device::cuda::{SOURCES, compile};

#[test]
#[allow(unsafe_code)]
fn every_kernel_compiles_for_every_generation() {
    // SAFETY: loading a library runs its initialisers; NVRTC's are made to be run in any process.
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
    // a device newer than the compiler gets intermediate code
    let code = compile(SOURCES[0], 999).unwrap_or_else(|error| panic!("{error}"));
    assert!(String::from_utf8_lossy(&code).contains(".target sm_"), "that is no PTX");
}
