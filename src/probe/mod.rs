//! Experiments that find out what an MPI library supports.
//!
//! Some MPIs crash on operations that others support: messages above 2 GiB, reductions in a GPU's
//! memory, above all non-blocking ones. So every trial is a job of its own ([`start`]) that may die
//! or hang; each of its ranks runs [`attempt`]. The result ([`Findings`]) is a table to read and a
//! file that training programs can use.

mod attempt;
mod findings;
mod interrupt;
mod job;
mod placement;

use std::fmt;
use std::str::FromStr;

use crate::measure::{Measured, OPERATIONS};

pub use attempt::attempt;
pub use findings::{Findings, TrialOutcome, TrialReport};
pub use job::{request_description, start};
pub use placement::{JobDescription, Placement, describe_job, topology};

/// The memory that buffers are in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryKind {
    /// The memory of the host.
    Host,
    /// The memory of a GPU.
    Device,
}

/// A trial: one of MPI's own operations in one form.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Trial {
    /// The operation.
    pub operation: Measured,
    /// The memory of its buffers.
    pub memory: MemoryKind,
    /// True if the call returns when the operation is complete.
    pub is_blocking: bool,
    /// True for more than 2 GiB. A C `int` cannot count the bytes, and MPIs that count bytes so
    /// internally fail.
    pub is_large: bool,
}

impl Trial {
    /// Returns all trials, the large ones only if `with_large`, those on a device only if
    /// `with_device`.
    pub fn all(with_large: bool, with_device: bool) -> Vec<Trial> {
        let mut all = Vec::new();
        for memory in [MemoryKind::Host, MemoryKind::Device] {
            for is_large in [false, true] {
                for operation in OPERATIONS {
                    for is_blocking in [true, false] {
                        let trial = Trial { operation, memory, is_blocking, is_large };
                        let is_wanted =
                            (with_large || !is_large) && (with_device || memory == MemoryKind::Host);
                        if is_wanted && trial.exists() {
                            all.push(trial);
                        }
                    }
                }
            }
        }
        all
    }

    /// Returns true unless the trial is one on a device that no program would use.
    fn exists(self) -> bool {
        self.memory == MemoryKind::Host || self.operation.is_tried_on_device(self.is_blocking)
    }

    /// Returns the size of the buffer in bytes.
    fn bytes(self) -> usize {
        if self.is_large { (2 << 30) + (64 << 10) } else { 1 << 20 }
    }

    /// Returns memory, call and size in words.
    pub fn column(self) -> [&'static str; 3] {
        [
            if self.memory == MemoryKind::Host { "host" } else { "device" },
            if self.is_blocking { "blocking" } else { "non-blocking" },
            if self.is_large { "large" } else { "small" },
        ]
    }
}

impl fmt::Display for Trial {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}:{}", self.operation.name, self.column().join(":"))
    }
}

impl FromStr for Trial {
    type Err = String;

    fn from_str(text: &str) -> Result<Trial, String> {
        let found = Trial::all(true, true).into_iter().find(|trial| trial.to_string() == text);
        found.ok_or_else(|| "no trial has that name".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::{MemoryKind, OPERATIONS, Trial};

    #[test]
    fn every_trial_has_a_name_of_its_own() {
        let all = Trial::all(true, true);
        let mut names: Vec<String> = all.iter().map(ToString::to_string).collect();
        assert!(all.iter().zip(&names).all(|(trial, name)| name.parse() == Ok(*trial)));
        names.sort();
        names.dedup();
        assert_eq!((names.len(), all.len()), (all.len(), 4 * OPERATIONS.len() + 14));
        assert!(
            Trial::all(false, false).iter().all(|trial| trial.memory == MemoryKind::Host && !trial.is_large)
        );
        assert!("all-reduce:host".parse::<Trial>().is_err());
    }
}
