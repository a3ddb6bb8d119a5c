//! The results of all trials, as a table and as a file.

use serde::Serialize;

use super::{JobDescription, Trial};
use crate::measure::OPERATIONS;

/// The outcome of a trial.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TrialOutcome {
    /// The values were right.
    Works,
    /// The values were wrong.
    Wrong,
    /// The job died.
    Died,
    /// The job hung and was killed.
    Hung,
    /// The trial was skipped; the note says why.
    LeftOut,
}

/// A trial and its outcome.
#[derive(Debug, Clone, Serialize)]
pub struct TrialReport {
    /// The operation, by its name in `collectives`.
    pub operation: String,
    /// `host` or `device`.
    pub memory: String,
    /// `blocking` or `non-blocking`.
    pub call: String,
    /// `small` (1 MiB) or `large` (above 2 GiB).
    pub size: String,
    /// The outcome.
    pub outcome: TrialOutcome,
    /// The last line of the job's output.
    pub note: String,
    /// The time that the job took, in seconds.
    pub seconds: f64,
}

/// The results of a run of `probe`, whose file [`Capabilities`](crate::comm::Capabilities) reads.
#[derive(Debug, Clone, Serialize)]
pub struct Findings {
    /// MPI's description of itself and of the job.
    #[serde(flatten)]
    pub description: JobDescription,
    /// The outcomes of all trials.
    pub trials: Vec<TrialReport>,
}

impl Findings {
    /// Formats a table with a row for every operation and a column for every form.
    pub fn table(&self) -> String {
        let mut columns: Vec<[&str; 3]> = Vec::new();
        for trial in Trial::all(true, true) {
            let column = trial.column();
            let is_tried =
                self.trials.iter().any(|tried| [&tried.memory, &tried.call, &tried.size] == column);
            if is_tried && !columns.contains(&column) {
                columns.push(column);
            }
        }
        let mut text = String::new();
        for line in 0..3 {
            text += &format!("{:<16}", if line == 2 { "operation" } else { "" });
            columns.iter().for_each(|column| text += &format!("{:<13}", column[line]));
            text = text.trim_end().to_owned() + "\n";
        }
        for operation in OPERATIONS {
            text += &format!("{:<16}", operation.name);
            for column in &columns {
                let found = self.trials.iter().find(|tried| {
                    tried.operation == operation.name && [&tried.memory, &tried.call, &tried.size] == *column
                });
                let word = match found.map(|tried| &tried.outcome) {
                    None => "-",
                    Some(TrialOutcome::Works) => "works",
                    Some(TrialOutcome::Wrong) => "WRONG",
                    Some(TrialOutcome::Died) => "DIES",
                    Some(TrialOutcome::Hung) => "HANGS",
                    Some(TrialOutcome::LeftOut) => "left out",
                };
                text += &format!("{word:<13}");
            }
            text = text.trim_end().to_owned() + "\n";
        }
        let failed = self.trials.iter().filter(|tried| tried.outcome != TrialOutcome::Works);
        for TrialReport { operation, memory, call, size, note, .. } in failed {
            text += &format!("{operation} {memory} {call} {size}: {note}\n");
        }
        text
    }
}

impl TrialReport {
    /// Creates the report of a trial.
    pub(super) fn new(trial: Trial, outcome: TrialOutcome, note: String, seconds: f64) -> TrialReport {
        let [memory, call, size] = trial.column().map(str::to_owned);
        TrialReport { operation: trial.operation.name.to_owned(), memory, call, size, outcome, note, seconds }
    }
}

#[cfg(test)]
mod tests {
    use super::{Findings, JobDescription, Trial, TrialOutcome, TrialReport};
    use crate::comm::Capabilities;

    #[test]
    fn programs_read_what_probe_writes() {
        let file = tempfile::NamedTempFile::new().unwrap();
        for (outcome, expected) in [(TrialOutcome::Works, true), (TrialOutcome::Died, false)] {
            let report = |trial| TrialReport::new(trial, outcome.clone(), String::new(), 0.1);
            let trials = Trial::all(true, true).into_iter().map(report).collect();
            let description = JobDescription { mpi: "an MPI".into(), ..JobDescription::default() };
            let findings = Findings { description, trials };
            std::fs::write(file.path(), serde_json::to_vec(&findings).unwrap()).unwrap();
            let found = Capabilities::read(file.path()).unwrap();
            assert_eq!((found.mpi.as_str(), found.takes_device_memory()), ("an MPI", Some(expected)));
        }
    }
}
