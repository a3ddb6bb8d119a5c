//! Shows the contents of a checkpoint, verifies it, and compares two. Needs no MPI.
//!
//! ```text
//! inspect checkpoints                     a line for each checkpoint of a directory
//! inspect step-00000050.h5                the contents of a checkpoint; verifies every checksum
//! inspect a.h5 b.h5 --tolerance 1e-5      the largest difference in each tensor; exit code 1 if
//!                                         one is larger than that
//! ```

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Parser;
use phalanx::app;
use phalanx::checkpoint::{self, Checkpoint, Difference, Settings, Tensor};
use phalanx::{Error, Result};

/// Show the contents of a checkpoint, verify it, or compare two.
#[derive(Parser)]
#[command(name = "inspect", version, args_override_self = true)]
struct Arguments {
    /// A checkpoint, a file of --export, or a directory of checkpoints
    path: PathBuf,

    /// Another file, to compare the first with
    other: Option<PathBuf>,

    /// With two files: fail with exit code 1 if a tensor differs by more than this fraction of its
    /// largest value, or is missing in one
    #[arg(long, value_name = "SHARE", requires = "other")]
    tolerance: Option<f64>,
}

fn run(arguments: &Arguments) -> Result<ExitCode> {
    let Arguments { path, other, tolerance } = arguments;
    if let Some(tolerance) = tolerance.filter(|tolerance| !(0.0..=f64::MAX).contains(tolerance)) {
        return Err(Error::input(
            "--tolerance",
            format!("it is {tolerance}, but must be at least 0 and finite"),
        ));
    }
    match other {
        Some(other) => compare(path, other, *tolerance),
        None if path.is_dir() => list(path),
        None => show(path),
    }
}

