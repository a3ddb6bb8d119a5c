//! Compilation of the sources in `kernels/` by NVRTC, for the device found.

use std::ffi::{CStr, CString, c_char};
use std::ptr;

use cudarc::nvrtc::result::{NvrtcError, compile_program, destroy_program, get_program_log};
use cudarc::nvrtc::sys;

use crate::{Error, Result};

/// A source file of kernels.
#[derive(Debug, Clone, Copy)]
pub struct KernelSource {
    /// File name.
    pub name: &'static str,
    pub(crate) text: &'static str,
}

/// Declarations that all source files share.
const COMMON: &str = include_str!("../kernels/common.cuh");

/// Headers that some source files include, with their texts.
const HEADERS: [(&CStr, &str); 5] = [
    (c"activation.cuh", include_str!("../kernels/activation.cuh")),
    (c"dropout.cuh", include_str!("../kernels/dropout.cuh")),
    (c"tile.cuh", include_str!("../kernels/tile.cuh")),
    (c"image.cuh", include_str!("../kernels/image.cuh")),
    (c"convolution_weight.cuh", include_str!("../kernels/convolution_weight.cuh")),
];

/// Constants that a source file is compiled for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Constants {
    /// Macros with their values.
    pub macros: Vec<(&'static str, String)>,
    /// The end of the names of kernels.
    pub suffix: String,
}

/// The code of a source file, compiled for a device.
#[derive(Debug)]
pub struct Compiled {
    /// The constants that it was compiled for.
    pub constants: Constants,
    /// Machine code, or, where NVRTC is older than the device, intermediate code (PTX) for an older
    /// device, which the driver compiles further.
    pub code: Vec<u8>,
    /// The compiler's messages: with machine code, the registers and spills of each kernel.
    pub log: String,
}

/// Compiles `source` with `constants` for devices of capability `capability` (80 for 8.0).
///
/// # Errors
/// NVRTC's own messages.
pub fn compile(source: KernelSource, constants: Constants, capability: i32) -> Result<Compiled> {
    let KernelSource { name, text } = source;
    let doing = || format!("compiling {name} for sm_{capability}");
    let failed = |error: NvrtcError| Error::failed(doing(), format!("NVRTC says {error}"));
    let known = known_capabilities().map_err(failed)?;
    let Some(nearest) = known.iter().copied().filter(|known| *known <= capability).max() else {
        let oldest = known.into_iter().min().unwrap_or_default();
        return Err(Error::input(
            doing(),
            format!("this NVRTC compiles only for sm_{oldest} and later: load an older CUDA toolkit"),
        ));
    };
    let is_known = nearest == capability;
    let architecture = if is_known { format!("sm_{capability}") } else { format!("compute_{nearest}") };
    // NVRTC finds no headers: the shared declarations go before the file, whose lines keep their
    // numbers
    let text = CString::new(format!("#line 1 \"common.cuh\"\n{COMMON}\n#line 1 \"{name}\"\n{text}"));
    let headers: std::result::Result<Vec<CString>, _> =
        HEADERS.iter().map(|(_, text)| CString::new(*text)).collect();
    let (Ok(text), Ok(name), Ok(headers)) = (text, CString::new(name), headers) else {
        return Err(Error::failed(doing(), "there is a zero byte in the source"));
    };
    let mut program = ptr::null_mut();
    let texts: Vec<*const c_char> = headers.iter().map(|header| header.as_ptr()).collect();
    let names = HEADERS.map(|(name, _)| name.as_ptr());
    let mut options = vec![
        format!("--gpu-architecture={architecture}"),
        "--std=c++17".to_owned(),
        "--extra-device-vectorization".into(),
        // so that lambdas are functions of the device
        "--device-as-default-execution-space".into(),
        "--ptxas-options=--verbose".into(),
    ];
    options.extend(constants.macros.iter().map(|(name, value)| format!("--define-macro={name}={value}")));
    // SAFETY: the texts and names outlive the program, which is destroyed once, at the end of the block;
    // there are as many headers as names.
    unsafe {
        sys::nvrtcCreateProgram(
            &raw mut program,
            text.as_ptr(),
            name.as_ptr(),
            texts.len() as i32,
            texts.as_ptr(),
            names.as_ptr(),
        )
        .result()
        .map_err(failed)?;
        let compiled = compile_program(program, &options);
        let log = get_program_log(program).unwrap_or_default();
        let log: Vec<u8> = log.iter().map(|c| *c as u8).take_while(|c| *c != 0).collect();
        let log = String::from_utf8_lossy(&log).trim().to_owned();
        let result = match compiled {
            Ok(()) => code(program, is_known).map(|code| Compiled { constants, code, log }).map_err(failed),
            Err(_) => Err(Error::failed(doing(), log)),
        };
        destroy_program(program).map_err(failed)?;
        result
    }
}

/// Returns the capabilities that this NVRTC compiles for.
///
/// # Errors
/// NVRTC's own.
pub fn known_capabilities() -> std::result::Result<Vec<i32>, NvrtcError> {
    let mut count = 0;
    // SAFETY: NVRTC writes one number, then as many numbers as the first said.
    unsafe {
        sys::nvrtcGetNumSupportedArchs(&raw mut count).result()?;
        let mut all = vec![0; count.unsigned_abs() as usize];
        sys::nvrtcGetSupportedArchs(all.as_mut_ptr()).result()?;
        Ok(all)
    }
}

/// Returns what a program was compiled to: machine code or PTX.
///
/// # Safety
/// `program` has been compiled.
unsafe fn code(
    program: sys::nvrtcProgram,
    is_machine_code: bool,
) -> std::result::Result<Vec<u8>, NvrtcError> {
    type Size = unsafe fn(sys::nvrtcProgram, *mut usize) -> sys::nvrtcResult;
    type Get = unsafe fn(sys::nvrtcProgram, *mut c_char) -> sys::nvrtcResult;
    let (size, get): (Size, Get) = if is_machine_code {
        (sys::nvrtcGetCUBINSize, sys::nvrtcGetCUBIN)
    } else {
        (sys::nvrtcGetPTXSize, sys::nvrtcGetPTX)
    };
    let mut len = 0;
    // SAFETY: this function's caller guarantees that the program has been compiled; the buffer is
    // as long as NVRTC says.
    unsafe {
        size(program, &raw mut len).result()?;
        let mut bytes = vec![0; len];
        get(program, bytes.as_mut_ptr().cast()).result()?;
        Ok(bytes)
    }
}
