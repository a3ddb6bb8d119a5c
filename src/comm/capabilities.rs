//! [`Capabilities`]: what an MPI library supports, as `probe` found by experiment and wrote to a
//! file.

use std::path::Path;

use serde::Deserialize;

use crate::{Error, Result};

/// The part of the file of `probe --json` on which programs rely.
#[derive(Debug, Clone, Deserialize)]
pub struct Capabilities {
    /// The name and version of the MPI library.
    pub mpi: String,
    trials: Vec<TrialResult>,
}

/// One operation that was tried.
#[derive(Debug, Clone, Deserialize)]
struct TrialResult {
    operation: String,
    memory: String,
    size: String,
    outcome: String,
}

impl Capabilities {
    /// Reads a file that `probe --json` wrote. Not collective.
    ///
    /// # Errors
    /// The file cannot be read, or was not written by `probe`.
    pub fn read(path: &Path) -> Result<Capabilities> {
        let doing = || format!("reading the findings of probe from {}", path.display());
        let text = std::fs::read(path).map_err(|error| Error::input(doing(), error))?;
        serde_json::from_slice(&text).map_err(|error| Error::input(doing(), error))
    }

    /// Returns true if messages from and to device memory work, and `None` if they were not tried.
    pub fn takes_device_memory(&self) -> Option<bool> {
        let is_message = |trial: &&TrialResult| {
            trial.memory == "device" && trial.operation == "send-receive" && trial.size == "small"
        };
        self.trials.iter().find(is_message).map(|trial| trial.outcome == "works")
    }
}

#[cfg(test)]
mod tests {
    use super::Capabilities;

    #[test]
    fn small_messages_of_device_memory_decide() {
        let trial = |memory: &str, size: &str, outcome: &str| {
            format!(
                r#"{{"operation": "send-receive", "memory": "{memory}", "call": "non-blocking",
                "size": "{size}", "outcome": "{outcome}", "note": "", "seconds": 0.1}}"#
            )
        };
        let found = |trials: &[String]| {
            let text = format!(r#"{{"mpi": "an MPI", "cuda": "yes", "trials": [{}]}}"#, trials.join(","));
            serde_json::from_str::<Capabilities>(&text).unwrap().takes_device_memory()
        };
        let host = trial("host", "small", "works");
        assert_eq!(found(&[]), None);
        assert_eq!(found(&[host.clone(), trial("device", "large", "died")]), None);
        assert_eq!(found(&[host.clone(), trial("device", "small", "works")]), Some(true));
        assert_eq!(found(&[host, trial("device", "small", "hung")]), Some(false));
    }
}
