//! From the sources in `kernels/` to machine code, by NVRTC, for one kind of device.

use std::ffi::{CString, c_char};

use cudarc::nvrtc::result::{NvrtcError, compile_program, create_program, destroy_program, get_program_log};
use cudarc::nvrtc::sys;

use crate::{Error, Result};

/// A file of kernels.
#[derive(Debug, Clone, Copy)]
pub struct Source {
    /// Its name.
    pub name: &'static str,
    text: &'static str,
}

const COMMON: &str = include_str!("kernels/common.cuh");

/// All files of kernels.
pub const SOURCES: [Source; 5] = [
    Source { name: "convolution.cu", text: include_str!("kernels/convolution.cu") },
    Source { name: "elementwise.cu", text: include_str!("kernels/elementwise.cu") },
    Source { name: "loss.cu", text: include_str!("kernels/loss.cu") },
    Source { name: "optimizer.cu", text: include_str!("kernels/optimizer.cu") },
    Source { name: "pool.cu", text: include_str!("kernels/pool.cu") },
];

/// Machine code of `source` for devices of capability `capability` (80 for 8.0), or, where the compiler does not know the
/// device, intermediate code for an older one that the driver goes on with.
///
/// # Errors
/// The compiler's own words.
pub fn compile(source: Source, capability: i32) -> Result<Vec<u8>> {
    let Source { name, text } = source;
    let doing = || format!("compiling {name} for sm_{capability}");
    let failed = |error: NvrtcError| Error::failed(doing(), format!("NVRTC says {error}"));
    let known = known_capabilities().map_err(failed)?;
    let Some(nearest) = known.iter().copied().filter(|known| *known <= capability).max() else {
        let oldest = known.into_iter().min().unwrap_or_default();
        return Err(Error::input(
            doing(),
            format!("this NVRTC knows only sm_{oldest} and later: take an older CUDA toolkit"),
        ));
    };
    let is_known = nearest == capability;
    let architecture = if is_known { format!("sm_{capability}") } else { format!("compute_{nearest}") };
    // NVRTC has no headers: what is shared goes before the file, whose lines keep their numbers
    let text = CString::new(format!("#line 1 \"common.cuh\"\n{COMMON}\n#line 1 \"{name}\"\n{text}"));
    let (Ok(text), Ok(name)) = (text, CString::new(name)) else {
        return Err(Error::failed(doing(), "there is a zero byte in the source"));
    };
    let program = create_program(&text, Some(&name)).map_err(failed)?;
    let options = [
        format!("--gpu-architecture={architecture}"),
        "--std=c++17".to_owned(),
        "--extra-device-vectorization".into(),
    ];
    // SAFETY: the program was made just now and is destroyed at the end; its text and name outlive it.
    unsafe {
        let compiled = compile_program(program, &options);
        let code = match compiled {
            Ok(()) => code(program, is_known).map_err(failed),
            Err(_) => {
                let log = get_program_log(program).unwrap_or_default();
                let log: Vec<u8> = log.iter().map(|c| *c as u8).take_while(|c| *c != 0).collect();
                Err(Error::failed(doing(), String::from_utf8_lossy(&log).trim()))
            }
        };
        destroy_program(program).map_err(failed)?;
        code
    }
}

/// The architectures that this NVRTC knows.
fn known_capabilities() -> std::result::Result<Vec<i32>, NvrtcError> {
    let mut count = 0;
    // SAFETY: NVRTC writes one number, then as many as it said.
    unsafe {
        sys::nvrtcGetNumSupportedArchs(&raw mut count).result()?;
        let mut all = vec![0; count.unsigned_abs() as usize];
        sys::nvrtcGetSupportedArchs(all.as_mut_ptr()).result()?;
        Ok(all)
    }
}

/// What a program was compiled to.
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
    // SAFETY: the caller's promise; the buffer is as long as NVRTC says.
    unsafe {
        size(program, &raw mut len).result()?;
        let mut bytes = vec![0; len];
        get(program, bytes.as_mut_ptr().cast()).result()?;
        Ok(bytes)
    }
}
