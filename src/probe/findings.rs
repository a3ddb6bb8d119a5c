//! What was found, as a table and as a file.

use serde::Serialize;

use super::{Description, Trial};
use crate::measure::Measured;

/// How a trial ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// The values were right.
    Works,
    /// They were not.
    Wrong,
    /// The job died.
    Died,
    /// It had to be killed.
    Hung,
    /// It was not tried; the note says why.
    LeftOut,
}

/// A trial and its end.
#[derive(Debug, Clone, Serialize)]
pub struct Tried {
    /// The operation, as `collectives` calls it.
    pub operation: String,
    /// `host` or `device`.
    pub memory: String,
    /// `blocking` or `started`.
    pub call: String,
    /// `small` (1 MiB) or `large` (above 2 GiB).
    pub size: String,
    /// How it ended.
    pub outcome: Outcome,
    /// What the job said last.
    pub note: String,
    /// How long the job took, in seconds.
    pub seconds: f64,
}

/// All that was found. [`Capabilities`](crate::comm::Capabilities) reads it back from its file.
#[derive(Debug, Clone, Serialize)]
pub struct Findings {
    /// What MPI says.
    #[serde(flatten)]
    pub description: Description,
    /// What was tried.
    pub trials: Vec<Tried>,
}

impl Findings {
    /// A row for every operation, a column for every way to call it.
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
            columns.iter().for_each(|column| text += &format!("{:<10}", column[line]));
            text = text.trim_end().to_owned() + "\n";
        }
        for operation in Measured::ALL {
            text += &format!("{:<16}", operation.name());
            for column in &columns {
                let found = self.trials.iter().find(|tried| {
                    tried.operation == operation.name()
                        && [&tried.memory, &tried.call, &tried.size] == *column
                });
                let word = match found.map(|tried| &tried.outcome) {
                    None => "-",
                    Some(Outcome::Works) => "works",
                    Some(Outcome::Wrong) => "WRONG",
                    Some(Outcome::Died) => "DIES",
                    Some(Outcome::Hung) => "HANGS",
                    Some(Outcome::LeftOut) => "left out",
                };
                text += &format!("{word:<10}");
            }
            text = text.trim_end().to_owned() + "\n";
        }
        let failed = self.trials.iter().filter(|tried| tried.outcome != Outcome::Works);
        for Tried { operation, memory, call, size, note, .. } in failed {
            text += &format!("{operation} {memory} {call} {size}: {note}\n");
        }
        text
    }
}

impl Tried {
    /// The end of `trial`.
    pub(super) fn new(trial: Trial, outcome: Outcome, note: String, seconds: f64) -> Tried {
        let [memory, call, size] = trial.column().map(str::to_owned);
        Tried { operation: trial.operation.name(), memory, call, size, outcome, note, seconds }
    }
}
