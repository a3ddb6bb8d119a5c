//! The rows of the file of --metrics, one per step, and the result line on stdout.

use std::fs::File;
use std::io::{self, BufRead, BufReader, BufWriter, Seek, SeekFrom, Write};
use std::path::Path;

use serde::Serialize;

use crate::{Error, Result};

/// One step in the file of `--metrics`.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct MetricsRow {
    /// The step, from 1.
    pub step: u64,
    /// The number of epochs after the step; 1.5 is halfway through the second.
    pub epoch: f64,
    /// The mean loss over the global batch.
    pub loss: f64,
    /// The share of the batch's predictions that are the right class or token; empty or null without them.
    pub accuracy: Option<f64>,
    /// The norm of the gradient before clipping.
    pub gradient_norm: f64,
    /// The learning rate of the step.
    pub learning_rate: f64,
    /// The time that the step took on rank 0, in milliseconds.
    pub step_ms: f64,
}

/// The last line on stdout.
#[derive(Debug, Clone, Serialize)]
pub struct ResultLine {
    /// The program.
    pub program: String,
    /// The number of ranks.
    pub ranks: usize,
    /// The number of threads of each rank.
    pub threads: usize,
    /// The device that computed: `cpu` or `cuda`.
    pub device: String,
    /// The precision of products: `f32`, `tf32` or `bf16`.
    pub precision: String,
    /// True if the ranks of the tensor axis had some of the positions of sequences each.
    pub sequence_parallel: bool,
    /// The network.
    pub model: String,
    /// The number of parameters of the network.
    pub parameters: usize,
    /// The number of steps done.
    pub steps: u64,
    /// The step after which this start resumed the run, if it did.
    pub resumed_after: Option<u64>,
    /// The number of epochs done; 1.5 is halfway through the second.
    pub epochs: f64,
    /// The mean loss over the global batch of the last step, if there was one.
    pub loss: Option<f64>,
    /// The mean loss over the predictions for the test samples, if there are any.
    pub test_loss: Option<f64>,
    /// The share of these predictions that are the right class or token, if they are classes or tokens.
    pub accuracy: Option<f64>,
    /// The training samples per second, with the time of checkpoints and log lines but without that
    /// of evaluations.
    pub samples_per_second: f64,
    /// The median time of a step on rank 0, in milliseconds.
    pub median_step_ms: f64,
    /// The time for which a rank waited for training samples, as a share of the time of all steps:
    /// that of the rank that waited most.
    pub data_wait: Option<f64>,
    /// The peak memory of rank 0, in megabytes, if the system reports it.
    pub peak_memory_mb: Option<f64>,
    /// A hash of all final parameters' bits in logical order, in hexadecimal.
    pub parameters_digest: String,
}

impl ResultLine {
    /// Returns the line, which is a JSON object.
    ///
    /// # Errors
    /// A value cannot be written as JSON.
    pub(super) fn to_json(&self) -> Result<String> {
        serde_json::to_string(self).map_err(|error| Error::failed("printing the result", error))
    }
}

/// The file of `--metrics`.
pub struct MetricsFile {
    path: String,
    format: MetricsFormat,
    failed: bool,
}

enum MetricsFormat {
    Csv(Box<csv::Writer<File>>),
    JsonLines(BufWriter<File>),
}

impl MetricsFile {
    /// Creates the file: JSON lines if its name ends in `.json` or `.jsonl`, else CSV. A run that
    /// is resumed after step `step` continues its file: rows up to that step are kept, later ones,
    /// which will be written again, are removed. Not collective.
    ///
    /// # Errors
    /// The file cannot be created or read.
    pub fn create(path: &Path, step: u64) -> Result<MetricsFile> {
        let name = path.display().to_string();
        let is_json = path.extension().is_some_and(|extension| extension == "json" || extension == "jsonl");
        let open = || {
            // a pipe or a device has no rows to keep
            if step == 0 || !path.is_file() {
                return File::create(path).map(|file| (file, 0));
            }
            let mut file = File::options().read(true).write(true).open(path)?;
            let kept = rows_until(step, is_json, &file)?;
            file.set_len(kept)?;
            file.seek(SeekFrom::End(0))?;
            Ok((file, kept))
        };
        let (file, kept) =
            open().map_err(|error| Error::input(format!("creating --metrics {name}"), error))?;
        let format = if is_json {
            MetricsFormat::JsonLines(BufWriter::new(file))
        } else {
            let writer = csv::WriterBuilder::new().has_headers(kept == 0).from_writer(file);
            MetricsFormat::Csv(Box::new(writer))
        };
        Ok(MetricsFile { path: name, format, failed: false })
    }

    /// Writes one row and flushes it, so that the file can be followed. If that fails (the disk may
    /// be full), logs one warning and writes no further rows.
    pub fn write(&mut self, row: &MetricsRow) {
        if self.failed {
            return;
        }
        let outcome = match &mut self.format {
            MetricsFormat::Csv(writer) => writer
                .serialize(row)
                .map_err(|error| error.to_string())
                .and_then(|()| writer.flush().map_err(|e| e.to_string())),
            MetricsFormat::JsonLines(writer) => serde_json::to_writer(&mut *writer, row)
                .map_err(io::Error::from)
                .and_then(|()| writer.write_all(b"\n"))
                .and_then(|()| writer.flush())
                .map_err(|error| error.to_string()),
        };
        if let Err(error) = outcome {
            log::warn!("writing --metrics {}: {error}; training continues without it", self.path);
            self.failed = true;
        }
    }
}

/// Returns the length of the part of `file` with the complete rows up to step `step`.
fn rows_until(step: u64, is_json: bool, file: &File) -> io::Result<u64> {
    let step_of = |line: &str| -> Option<u64> {
        if is_json {
            serde_json::from_str::<serde_json::Value>(line).ok()?.get("step")?.as_u64()
        } else {
            line.split(',').next()?.parse().ok()
        }
    };
    let (mut reader, mut line, mut kept) = (BufReader::new(file), Vec::new(), 0);
    while reader.read_until(b'\n', &mut line)? > 0 && line.ends_with(b"\n") {
        let is_head = kept == 0 && !is_json && line.starts_with(b"step,");
        if !is_head && step_of(&String::from_utf8_lossy(&line)).is_none_or(|found| found > step) {
            break;
        }
        kept += line.len() as u64;
        line.clear();
    }
    Ok(kept)
}
