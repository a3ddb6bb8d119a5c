//! One thing that a rank does with one micro-batch, and its name.

use std::fmt;
use std::str::FromStr;

/// What is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Work {
    /// The forward pass.
    Forward,
    /// The whole backward pass.
    Backward,
    /// Its first half: the gradients of the values, which earlier stages wait for.
    InputGradient,
    /// Its second half: the gradients of the weights, which nobody waits for.
    WeightGradient,
    /// Sending the output of the stage to the next.
    SendActivation,
    /// Receiving the input of the stage from the one before.
    ReceiveActivation,
    /// Sending the gradient of the input to the stage before.
    SendGradient,
    /// Receiving the gradient of the output from the next stage.
    ReceiveGradient,
}

impl Work {
    /// The name in the notation of PyTorch's `torch.distributed.pipelining`.
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

    /// True for messages, false for passes.
    pub fn is_message(self) -> bool {
        !matches!(self, Work::Forward | Work::Backward | Work::InputGradient | Work::WeightGradient)
    }

    /// True for what reads or writes the values of a micro-batch.
    pub fn touches_values(self) -> bool {
        !matches!(self, Work::SendGradient | Work::ReceiveGradient)
    }

    /// True for what reads or writes the gradients of a micro-batch's values.
    pub fn touches_gradients(self) -> bool {
        !matches!(self, Work::Forward | Work::SendActivation | Work::ReceiveActivation)
    }

    /// What a pass costs in units of a forward pass: a gradient of inputs and one of weights take as many operations each.
    /// Messages cost nothing.
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

/// One thing to do with one micro-batch in one stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Action {
    /// The stage; of a message, the one that does it.
    pub stage: usize,
    /// What.
    pub work: Work,
    /// The micro-batch.
    pub micro_batch: usize,
}

impl Action {
    /// `work` on `micro_batch` in `stage`.
    pub fn new(stage: usize, work: Work, micro_batch: usize) -> Action {
        Action { stage, work, micro_batch }
    }

    /// The other end of a message; nothing for passes, and for messages to and from where there is no stage.
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

/// `2F0`: stage 2, forward, micro-batch 0.
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
                "{text:?} is no action; expected a stage, one of F B I W SEND_F RECV_F SEND_B RECV_B, and a micro-batch, such as 0F2"
            )
        };
        let name = text.trim().trim_start_matches(|c: char| c.is_ascii_digit());
        let stage = &text.trim()[..text.trim().len() - name.len()];
        let work = name.trim_end_matches(|c: char| c.is_ascii_digit());
        let micro_batch = &name[work.len()..];
        let work = Work::ALL.into_iter().find(|candidate| candidate.name() == work).ok_or_else(fail)?;
        let number = |digits: &str| digits.parse().ok().filter(|number| *number < 1 << 20).ok_or_else(fail);
        Ok(Action { stage: number(stage)?, work, micro_batch: number(micro_batch)? })
    }
}
