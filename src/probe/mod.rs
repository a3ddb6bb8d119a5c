//! What this MPI can do, found out by trying.
//!
//! Some MPIs crash on what others do: messages above 2 GiB, reductions of a GPU's memory, non-blocking ones of it. So every trial is a job
//! of its own ([`start`]) that may die or hang; each of its ranks runs [`attempt`]. What is found ([`Findings`]) is a table to read and
//! a file that training programs can be pointed to.

mod attempt;
mod findings;
mod job;
mod place;

use std::fmt;
use std::str::FromStr;

use crate::measure::Measured;

pub use attempt::attempt;
pub use findings::{Findings, Outcome, Tried};
pub use job::{describe, start};
pub use place::{Description, Place, description, topology};

/// Where the buffers are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Memory {
    /// In the processor's memory.
    Host,
    /// In that of a GPU.
    Device,
}

/// Something to be tried: one of MPI's own operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Trial {
    /// The operation.
    pub operation: Measured,
    /// Where its buffers are.
    pub memory: Memory,
    /// True if the call returns when it is done.
    pub is_blocking: bool,
    /// True for more than 2 GiB, whose bytes no C `int` counts: MPIs that count them inside fail.
    pub is_large: bool,
}

impl Trial {
    /// All that can be tried, the large ones only if they are wanted, those of a device only if there is one.
    pub fn all(with_large: bool, with_device: bool) -> Vec<Trial> {
        let mut all = Vec::new();
        for memory in [Memory::Host, Memory::Device] {
            for is_large in [false, true] {
                for operation in Measured::ALL {
                    for is_blocking in [true, false] {
                        let trial = Trial { operation, memory, is_blocking, is_large };
                        let is_wanted = (with_large || !is_large) && (with_device || memory == Memory::Host);
                        if is_wanted && trial.exists() {
                            all.push(trial);
                        }
                    }
                }
            }
        }
        all
    }

    /// On a device: what programs could use.
    fn exists(self) -> bool {
        let on_device = match self.operation {
            Measured::SendReceive => !self.is_blocking,
            Measured::Broadcast | Measured::AllGather | Measured::AllReduce => true,
            _ => false,
        };
        self.memory == Memory::Host || on_device
    }

    /// The size of the buffer, in bytes.
    fn bytes(self) -> usize {
        if self.is_large { (2 << 30) + (64 << 10) } else { 1 << 20 }
    }

    /// Memory, call and size in words.
    pub fn column(self) -> [&'static str; 3] {
        [
            if self.memory == Memory::Host { "host" } else { "device" },
            if self.is_blocking { "blocking" } else { "started" },
            if self.is_large { "large" } else { "small" },
        ]
    }
}

impl fmt::Display for Trial {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}:{}", self.operation.name(), self.column().join(":"))
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
    use super::{Memory, Trial};

    #[test]
    fn every_trial_has_a_name_of_its_own() {
        let all = Trial::all(true, true);
        let mut names: Vec<String> = all.iter().map(ToString::to_string).collect();
        assert!(all.iter().zip(&names).all(|(trial, name)| name.parse() == Ok(*trial)));
        names.sort();
        names.dedup();
        assert_eq!((names.len(), all.len()), (all.len(), 36 + 14));
        assert!(Trial::all(false, false).iter().all(|trial| trial.memory == Memory::Host && !trial.is_large));
        assert!("all-reduce:host".parse::<Trial>().is_err());
    }
}