/// Prints a line for each checkpoint; returns exit code 1 if one is damaged.
fn list(directory: &Path) -> Result<ExitCode> {
    let mut all_sound = true;
    let found = checkpoint::list(directory)?;
    if found.is_empty() {
        app::print_line(&format!("{} holds no checkpoint", directory.display()))?;
    }
    for (step_in_name, path) in found {
        let name = path.display();
        match Checkpoint::open(&path) {
            Ok(Checkpoint { description, .. }) if description.step != step_in_name => {
                all_sound = false;
                app::print_line(&format!("{name}: it is the checkpoint of step {}", description.step))?;
            }
            Ok(Checkpoint { description, parameters_digest, .. }) => {
                let (step, epoch) = (description.step, description.epoch);
                app::print_line(&format!(
                    "{name}: {}, step {step}, epoch {epoch}, {parameters_digest}",
                    description.model
                ))?;
            }
            Err(error) => {
                all_sound = false;
                app::print_line(&format!("{error}"))?;
            }
        }
    }
    Ok(if all_sound { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn show(path: &Path) -> Result<ExitCode> {
    let file = Checkpoint::open_weights(path)?;
    let mut text = String::new();
    let words = |settings: &Settings| {
        let pairs: Vec<String> = settings.iter().map(|(name, value)| format!("{name} {value}")).collect();
        pairs.join(", ")
    };
    let d = &file.description;
    // writing to a String cannot fail
    let mut line = |name: &str, value: &str| writeln!(text, "{name:<18}{value}").unwrap_or_default();
    if file.is_sealed() {
        line("model", &d.model);
        line("position", &format!("step {}: {} epochs and {} steps", d.step, d.epoch, d.step_in_epoch));
        line("parameters digest", &file.parameters_digest);
        line("config", &words(&d.config));
        line("options", &words(&d.options));
        line("written by", &words(&d.written_by));
    }
    let width = file.tensors.iter().map(|tensor| name_of(tensor).len()).max().unwrap_or_default();
    writeln!(text, "\n{:<width$}  {:<20} {:>12} {:>12} {:>12}", "tensor", "shape", "least", "largest", "rms")
        .unwrap_or_default();
    for tensor in &file.tensors {
        let values = file.read(&tensor.group, &tensor.name, &tensor.shape)?;
        let shape: Vec<String> = tensor.shape.iter().map(ToString::to_string).collect();
        let (name, shape, range) = (name_of(tensor), shape.join(" × "), range_in_words(&values));
        writeln!(text, "{name:<width$}  {shape:<20} {range}").unwrap_or_default();
    }
    let verdict = if file.is_sealed() {
        "sound: every checksum is right"
    } else {
        "not written by Phalanx: no checksums"
    };
    app::print_line(&format!("{}\n{text}\n{verdict}", path.display()))?;
    Ok(ExitCode::SUCCESS)
}

/// Returns the least and the largest of `values`, which are NaN if one of them is, and their root mean
/// square.
fn range_in_words(values: &[f32]) -> String {
    if values.is_empty() {
        return format!("{0:>12} {0:>12} {0:>12}", "-");
    }
    let either =
        |one: f32, other: f32, better: f32| if one.is_nan() || other.is_nan() { f32::NAN } else { better };
    let least = values.iter().copied().reduce(|one, other| either(one, other, one.min(other)));
    let largest = values.iter().copied().reduce(|one, other| either(one, other, one.max(other)));
    let squares: f64 = values.iter().map(|value| f64::from(*value).powi(2)).sum();
    let rms = (squares / values.len() as f64).sqrt();
    let [least, largest] = [least, largest].map(Option::unwrap_or_default);
    format!("{least:>12.4e} {largest:>12.4e} {rms:>12.4e}")
}

/// Prints the largest difference in each tensor.
fn compare(path: &Path, other: &Path, tolerance: Option<f64>) -> Result<ExitCode> {
    let (first, second) = (Checkpoint::open_weights(path)?, Checkpoint::open_weights(other)?);
    for difference in Difference::between(&first.description.config, &second.description.config) {
        app::print_line(&format!("config: {difference}"))?;
    }
    let same: Vec<&Tensor> = first.tensors.iter().filter(|tensor| second.tensors.contains(tensor)).collect();
    let only = |file: &Checkpoint, other: &Checkpoint| -> Vec<String> {
        file.tensors.iter().filter(|tensor| !other.tensors.contains(tensor)).map(name_of).collect()
    };
    let mut same_tensors = true;
    for (file, missing) in [(path, only(&first, &second)), (other, only(&second, &first))] {
        if !missing.is_empty() {
            same_tensors = false;
            app::print_line(&format!(
                "only in {}, or of another shape: {}",
                file.display(),
                missing.join(", ")
            ))?;
        }
    }
    if same.is_empty() {
        let why = "they have no tensor of the same name and shape";
        return Err(Error::input(format!("comparing {} with {}", path.display(), other.display()), why));
    }
    let width = same.iter().map(|tensor| name_of(tensor).len()).max().unwrap_or_default();
    app::print_line(&format!("{:<width$} {:>14} {:>14}", "tensor", "largest off", "of largest"))?;
    let (mut worst, mut all_same) = (0.0_f64, same_tensors);
    for tensor in &same {
        let [a, b] = [&first, &second].map(|file| file.read(&tensor.group, &tensor.name, &tensor.shape));
        let (a, b) = (a?, b?);
        let differing = || a.iter().zip(&b).filter(|(a, b)| a.to_bits() != b.to_bits());
        all_same &= differing().next().is_none();
        let off = differing().map(|(a, b)| f64::from((a - b).abs()));
        // a difference that is NaN is beyond any tolerance
        let off = off.fold(0.0, |most, off| if off.is_nan() { f64::INFINITY } else { f64::max(most, off) });
        // an infinity would make any other difference a share of 0
        let finite = a.iter().map(|value| f64::from(value.abs())).filter(|value| value.is_finite());
        let largest = finite.fold(0.0, f64::max);
        let share = if off == 0.0 { 0.0 } else { off / largest };
        worst = worst.max(share);
        app::print_line(&format!("{:<width$} {off:>14.4e} {share:>14.4e}", name_of(tensor)))?;
    }
    app::print_line(if all_same {
        "the files hold the same tensors, bit for bit"
    } else {
        "the files differ"
    })?;
    let is_within = tolerance.is_none_or(|tolerance| worst <= tolerance && same_tensors);
    Ok(if is_within { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn name_of(tensor: &Tensor) -> String {
    format!("/{}/{}", tensor.group, tensor.name)
}

fn main() -> ExitCode {
    app::tool(run)
}
