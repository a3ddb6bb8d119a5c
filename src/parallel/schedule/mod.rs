//! Pipeline schedules as data: for every rank of the stage axis, its actions of one step, in order.
//!
//! A schedule is [generated](PipelineScheduleKind), or [read](Schedule::from_csv) from a file, in
//! the order of the passes; messages are [put in](Schedule::with_messages), the result is
//! [checked](Schedule::check), and only then does anything run. Pure logic: nothing here
//! communicates or computes.
//!
//! Sending and receiving are separate actions. At a `Receive` the receive is posted, and the rank
//! waits for it where the value is used. At a `Send` the message is sent.
//!
//! # In the program `pipeline`
//!
//! `--schedule` takes `sequential`, `gpipe`, `1f1b`, `interleaved`, `zero-bubble` (ZB-H1), `deferred`, or
//! a CSV file in the notation of PyTorch's pipelining. Gradients of weights of linear layers of one
//! stage that follow each other in a schedule, such as all of `deferred`, are one product, of up to 16
//! micro-batches. Before anything runs, the schedule is
//! proved to run every pass and send every message exactly once, in a possible order, and to end even if
//! every send waits for its receive. An error names the action at fault. `--show-schedule` draws
//! the schedule as a table, or into a file as a picture (`.svg`) or as CSV:
//!
//! ```text
//! $ pipeline --show-schedule --show-ranks 4 --micro-batches 4 --schedule zero-bubble
//! zero-bubble: 4 stages on 4 ranks, 4 micro-batches; bubble 20.0 %, at most 4 live micro-batches on a rank
//! rank 0   F0 F1 F2 F3 .  .  .  I0 W0 I1 W1 I2 W2 I3 W3
//! rank 1   .  F0 F1 F2 .  .  I0 F3 I1 W0 I2 W1 I3 W2 W3
//! rank 2   .  .  F0 F1 .  I0 F2 I1 F3 I2 W0 I3 W1 W2 W3
//! rank 3   .  .  .  F0 I0 F1 I1 F2 I2 F3 I3 W0 W1 W2 W3
//! ```

mod action;
mod draw;
mod generate;
mod messages;
mod notation;
mod timeline;
mod validate;

#[cfg(test)]
mod tests;

pub use action::{Action, Work};
pub use generate::PipelineScheduleKind;
pub use timeline::{TimedPass, Timeline};
pub use validate::Report;

/// The actions of every rank of the stage axis in one step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Schedule {
    /// The actions of each rank, in order.
    pub ranks: Vec<Vec<Action>>,
    /// The number of stages, over all ranks.
    pub num_stages: usize,
    /// The number of micro-batches.
    pub num_micro_batches: usize,
}

impl Schedule {
    /// Returns the schedule with these actions, whose numbers of stages and micro-batches are the
    /// largest that occur.
    pub fn new(ranks: Vec<Vec<Action>>) -> Schedule {
        let all = || ranks.iter().flatten();
        Schedule {
            num_stages: all().map(|action| action.stage + 1).max().unwrap_or_default(),
            num_micro_batches: all().map(|action| action.micro_batch + 1).max().unwrap_or_default(),
            ranks,
        }
    }

    /// Returns true if gradients of weights are computed in passes of their own.
    pub fn splits_passes(&self) -> bool {
        self.ranks.iter().flatten().any(|action| action.work == Work::InputGradient)
    }

    /// Returns the rank that runs each stage: the one with its forward passes, if there is one.
    pub fn owners(&self) -> Vec<Option<usize>> {
        let mut owners = vec![None; self.num_stages];
        for (rank, actions) in self.ranks.iter().enumerate() {
            for action in actions.iter().filter(|action| action.work == Work::Forward) {
                owners[action.stage].get_or_insert(rank);
            }
        }
        owners
    }

    /// Returns the stages of rank `rank`, in order.
    pub fn stages_of(&self, rank: usize) -> Vec<usize> {
        let owners = self.owners();
        (0..self.num_stages).filter(|stage| owners[*stage] == Some(rank)).collect()
    }

    /// Returns the forward passes and their messages alone, as an evaluation needs them.
    pub fn forward_only(&self) -> Schedule {
        let keep = |action: &Action| {
            matches!(action.work, Work::Forward | Work::SendActivation | Work::ReceiveActivation)
                .then_some(*action)
        };
        let ranks = self.ranks.iter().map(|actions| actions.iter().filter_map(keep).collect()).collect();
        Schedule { ranks, ..*self }
    }
}
