//! A schedule as one rank runs it: every action with the arrays it works on.
//!
//! A *slot* holds the values of one micro-batch in one stage, from the first action that touches them to the last; a *set* its
//! gradients. Which of them each action gets is decided here, once, so that as few as possible do.

use std::collections::HashMap;

use crate::parallel::schedule::{Action, Schedule, Work};

/// An action with its arrays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Instruction {
    /// What to do.
    pub action: Action,
    /// The stage's number among those of this rank.
    pub lane: usize,
    /// The arrays of its values and of their gradients.
    pub slot: usize,
    /// The arrays of gradients; 0 where the action has none.
    pub set: usize,
    /// Where to find what comes from another stage of the same rank, without a message: its lane, and its slot (forward) or set
    /// (backward).
    pub neighbour: Option<(usize, usize)>,
    /// After this action, the gradients of this stage and of all later ones of this rank are complete.
    pub completes: bool,
}

/// The actions of one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Program {
    /// The actions, in order.
    pub instructions: Vec<Instruction>,
    /// Slots and sets for each stage of the rank.
    pub num_slots: Vec<usize>,
    /// Sets for each stage of the rank.
    pub num_sets: Vec<usize>,
}

/// Places that are taken from a first to a last action.
#[derive(Default)]
struct Places {
    /// For each stage and micro-batch, the first and the last action.
    lives: HashMap<(usize, usize), (usize, usize)>,
    taken: HashMap<(usize, usize), usize>,
    free: HashMap<usize, Vec<usize>>,
    made: HashMap<usize, usize>,
}

impl Places {
    fn touch(&mut self, at: usize, stage: usize, micro_batch: usize) {
        let life = self.lives.entry((stage, micro_batch)).or_insert((at, at));
        life.1 = at;
    }

    /// The place of `(stage, micro_batch)` at action `at`: the lowest that is free if this is the first.
    fn place(&mut self, at: usize, stage: usize, micro_batch: usize) -> usize {
        let Some(&(first, last)) = self.lives.get(&(stage, micro_batch)) else {
            return 0;
        };
        let free = self.free.entry(stage).or_default();
        let made = self.made.entry(stage).or_default();
        if at == first {
            let place = match (0..free.len()).min_by_key(|&i| free[i]) {
                Some(lowest) => free.swap_remove(lowest),
                None => {
                    *made += 1;
                    *made - 1
                }
            };
            self.taken.insert((stage, micro_batch), place);
        }
        let place = self.taken[&(stage, micro_batch)];
        if at == last {
            free.push(place);
        }
        place
    }
}

impl Program {
    /// The actions of `rank` in `schedule`, which has been checked.
    pub fn new(schedule: &Schedule, rank: usize) -> Program {
        let actions = &schedule.ranks[rank];
        let stages = schedule.stages_of(rank);
        let (mut slots, mut sets) = (Places::default(), Places::default());
        for (at, action) in actions.iter().enumerate() {
            let Action { stage, work, micro_batch } = *action;
            if !matches!(work, Work::ReceiveGradient | Work::SendGradient) {
                slots.touch(at, stage, micro_batch);
            }
            if !matches!(work, Work::ReceiveActivation | Work::Forward | Work::SendActivation) {
                sets.touch(at, stage, micro_batch);
            }
            if let Some((from, forward)) = neighbour(schedule, rank, *action) {
                if forward { &mut slots } else { &mut sets }.touch(at, from, micro_batch);
            }
        }
        let lane = |stage| stages.iter().position(|own| *own == stage).expect("a rank's actions are in its stages");
        let mut instructions = Vec::new();
        for (at, action) in actions.iter().enumerate() {
            let Action { stage, work, micro_batch } = *action;
            let touches_slot = !matches!(work, Work::ReceiveGradient | Work::SendGradient);
            let touches_set = !matches!(work, Work::ReceiveActivation | Work::Forward | Work::SendActivation);
            // the neighbour's place first: it may be free from here on, but not for this action
            let slot = if touches_slot { slots.place(at, stage, micro_batch) } else { 0 };
            let set = if touches_set { sets.place(at, stage, micro_batch) } else { 0 };
            let neighbour = neighbour(schedule, rank, *action).map(|(from, forward)| {
                (lane(from), if forward { &mut slots } else { &mut sets }.place(at, from, micro_batch))
            });
            let rest = &actions[at + 1..];
            let completes = matches!(work, Work::Backward | Work::WeightGradient)
                && !rest.iter().any(|later| {
                    later.stage >= stage
                        && matches!(later.work, Work::Backward | Work::WeightGradient | Work::InputGradient)
                });
            instructions.push(Instruction { action: *action, lane: lane(stage), slot, set, neighbour, completes });
        }
        let made = |places: &Places| {
            stages.iter().map(|stage| places.made.get(stage).copied().unwrap_or_default()).collect()
        };
        Program { instructions, num_slots: made(&slots), num_sets: made(&sets) }
    }
}

/// The stage of the same rank that `action` takes its values (true) or gradients (false) from, if they come without a message.
fn neighbour(schedule: &Schedule, rank: usize, action: Action) -> Option<(usize, bool)> {
    let (stage, forward) = match action.work {
        Work::Forward => (action.stage.checked_sub(1)?, true),
        Work::Backward | Work::InputGradient => (action.stage + 1, false),
        _ => return None,
    };
    (stage < schedule.num_stages && schedule.rank_of(stage) == Some(rank)).then_some((stage, forward))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parallel::schedule::ScheduleKind;

    #[test]
    fn places_are_as_few_as_are_live_and_never_shared() {
        for kind in ScheduleKind::ALL {
            for (ranks, micro_batches) in [(1, 3), (2, 5), (4, 8), (3, 2)] {
                let schedule = kind.generate(ranks, 2, micro_batches).unwrap();
                for rank in 0..ranks {
                    let program = Program::new(&schedule, rank);
                    assert_eq!(program.instructions.len(), schedule.ranks[rank].len());
                    let mut owner: HashMap<(usize, usize), usize> = HashMap::new();
                    for instruction in &program.instructions {
                        let Instruction { action, lane, slot, .. } = *instruction;
                        match action.work {
                            Work::Forward => {
                                let before = owner.insert((lane, slot), action.micro_batch);
                                assert!(before.is_none(), "{} slot {slot} is taken twice", kind.name());
                            }
                            Work::Backward | Work::WeightGradient => {
                                assert_eq!(owner.remove(&(lane, slot)), Some(action.micro_batch));
                            }
                            _ => {}
                        }
                    }
                    assert_eq!(program.instructions.iter().filter(|i| i.completes).count(), program.num_slots.len());
                }
            }
        }
        let single = Program::new(&ScheduleKind::Sequential.generate(1, 1, 4).unwrap(), 0);
        assert_eq!((single.num_slots, single.num_sets), (vec![1], vec![1]));
    }
}
