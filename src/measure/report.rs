//! Measurements as lines of a table, or of JSON.

use serde::Serialize;

use crate::{Error, Result};

/// The measurement of one operation.
#[derive(Debug, Clone, Serialize)]
pub struct Row {
    /// The operation, by its name on the command line.
    pub operation: &'static str,
    /// The number of ranks that took part.
    pub ranks: usize,
    /// The number of nodes that the ranks are on.
    pub nodes: usize,
    /// MPI's name and version.
    pub mpi: String,
    /// The size of the buffer.
    pub bytes: usize,
    /// `host` or `device`.
    pub memory: &'static str,
    /// `blocking` or `non-blocking`.
    pub call: &'static str,
    /// `in place` or `out of place`.
    pub place: &'static str,
    /// The name of the algorithm.
    pub algorithm: String,
    /// The largest chunk in bytes, if it was given, and the operation has the algorithm it was given for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chunk_bytes: Option<usize>,
    /// Median of the samples in microseconds.
    pub median_us: f64,
    /// Shortest sample in microseconds. A sample is the mean of as many runs as take 60 µs, up to 1000,
    /// or one longer run, on the slowest rank.
    pub min_us: f64,
    /// 99th percentile of the samples, in microseconds.
    pub p99_us: f64,
    /// Bytes of the buffer over the median, in GB/s.
    pub algorithm_gbs: f64,
    /// Bytes that the busiest link carries over the median, in GB/s.
    pub bus_gbs: f64,
    /// Number of elements that were not as expected, on all ranks and with all ways to do the
    /// operation.
    pub wrong: u64,
    /// The part of a non-blocking operation's time that computation hides, in percent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub overlap_percent: Option<f64>,
    /// The other ways to do the operation, measured alternately with it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub others: Vec<Other>,
}

/// Another way to do an operation.
#[derive(Debug, Clone, Serialize)]
pub struct Other {
    /// The name of the way.
    pub algorithm: String,
    /// Median time in microseconds.
    pub median_us: f64,
    /// The median time over that of the row.
    pub ratio: f64,
}

/// Returns the line above the rows of a table.
pub fn header() -> String {
    format!(
        "{:<14} {:>11} {:<7}{:<13}{:<13}{:<10}{:>11} {:>11} {:>11} {:>8} {:>8} {:>6} {:>9}",
        "operation",
        "bytes",
        "memory",
        "call",
        "place",
        "by",
        "median us",
        "min us",
        "p99 us",
        "alg GB/s",
        "bus GB/s",
        "wrong",
        "overlap %"
    )
}

impl Row {
    /// Returns a line of JSON, with `null` for what is NaN or infinite.
    ///
    /// # Errors
    /// None that a row can cause.
    pub fn json(&self) -> Result<String> {
        serde_json::to_string(self).map_err(|error| Error::failed("writing a measurement as JSON", error))
    }

    /// Returns a line of the table.
    pub fn line(&self) -> String {
        let overlap = self.overlap_percent.map_or_else(|| "-".to_owned(), |percent| format!("{percent:.0}"));
        let mut line = format!(
            "{:<14} {:>11} {:<7}{:<13}{:<13}{:<10}{:>11.2} {:>11.2} {:>11.2} {:>8.2} {:>8.2} {:>6} \
             {overlap:>9}",
            self.operation,
            self.bytes,
            self.memory,
            self.call,
            self.place,
            self.algorithm,
            self.median_us,
            self.min_us,
            self.p99_us,
            self.algorithm_gbs,
            self.bus_gbs,
            self.wrong,
        );
        for other in &self.others {
            line += &format!("  {} {:.2} us, {:.2} x", other.algorithm, other.median_us, other.ratio);
        }
        line
    }
}
