//! A schedule as one rank runs it: every action with the arrays it works on.
//!
//! An *activation slot* holds the activations of one micro-batch in one stage, from the first
//! action that touches them to the last; a *gradient set* holds their gradients. This file assigns
//! them to actions, once, so that as few as possible are needed.

use std::collections::HashMap;

use crate::parallel::schedule::{Action, Schedule, Work};

/// An action with its arrays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Instruction {
    /// The action.
    pub action: Action,
    /// The stage's number among those of this rank.
    pub local: usize,
    /// The activation slot; 0 where the action touches none.
    pub slot: usize,
    /// The gradient set; 0 where the action touches none.
    pub set: usize,
    /// The arrays of another stage of the same rank from which a pass copies its input, without a
    /// message.
    pub neighbour: Option<NeighbourArrays>,
    /// The other end of a message.
    pub message: Option<MessageEnd>,
    /// True if, after this action, the gradients of this stage are complete.
    pub completes: bool,
    /// True if the next pass too computes gradients of weights of this stage, so that both are one
    /// product.
    pub joins_next: bool,
}

/// The most micro-batches whose gradients of weights are one product.
pub const MOST_JOINED: usize = 16;

/// The arrays of a neighbouring stage on the same rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NeighbourArrays {
    /// The stage's number among those of this rank.
    pub local: usize,
    /// The number of its activation slot (for a forward pass) or gradient set (for a backward
    /// pass).
    pub number: usize,
}

/// The other end of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MessageEnd {
    /// The rank at the other end.
    pub peer: usize,
    /// The tag: direction, the sender's number among the stages of its rank, and micro-batch as one number.
    pub tag: i32,
}

/// The actions of one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankProgram {
    /// The actions, in order.
    pub instructions: Vec<Instruction>,
    /// The number of activation slots of each stage of the rank.
    pub num_slots: Vec<usize>,
    /// The number of gradient sets of each stage of the rank.
    pub num_sets: Vec<usize>,
}

/// For each stage and micro-batch, the first and the last action that needs arrays for it.
#[derive(Default)]
struct Lives(HashMap<(usize, usize), (usize, usize)>);

/// For each stage and micro-batch, the number of the array that is used.
type ArrayPlaces = HashMap<(usize, usize), usize>;

impl Lives {
    /// Records that action number `action` needs the arrays of `micro_batch` in `stage`.
    fn touch(&mut self, action: usize, stage: usize, micro_batch: usize) {
        let life = self.0.entry((stage, micro_batch)).or_insert((action, action));
        life.1 = life.1.max(action);
    }

    /// Assigns as few arrays as possible, each time those that have been free longest, and returns
    /// them with the number of arrays of each stage.
    fn places(&self, num_stages: usize) -> (ArrayPlaces, Vec<usize>) {
        let mut lives: Vec<_> = self.0.iter().map(|(key, life)| (*life, *key)).collect();
        lives.sort_unstable();
        // for each stage, the last action that needs each of its arrays
        let mut ends: Vec<Vec<usize>> = vec![Vec::new(); num_stages];
        let mut places = ArrayPlaces::new();
        for ((first, last), (stage, micro_batch)) in lives {
            let ends = &mut ends[stage];
            let free = (0..ends.len()).filter(|place| ends[*place] < first).min_by_key(|place| ends[*place]);
            let place = free.unwrap_or(ends.len());
            if free.is_none() {
                ends.push(last);
            }
            ends[place] = last;
            places.insert((stage, micro_batch), place);
        }
        (places, ends.iter().map(Vec::len).collect())
    }
}

