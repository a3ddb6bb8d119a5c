//! Every CUDA kernel compiles with NVRTC for the generations of GPUs that this NVRTC knows. This needs NVRTC
//! (SKIPPED without it) but no GPU. It prints the registers, the spills and the shared memory of each kernel.

#[path = "../support/mod.rs"]
mod support;

use phalanx::device::ConvolutionShape;
use phalanx::device::cuda::{
    ATTENTION_SOURCE, CONVOLUTION_SOURCE, Compiled, Constants, OLDEST_CAPABILITY, SOURCES,
    attention_variants, compile, convolution_variants, known_capabilities,
};

use support::{say_skipped, soak};

/// The capabilities that are tested: the oldest and the newest that the compiler knows and that of most
/// clusters' GPUs; in the long test all.
fn tested_capabilities() -> Vec<i32> {
    let mut known = known_capabilities().unwrap();
    known.retain(|capability| *capability >= OLDEST_CAPABILITY);
    known.sort_unstable();
    if soak().is_none() {
        let usual = [known[0], 90, known[known.len() - 1]];
        known.retain(|capability| usual.contains(capability));
    }
    known
}

/// Compiles all sources, and returns what the compiler said.
fn compile_all(capability: i32) -> String {
    let mut all: Vec<_> = SOURCES.into_iter().map(|source| (source, Constants::default())).collect();
    let mut variants = attention_variants();
    // one width of heads in both formats, in the long test all
    if soak().is_none() {
        variants.retain(|constants| constants.suffix.starts_with("_64"));
    }
    all.extend(variants.into_iter().map(|constants| (ATTENTION_SOURCE, constants)));
    for (channels, height, outputs, kernel, padding, pool) in
        [(6, 14, 16, 5, 0, true), (64, 8, 64, 3, 1, false), (3, 31, 16, 11, 0, false)]
    {
        let shape = ConvolutionShape {
            rows: 1,
            channels,
            height,
            width: height,
            outputs,
            kernel,
            stride: 1,
            padding,
            pool,
            relu: pool,
            flattens: pool,
        };
        all.extend(convolution_variants(&shape).map(|constants| (CONVOLUTION_SOURCE, constants)));
    }
    let mut log = String::new();
    for (source, constants) in all {
        let compiled = compile(source, constants, capability).unwrap_or_else(|error| panic!("{error}"));
        let is_machine_code = compiled.code.starts_with(b"\x7fELF");
        assert!(is_machine_code, "{} for sm_{capability} is no machine code", source.name);
        log += &compiled.log;
        log += "\n";
    }
    log
}

/// Prints the registers, the spills and the shared memory of each kernel. Those that get as much shared
/// memory from their launch as a block may have must not declare any themselves.
fn print_kernels(capability: i32, log: &str) {
    let number_before = |line: &str, what: &str| -> Option<u32> {
        line[..line.find(what)?].split_whitespace().next_back()?.parse().ok()
    };
    let (mut name, mut spilled) = ("", 0);
    let mut table =
        format!("sm_{capability}: kernel, registers of a thread, bytes that it spills, shared bytes\n");
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("entry function '") {
            name = rest.split('\'').next().unwrap_or_default();
        }
        spilled = number_before(line, " bytes spill stores").unwrap_or(spilled);
        if let Some(registers) = number_before(line, " registers") {
            let shared = number_before(line, " bytes smem").unwrap_or(0);
            let is_full = name.starts_with("convolution_") || name.starts_with("attention_");
            assert!(!is_full || shared == 0, "{name} for sm_{capability} declares {shared} bytes");
            table += &format!("  {name:<44} {registers:>3} {spilled:>5} {shared:>6}\n");
        }
    }
    println!("{table}");
}

#[test]
#[allow(unsafe_code)]
fn every_kernel_compiles_for_every_generation() {
    // SAFETY: loading a library runs its initialisers; NVRTC's are made to be run in any process.
    if !unsafe { cudarc::nvrtc::sys::is_culib_present() } {
        say_skipped("libnvrtc.so cannot be loaded; LD_LIBRARY_PATH may say where it is");
        return;
    }
    let capabilities = tested_capabilities();
    println!("kernels for the compute capabilities {capabilities:?}");
    std::thread::scope(|scope| {
        for &capability in &capabilities {
            scope.spawn(move || print_kernels(capability, &compile_all(capability)));
        }
    });
    // a device newer than the compiler gets intermediate code
    let Compiled { code, .. } =
        compile(SOURCES[0], Constants::default(), 999).unwrap_or_else(|error| panic!("{error}"));
    assert!(String::from_utf8_lossy(&code).contains(".target sm_"), "that is no PTX");
}
