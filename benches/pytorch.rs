//! PyTorch's figures beside those of a benchmark.
#![allow(dead_code)] // every benchmark uses its own part of this

use std::path::{Path, PathBuf};
use std::process::Command;

/// Returns the Python interpreter: `PHALANX_PYTHON`, or `python3`.
pub fn interpreter() -> String {
    std::env::var("PHALANX_PYTHON").unwrap_or_else(|_| "python3".into())
}

/// Returns the path of a script in `benches`: in the working directory, for a benchmark that was built
/// elsewhere, or in the directory where it was built.
pub fn script(name: &str) -> PathBuf {
    let here = Path::new("benches").join(name);
    let there = Path::new(env!("CARGO_MANIFEST_DIR")).join(&here);
    if here.exists() { here } else { there }
}

/// Returns the numbers that a script prints, or says why there are none.
pub fn numbers(name: &str, arguments: &[&str]) -> Vec<f64> {
    let mut command = Command::new(interpreter());
    // PyTorch brings libraries of its own
    command.env_remove("LD_LIBRARY_PATH").arg(script(name)).args(arguments);
    let (printed, complaints) = match command.output() {
        Ok(done) => (done.stdout, String::from_utf8_lossy(&done.stderr).into_owned()),
        Err(error) => (Vec::new(), format!("{}: {error}", interpreter())),
    };
    let words = String::from_utf8_lossy(&printed);
    let numbers: Vec<f64> = words.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    if numbers.is_empty() {
        say_missing(&complaints);
    }
    numbers
}

/// Says why there are no figures: the last exception that Python has reported, or else the last line of the
/// error output, which may be the launcher's.
pub fn say_missing(complaints: &str) {
    let exception = complaints.lines().rfind(|line| line.contains("Error: "));
    let last = exception.or_else(|| complaints.lines().last());
    eprintln!("no figures of PyTorch: {}", last.unwrap_or_default());
}
