//! Measurements as lines of a table, or of JSON.

use serde::Serialize;

use crate::{Error, Result};

/// What was measured of one operation.
#[derive(Debug, Clone, Serialize)]
pub struct Row {
    /// The operation, as on the command line.
    pub operation: String,
    /// How many ranks took part.
    pub ranks: usize,
    /// On how many nodes they are.
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
    /// What did it: an algorithm's name.
    pub algorithm: String,
    /// The most bytes of a chunk, where that was given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chunk_bytes: Option<usize>,
    /// Median time in microseconds.
    pub median_us: f64,
    /// Shortest time in microseconds.
    pub min_us: f64,
    /// What 99 in 100 stay below, in microseconds.
    pub p99_us: f64,
    /// Bytes of the buffer over the median, in GB/s.
    pub algorithm_gbs: f64,
    /// Bytes that the busiest link carries over the median, in GB/s.
    pub bus_gbs: f64,
    /// Elements that were not as expected, on all ranks and of all that were measured beside each other.
    pub wrong: u64,
    /// How much of it computing hides, in percent, of those that do not block.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub overlap_percent: Option<f64>,
    /// The medians of others that did the same, in microseconds, in the same turns.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub others: Vec<Other>,
}

/// Another way to do the same.
#[derive(Debug, Clone, Serialize)]
pub struct Other {
    /// Its name.
    pub algorithm: String,
    /// Median time in microseconds.
    pub median_us: f64,
    /// Its median time over that of the row.
    pub ratio: f64,
}

/// The line above the rows.
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
    /// A line of JSON.
    ///
    /// # Errors
    /// A number is none that JSON has.
    pub fn json(&self) -> Result<String> {
        serde_json::to_string(self).map_err(|error| Error::failed("writing a measurement as JSON", error))
    }

    /// A line of the table.
    pub fn line(&self) -> String {
        let overlap = self.overlap_percent.map_or_else(|| "-".to_owned(), |percent| format!("{percent:.0}"));
        let mut line = format!(
            "{:<14} {:>11} {:<7}{:<13}{:<13}{:<10}{:>11.2} {:>11.2} {:>11.2} {:>8.2} {:>8.2} {:>6} {overlap:>9}",
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
