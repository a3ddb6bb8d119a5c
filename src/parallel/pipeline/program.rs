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
    /// The arrays of its values; 0 where the action touches none.
    pub slot: usize,
    /// The arrays of its gradients; 0 where the action touches none.
    pub set: usize,
    /// Where to find what comes from another stage of the same rank, without a message: its lane, and its slot (forward) or set
    /// (backward).
    pub neighbour: Option<(usize, usize)>,
    /// Of a message, the rank at the other end and the tag: direction, stage of the sender and micro-batch as one number.
    pub message: Option<(usize, i32)>,
    /// After this action, the gradients of this stage and of all later ones of this rank are complete.
    pub completes: bool,
}

/// The actions of one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankProgram {
    /// The actions, in order.
    pub instructions: Vec<Instruction>,
    /// Slots of each stage of the rank.
    pub num_slots: Vec<usize>,
    /// Sets of each stage of the rank.
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

impl RankProgram {
    /// The actions of `rank` in `schedule`, which has been checked. Receives of gradients are posted one pass ahead of where the
    /// schedule has them, which takes a set more and waits for nobody: the set that it takes over was sent before, in an order
    /// that has been proved to come to its end.
    pub fn new(schedule: &Schedule, rank: usize) -> RankProgram {
        let actions = posted_ahead(&schedule.ranks[rank]);
        let owners = schedule.owners();
        let stages: Vec<usize> = (0..owners.len()).filter(|stage| owners[*stage] == Some(rank)).collect();
        let lane = |stage| stages.iter().position(|own| *own == stage).expect("a rank's actions are in its stages");
        let (mut slots, mut sets) = (Places::default(), Places::default());
        for (at, action) in actions.iter().enumerate() {
            let Action { stage, work, micro_batch } = *action;
            if work.touches_values() {
                slots.touch(at, stage, micro_batch);
            }
            if work.touches_gradients() {
                sets.touch(at, stage, micro_batch);
            }
            match neighbour(&owners, *action) {
                Some(Neighbour::Before(stage)) => slots.touch(at, stage, micro_batch),
                Some(Neighbour::After(stage)) => sets.touch(at, stage, micro_batch),
                None => {}
            }
        }
        let last_of: HashMap<usize, usize> = actions
            .iter()
            .enumerate()
            .filter(|(_, a)| a.work.touches_gradients())
            .map(|(at, a)| (a.stage, at))
            .collect();
        let mut instructions = Vec::new();
        for (at, action) in actions.iter().enumerate() {
            let Action { stage, work, micro_batch } = *action;
            let slot = if work.touches_values() { slots.place(at, stage, micro_batch) } else { 0 };
            let set = if work.touches_gradients() { sets.place(at, stage, micro_batch) } else { 0 };
            let neighbour = neighbour(&owners, *action).map(|neighbour| match neighbour {
                Neighbour::Before(stage) => (lane(stage), slots.place(at, stage, micro_batch)),
                Neighbour::After(stage) => (lane(stage), sets.place(at, stage, micro_batch)),
            });
            let ends_pass = matches!(work, Work::Backward | Work::WeightGradient);
            let is_last = |other: &usize| {
                let rest = &actions[at + 1..=last_of.get(other).copied().unwrap_or(at).max(at)];
                !rest.iter().any(|later| later.stage == *other && !later.work.is_message())
            };
            let completes = ends_pass && stages.iter().filter(|other| **other >= stage).all(is_last);
            let message = action.partner().and_then(|partner| {
                let sender =
                    if matches!(work, Work::SendActivation | Work::SendGradient) { *action } else { partner };
                Some((owners[partner.stage]?, tag(schedule, sender)))
            });
            let lane = lane(stage);
            instructions.push(Instruction { action: *action, lane, slot, set, neighbour, message, completes });
        }
        let made = |places: &Places| {
            stages.iter().map(|stage| places.made.get(stage).copied().unwrap_or_default()).collect()
        };
        RankProgram { instructions, num_slots: made(&slots), num_sets: made(&sets) }
    }
}

/// The number of the message that `send` is.
fn tag(schedule: &Schedule, send: Action) -> i32 {
    let direction = usize::from(send.work == Work::SendGradient);
    let stage = direction * schedule.num_stages + send.stage;
    (stage * schedule.num_micro_batches + send.micro_batch) as i32
}

/// The same actions with each receive of a gradient before the pass that it follows.
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

/// Where a pass finds what it needs on its own rank, without a message.
enum Neighbour {
    /// In the values of the stage before.
    Before(usize),
    /// In the gradients of the next stage.
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
    use super::*;
    use crate::parallel::schedule::ScheduleKind;

    #[test]
    fn places_are_few_and_never_shared() {
        for kind in ScheduleKind::ALL {
            for (ranks, micro_batches) in [(1, 3), (2, 5), (4, 8), (3, 2)] {
                let schedule = kind.generate(ranks, 2, micro_batches).unwrap();
                for rank in 0..ranks {
                    let program = RankProgram::new(&schedule, rank);
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
                    let all_complete = program.instructions.iter().rfind(|i| i.completes).unwrap();
                    assert_eq!(all_complete.lane, 0, "the first stage is the last to be complete");
                    // no more slots than lives that overlap
                    for (lane, num_slots) in program.num_slots.iter().enumerate() {
                        let at = |i: &Instruction| i.lane == lane && i.action.work.touches_values();
                        let lives: Vec<(usize, usize)> = (0..micro_batches)
                            .map(|m| {
                                let own = |i: &Instruction| at(i) && i.action.micro_batch == m;
                                let first = program.instructions.iter().position(own).unwrap();
                                (first, program.instructions.iter().rposition(own).unwrap())
                            })
                            .collect();
                        let overlap = |at: usize| lives.iter().filter(|life| life.0 <= at && at <= life.1).count();
                        let most = (0..program.instructions.len()).map(overlap).max();
                        assert_eq!(Some(*num_slots), most, "{} {ranks} {micro_batches}", kind.name());
                    }
                }
            }
        }
        let single = RankProgram::new(&ScheduleKind::Sequential.generate(1, 1, 4).unwrap(), 0);
        assert_eq!((single.num_slots, single.num_sets), (vec![1], vec![1]));
    }
}
