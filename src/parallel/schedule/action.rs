//! The actions of a schedule and their notation.

use std::fmt;
use std::str::FromStr;

/// Stages and micro-batches have numbers below this.
const NUMBER_LIMIT: usize = 1 << 20;

/// The kind of an action.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Work {
    /// The forward pass.
    Forward,
    /// The whole backward pass.
    Backward,
    /// The first half of the backward pass: the gradients of the activations, for which earlier
    /// stages wait.
    InputGradient,
    /// The second half of the backward pass: the gradients of the weights, for which no stage
    /// waits.
    WeightGradient,
    /// Sending the output of the stage to the next.
    SendActivation,
    /// Receiving the input of the stage from the previous one.
    ReceiveActivation,
    /// Sending the gradient of the input to the previous stage.
    SendGradient,
    /// Receiving the gradient of the output from the next stage.
    ReceiveGradient,
}

impl Work {
    /// Returns the name in the notation of PyTorch's `torch.distributed.pipelining`.
    pub fn name(self) -> &'static str {
        match self {
            Work::Forward => "F",
            Work::Backward => "B",
            Work::InputGradient => "I",
            Work::WeightGradient => "W",
            Work::SendActivation => "SEND_F",
            Work::ReceiveActivation => "RECV_F",
            Work::SendGradient => "SEND_B",
            Work::ReceiveGradient => "RECV_B",
        }
    }

    /// Returns true for messages, false for passes.
    pub fn is_message(self) -> bool {
        !matches!(self, Work::Forward | Work::Backward | Work::InputGradient | Work::WeightGradient)
    }

    /// Returns true for actions that read or write the activations of a micro-batch.
    pub fn touches_values(self) -> bool {
        !matches!(self, Work::SendGradient | Work::ReceiveGradient)
    }

    /// Returns true for actions that read or write the gradients of a micro-batch's activations.
    pub fn touches_gradients(self) -> bool {
        !matches!(self, Work::Forward | Work::SendActivation | Work::ReceiveActivation)
    }

    /// Returns the cost of a pass in units of a forward pass: the gradients of the inputs take as
    /// many operations as the forward pass, and so do the gradients of the weights. Messages cost
    /// nothing.
    pub fn cost(self) -> u64 {
        match self {
            Work::Forward | Work::InputGradient | Work::WeightGradient => 1,
            Work::Backward => 2,
            _ => 0,
        }
    }

    const ALL: [Work; 8] = [
        Work::Forward,
        Work::Backward,
        Work::InputGradient,
        Work::WeightGradient,
        Work::SendActivation,
        Work::ReceiveActivation,
        Work::SendGradient,
        Work::ReceiveGradient,
    ];
}

/// An action of a schedule: a pass or a message of one micro-batch in one stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Action {
    /// The stage; for a message, the stage at this end.
    pub stage: usize,
    /// The kind of the action.
    pub work: Work,
    /// The micro-batch.
    pub micro_batch: usize,
}

impl Action {
    /// Returns the action `work` on `micro_batch` in `stage`.
    pub fn new(stage: usize, work: Work, micro_batch: usize) -> Action {
        Action { stage, work, micro_batch }
    }

    /// Returns the other end of a message; `None` for passes, and for messages to or from a stage
    /// before the first.
    pub fn partner(self) -> Option<Action> {
        let Action { stage, work, micro_batch } = self;
        let at = |stage: Option<usize>, work| stage.map(|stage| Action { stage, work, micro_batch });
        match work {
            Work::SendActivation => at(Some(stage + 1), Work::ReceiveActivation),
            Work::ReceiveActivation => at(stage.checked_sub(1), Work::SendActivation),
            Work::SendGradient => at(stage.checked_sub(1), Work::ReceiveGradient),
            Work::ReceiveGradient => at(Some(stage + 1), Work::SendGradient),
            _ => None,
        }
    }
}

/// Writes `2F0` for stage 2, forward, micro-batch 0.
impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{}{}{}", self.stage, self.work.name(), self.micro_batch))
    }
}

impl FromStr for Action {
    type Err = String;

    fn from_str(text: &str) -> Result<Action, String> {
        let fail = || {
            format!(
                "{text:?} is not an action; expected a stage, one of F B I W SEND_F RECV_F SEND_B RECV_B, \
                 and a micro-batch, such as 0F2"
            )
        };
        let name = text.trim().trim_start_matches(|c: char| c.is_ascii_digit());
        let stage = &text.trim()[..text.trim().len() - name.len()];
        let work = name.trim_end_matches(|c: char| c.is_ascii_digit());
        let micro_batch = &name[work.len()..];
        let work = Work::ALL.into_iter().find(|candidate| candidate.name() == work).ok_or_else(fail)?;
        let number = |digits: &str| match digits.parse() {
            Ok(number) if number < NUMBER_LIMIT => Ok(number),
            _ if digits.is_empty() => Err(fail()),
            _ => Err(format!("the numbers of {text:?} must be below {NUMBER_LIMIT}")),
        };
        Ok(Action { stage: number(stage)?, work, micro_batch: number(micro_batch)? })
    }
}
