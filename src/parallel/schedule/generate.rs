//! The schedules that are known by name.

use clap::ValueEnum;

use super::{Action, Schedule, Work};
use crate::{Error, Result};

/// The most forward passes that a schedule may have over all ranks.
const MOST_PASSES: usize = 1 << 18;

/// A family of pipeline schedules, by its name on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PipelineScheduleKind {
    /// Plain model parallelism: one micro-batch is under way at a time, so one rank works at a time.
    #[value(name = "sequential")]
    Sequential,
    /// All forward passes, then all backward passes (Huang et al., "GPipe", NeurIPS 2019).
    #[value(name = "gpipe")]
    GPipe,
    /// As many forward passes as keep all ranks busy, then one backward and one forward pass in turn:
    /// as long as GPipe's, with at most as many live micro-batches as there are stages (Narayanan et
    /// al., "PipeDream-2BW", ICML 2021).
    #[value(name = "1f1b")]
    OneForwardOneBackward,
    /// 1F1B with several stages on each rank, so that a pass, and with it the bubble, is shorter, at
    /// the price of more messages (Narayanan et al., "Efficient large-scale language model training",
    /// SC 2021, §2.2).
    #[value(name = "interleaved")]
    Interleaved,
    /// The backward pass in halves: the gradients of weights fill the bubble, with 1F1B's memory (Qi
    /// et al., "Zero bubble pipeline parallelism", ICLR 2024, schedule ZB-H1).
    #[value(name = "zero-bubble")]
    ZeroBubble,
}

impl PipelineScheduleKind {
    /// Generates the schedule of `num_ranks` ranks for `num_micro_batches`, with messages. With
    /// [`PipelineScheduleKind::Interleaved`] and several ranks, rank r has the `stages_per_rank`
    /// stages r, r + num_ranks, …; else every rank has one stage.
    ///
    /// # Errors
    /// A number is 0, or the schedule would have more than 262,144 forward passes.
    pub fn generate(
        self,
        num_ranks: usize,
        stages_per_rank: usize,
        num_micro_batches: usize,
    ) -> Result<Schedule> {
        if num_ranks == 0 || stages_per_rank == 0 || num_micro_batches == 0 {
            let why = format!(
                "{num_ranks} ranks, {stages_per_rank} stages a rank, {num_micro_batches} micro-batches; each must be at least 1"
            );
            return Err(Error::input("making a schedule", why));
        }
        let num_actions = num_ranks.saturating_mul(stages_per_rank).saturating_mul(num_micro_batches);
        if num_actions > MOST_PASSES {
            let why = format!(
                "{num_ranks} ranks, {stages_per_rank} stages a rank and {num_micro_batches} micro-batches make {num_actions} forward passes; {MOST_PASSES} is the limit"
            );
            return Err(Error::input("making a schedule", why));
        }
        let pipeline = Generator { num_ranks, num_micro_batches };
        if self == PipelineScheduleKind::Interleaved && num_ranks > 1 {
            return pipeline.interleaved(stages_per_rank);
        }
        let passes = |rank| match self {
            PipelineScheduleKind::Sequential => pipeline.one_forward_one_backward(rank, 0),
            PipelineScheduleKind::GPipe => pipeline.one_forward_one_backward(rank, num_micro_batches),
            PipelineScheduleKind::OneForwardOneBackward => {
                pipeline.one_forward_one_backward(rank, num_ranks - 1 - rank)
            }
            PipelineScheduleKind::Interleaved => pipeline.one_forward_one_backward(rank, 0),
            PipelineScheduleKind::ZeroBubble => pipeline.zero_bubble(rank),
        };
        Schedule::new((0..num_ranks).map(passes).collect()).with_messages()
    }
}

struct Generator {
    num_ranks: usize,
    num_micro_batches: usize,
}

impl Generator {
    /// `ahead` forward passes before the first that is followed by a backward pass.
    fn one_forward_one_backward(&self, rank: usize, ahead: usize) -> Vec<Action> {
        let stages = [rank];
        in_turn(ahead, &self.order(&stages, true), &self.order(&stages, false))
    }

    /// Megatron-LM's order: the last rank begins its first backward pass when it has the first output of the last stage. A last
    /// group of fewer micro-batches than ranks can make ranks wait for each other in a circle: then all begin with more forward
    /// passes, as few as will do.
    fn interleaved(&self, stages_per_rank: usize) -> Result<Schedule> {
        let group = self.num_ranks.min(self.num_micro_batches);
        let all = stages_per_rank * self.num_micro_batches;
        let passes = |rank: usize, more: usize| {
            let stages: Vec<usize> =
                (0..stages_per_rank).map(|chunk| chunk * self.num_ranks + rank).collect();
            let ahead = 2 * (self.num_ranks - 1 - rank) + (stages_per_rank - 1) * group + more;
            in_turn(ahead, &self.order(&stages, true), &self.order(&stages, false))
        };
        let with = |more| {
            Schedule::new((0..self.num_ranks).map(|rank| passes(rank, more)).collect()).with_messages()
        };
        (0..all).map(with).find(Result::is_ok).unwrap_or_else(|| with(all))
    }

    /// The passes of a rank in one direction: in groups of as many micro-batches as there are ranks, each group through one
    /// stage after the other.
    fn order(&self, stages: &[usize], forward: bool) -> Vec<Action> {
        let mut passes = Vec::new();
        for first in (0..self.num_micro_batches).step_by(self.num_ranks) {
            let group = first..self.num_micro_batches.min(first + self.num_ranks);
            for at in 0..stages.len() {
                let (stage, work) = if forward {
                    (stages[at], Work::Forward)
                } else {
                    (stages[stages.len() - 1 - at], Work::Backward)
                };
                passes.extend(group.clone().map(|micro_batch| Action::new(stage, work, micro_batch)));
            }
        }
        passes
    }

    /// ZB-H1: rank r puts off the gradients of weights of r micro-batches, which makes as many live ones everywhere as 1F1B has
    /// on rank 0.
    fn zero_bubble(&self, rank: usize) -> Vec<Action> {
        let num = self.num_micro_batches;
        let action = |work| move |micro_batch| Action::new(rank, work, micro_batch);
        let ahead = (self.num_ranks - 1 - rank).min(num);
        let mut passes: Vec<Action> = (0..ahead).map(action(Work::Forward)).collect();
        for micro_batch in 0..num {
            passes.extend((ahead + micro_batch < num).then(|| action(Work::Forward)(ahead + micro_batch)));
            passes.push(action(Work::InputGradient)(micro_batch));
            passes.extend(micro_batch.checked_sub(rank).map(action(Work::WeightGradient)));
        }
        passes.extend((num.saturating_sub(rank)..num).map(action(Work::WeightGradient)));
        passes
    }
}

/// `ahead` forward passes, then one of `forward` and one of `backward` in turn, then the rest of `backward`.
fn in_turn(ahead: usize, forward: &[Action], backward: &[Action]) -> Vec<Action> {
    let (first, rest) = forward.split_at(ahead.min(forward.len()));
    let mut passes = first.to_vec();
    for (at, action) in backward.iter().enumerate() {
        passes.extend(rest.get(at));
        passes.push(*action);
    }
    passes
}