impl RankProgram {
    /// Assigns arrays to the actions of `rank` in `schedule`, which has been checked. Receives of
    /// gradients are posted one pass ahead of their place in the schedule. An array that is sent is
    /// not used again before the next pass is done, so that the message has had time. Waiting for a
    /// message that is still under way is safe, because the order of the schedule has been proved
    /// free of deadlock.
    pub fn new(schedule: &Schedule, rank: usize) -> RankProgram {
        let actions = posted_ahead(&schedule.ranks[rank]);
        let owners = schedule.owners();
        let stages = schedule.stages_of(rank);
        let most_local_stages = most_local_stages(schedule);
        let local =
            |stage| stages.iter().position(|own| *own == stage).expect("a rank's actions are in its stages");
        let joined_in = joined_in(&actions);
        let [values, gradients] = lives(&actions, &owners, &joined_in);
        let (slots, num_slots) = values.places(owners.len());
        let (sets, num_sets) = gradients.places(owners.len());
        let place = |places: &ArrayPlaces, stage, micro_batch| {
            places.get(&(stage, micro_batch)).copied().unwrap_or_default()
        };
        let mut last_of: HashMap<usize, usize> = HashMap::new();
        for (at, action) in actions.iter().enumerate() {
            if matches!(action.work, Work::Backward | Work::WeightGradient) {
                last_of.insert(action.stage, at);
            }
        }
        let mut instructions = Vec::new();
        for (at, action) in actions.iter().enumerate() {
            let Action { stage, work, micro_batch } = *action;
            let slot = if work.touches_values() { place(&slots, stage, micro_batch) } else { 0 };
            let set = if work.touches_gradients() { place(&sets, stage, micro_batch) } else { 0 };
            let neighbour = neighbour(&owners, *action).map(|neighbour| match neighbour {
                Neighbour::Before(stage) => {
                    NeighbourArrays { local: local(stage), number: place(&slots, stage, micro_batch) }
                }
                Neighbour::After(stage) => {
                    NeighbourArrays { local: local(stage), number: place(&sets, stage, micro_batch) }
                }
            });
            let completes = last_of.get(&stage) == Some(&at);
            let message = action.partner().and_then(|partner| {
                let sender =
                    if matches!(work, Work::SendActivation | Work::SendGradient) { *action } else { partner };
                let tag = tag(schedule, most_local_stages, &owners, sender);
                Some(MessageEnd { peer: owners[partner.stage]?, tag })
            });
            let local = local(stage);
            instructions.push(Instruction {
                action: *action,
                local,
                slot,
                set,
                neighbour,
                message,
                completes,
                joins_next: joined_in[at] != at,
            });
        }
        let own = |numbers: &[usize]| stages.iter().map(|stage| numbers[*stage]).collect();
        RankProgram { instructions, num_slots: own(&num_slots), num_sets: own(&num_sets) }
    }
}

impl RankProgram {
    /// Returns the most micro-batches whose gradients of weights are one product.
    pub fn most_joined(&self) -> usize {
        let passes = self.instructions.iter().filter(|at| at.action.work == Work::WeightGradient);
        let mut num = 0;
        let joined = passes.map(|pass| {
            num += 1;
            if pass.joins_next { num } else { std::mem::take(&mut num) }
        });
        joined.max().unwrap_or_default()
    }
}

/// Returns the time for which values, and gradients, of micro-batches need arrays.
fn lives(actions: &[Action], owners: &[Option<usize>], joined_in: &[usize]) -> [Lives; 2] {
    let (mut values, mut gradients) = (Lives::default(), Lives::default());
    for (at, action) in actions.iter().enumerate() {
        let Action { stage, work, micro_batch } = *action;
        let next_pass = next_pass(actions, at).unwrap_or(at);
        if work.touches_values() {
            values.touch(at, stage, micro_batch);
            values.touch(joined_in[at], stage, micro_batch);
        }
        if work.touches_gradients() {
            gradients.touch(at, stage, micro_batch);
            gradients.touch(joined_in[at], stage, micro_batch);
        }
        match work {
            Work::SendActivation => values.touch(next_pass, stage, micro_batch),
            Work::SendGradient => gradients.touch(next_pass, stage, micro_batch),
            _ => {}
        }
        match neighbour(owners, *action) {
            Some(Neighbour::Before(stage)) => values.touch(at, stage, micro_batch),
            Some(Neighbour::After(stage)) => gradients.touch(at, stage, micro_batch),
            None => {}
        }
    }
    [values, gradients]
}

/// Returns the place of the first pass after the action at `at`.
fn next_pass(actions: &[Action], at: usize) -> Option<usize> {
    let ahead = actions[at + 1..].iter().position(|later| !later.work.is_message())?;
    Some(at + 1 + ahead)
}

/// Returns, for every action, the place of the one in which it is done: for gradients of weights the
/// last of up to [`MOST_JOINED`] passes of its stage that follow each other, else its own.
fn joined_in(actions: &[Action]) -> Vec<usize> {
    let mut joined_in: Vec<usize> = (0..actions.len()).collect();
    let mut num_joined = 1;
    for (at, action) in actions.iter().enumerate() {
        let is_next =
            |next: &usize| actions[*next].work == action.work && actions[*next].stage == action.stage;
        match next_pass(actions, at).filter(is_next) {
            _ if action.work != Work::WeightGradient => {}
            Some(next) if num_joined < MOST_JOINED => {
                joined_in[at] = next;
                num_joined += 1;
            }
            _ => num_joined = 1,
        }
    }
    // from the next to the last of each
    for at in (0..actions.len()).rev() {
        joined_in[at] = joined_in[joined_in[at]];
    }
    joined_in
}

/// Returns the largest number of stages of a rank.
pub(super) fn most_local_stages(schedule: &Schedule) -> usize {
    let owners = schedule.owners();
    let stages_of = |rank: usize| owners.iter().filter(|owner| **owner == Some(rank)).count();
    (0..schedule.ranks.len()).map(stages_of).max().unwrap_or_default()
}

/// Returns the tag of the message `send`, unique among those between the same two ranks: direction,
/// number of the sender's stage on its rank, and micro-batch as one number.
fn tag(schedule: &Schedule, most_local_stages: usize, owners: &[Option<usize>], send: Action) -> i32 {
    let direction = usize::from(send.work == Work::SendGradient);
    let local = owners[..send.stage].iter().filter(|owner| **owner == owners[send.stage]).count();
    ((direction * most_local_stages + local) * schedule.num_micro_batches + send.micro_batch) as i32
}

/// Moves each receive of a gradient before the pass that it follows.
fn posted_ahead(actions: &[Action]) -> Vec<Action> {
    let mut ahead: Vec<Action> = Vec::new();
    for action in actions {
        let before = ahead.iter().rposition(|earlier| !earlier.work.is_message());
        match before.filter(|_| action.work == Work::ReceiveGradient) {
            Some(pass) => ahead.insert(pass, *action),
            None => ahead.push(*action),
        }
    }
    ahead
}

/// The stage on the same rank from which a pass takes its input, without a message.
enum Neighbour {
    /// The previous stage, with its activations.
    Before(usize),
    /// The next stage, with its gradients.
    After(usize),
}

fn neighbour(owners: &[Option<usize>], action: Action) -> Option<Neighbour> {
    let same = |stage: usize| stage < owners.len() && owners[stage] == owners[action.stage];
    match action.work {
        Work::Forward => action.stage.checked_sub(1).filter(|stage| same(*stage)).map(Neighbour::Before),
        Work::Backward | Work::InputGradient => {
            Some(action.stage + 1).filter(|stage| same(*stage)).map(Neighbour::After)
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum;

    use super::*;
    use crate::parallel::schedule::PipelineScheduleKind;

    #[test]
    fn gradients_of_weights_are_joined_up_to_a_limit() {
        let most = |kind: PipelineScheduleKind, micro_batches| {
            RankProgram::new(&kind.generate(2, 1, micro_batches).unwrap(), 0).most_joined()
        };
        assert_eq!(most(PipelineScheduleKind::OneForwardOneBackward, 8), 0);
        assert_eq!([3, 16, 40].map(|num| most(PipelineScheduleKind::Deferred, num)), [3, 16, 16]);
    }

    #[test]
    fn places_are_few_and_never_shared() {
        for &kind in PipelineScheduleKind::value_variants() {
            for (ranks, micro_batches) in [(1, 3), (2, 5), (4, 8), (3, 2)] {
                let schedule = kind.generate(ranks, 2, micro_batches).unwrap();
                for rank in 0..ranks {
                    let program = RankProgram::new(&schedule, rank);
                    assert_eq!(program.instructions.len(), schedule.ranks[rank].len());
                    let mut owner: HashMap<(usize, usize), usize> = HashMap::new();
                    for instruction in &program.instructions {
                        let Instruction { action, local, slot, .. } = *instruction;
                        match action.work {
                            Work::Forward => {
                                let before = owner.insert((local, slot), action.micro_batch);
                                assert!(before.is_none(), "{kind:?} slot {slot} is taken twice");
                            }
                            Work::Backward | Work::WeightGradient => {
                                assert_eq!(owner.remove(&(local, slot)), Some(action.micro_batch));
                            }
                            _ => {}
                        }
                    }
                    let all_complete = program.instructions.iter().rfind(|i| i.completes).unwrap();
                    assert_eq!(all_complete.local, 0, "the first stage is the last to be complete");
                    // no more slots than lives that overlap, and one for an output on its way
                    for (local, num_slots) in program.num_slots.iter().enumerate() {
                        let at = |i: &Instruction| i.local == local && i.action.work.touches_values();
                        let lives: Vec<(usize, usize)> = (0..micro_batches)
                            .map(|m| {
                                let own = |i: &Instruction| at(i) && i.action.micro_batch == m;
                                let first = program.instructions.iter().position(own).unwrap();
                                (first, program.instructions.iter().rposition(own).unwrap())
                            })
                            .collect();
                        let overlap =
                            |at: usize| lives.iter().filter(|life| life.0 <= at && at <= life.1).count();
                        let most = (0..program.instructions.len()).map(overlap).max();
                        let most = most.unwrap();
                        let is_few = (most..=most + 1).contains(num_slots);
                        assert!(is_few, "{kind:?} {ranks} {micro_batches}");
                    }
                }
            }
        }
        let single = RankProgram::new(&PipelineScheduleKind::Sequential.generate(1, 1, 4).unwrap(), 0);
        assert_eq!((single.num_slots, single.num_sets), (vec![1], vec![1]));
    }
}
