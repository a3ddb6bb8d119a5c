//! When everything happens if passes take what they cost and messages nothing.

use std::collections::HashMap;

use super::{Action, Schedule, Work};

/// One pass in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TimedPass {
    /// The pass.
    pub action: Action,
    /// When it begins.
    pub start: u64,
    /// When it is done.
    pub end: u64,
}

/// The passes of a schedule in time, in units of a forward pass of one stage (see [`Work::cost`]).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Timeline {
    /// The passes of each rank, in order.
    pub ranks: Vec<Vec<TimedPass>>,
    /// When the last of them is done.
    pub length: u64,
}

impl Timeline {
    /// Begins each pass of `schedule` as soon as its rank is free and what it needs is there. Messages are not looked at.
    ///
    /// # Errors
    /// Some passes never begin; for each rank that is stuck, the one it waits with.
    pub fn new(schedule: &Schedule) -> Result<Timeline, Vec<(usize, Action)>> {
        let passes: Vec<Vec<Action>> = schedule
            .ranks
            .iter()
            .map(|actions| actions.iter().copied().filter(|action| !action.work.is_message()).collect())
            .collect();
        let mut done: HashMap<Action, u64> = HashMap::new();
        let mut ranks: Vec<Vec<TimedPass>> = vec![Vec::new(); passes.len()];
        let mut upwards = true;
        loop {
            let mut moved = false;
            // in turn from the first rank to the last and back, as forward and backward passes go
            for index in 0..passes.len() {
                let rank = if upwards { index } else { passes.len() - 1 - index };
                let (passes, spans) = (&passes[rank], &mut ranks[rank]);
                while let Some(&action) = passes.get(spans.len()) {
                    let needs = needs(action, schedule.num_stages);
                    let ready = needs.iter().map(|any| any.iter().find_map(|pass| done.get(pass)));
                    let Some(ready) = ready.collect::<Option<Vec<_>>>() else {
                        break;
                    };
                    let free = spans.last().map_or(0, |span| span.end);
                    let start = ready.into_iter().copied().fold(free, u64::max);
                    let end = start + action.work.cost();
                    done.insert(action, end);
                    spans.push(TimedPass { action, start, end });
                    moved = true;
                }
            }
            if !moved {
                break;
            }
            upwards = !upwards;
        }
        let stuck = passes.iter().zip(&ranks).enumerate();
        let stuck: Vec<_> =
            stuck.filter_map(|(rank, (passes, spans))| Some((rank, *passes.get(spans.len())?))).collect();
        let length = ranks.iter().flatten().map(|span| span.end).max().unwrap_or_default();
        if stuck.is_empty() { Ok(Timeline { ranks, length }) } else { Err(stuck) }
    }

    /// The share of all ranks' time in which they have nothing to do.
    pub fn bubble(&self) -> f64 {
        let busy: u64 = self.ranks.iter().flatten().map(|span| span.end - span.start).sum();
        let whole = self.length * self.ranks.len() as u64;
        if whole == 0 { 0.0 } else { 1.0 - busy as f64 / whole as f64 }
    }
}

/// What must be done before `action`: all of these, each of them as one of the passes given.
fn needs(action: Action, num_stages: usize) -> Vec<Vec<Action>> {
    let Action { stage, work, micro_batch } = action;
    let at =
        |stage, works: &[Work]| works.iter().map(|work| Action::new(stage, *work, micro_batch)).collect();
    match work {
        Work::Forward if stage > 0 => vec![at(stage - 1, &[Work::Forward])],
        Work::Backward | Work::InputGradient => {
            let mut needs = vec![at(stage, &[Work::Forward])];
            if stage + 1 < num_stages {
                needs.push(at(stage + 1, &[Work::Backward, Work::InputGradient]));
            }
            needs
        }
        Work::WeightGradient => vec![at(stage, &[Work::InputGradient])],
        _ => Vec::new(),
    }
}
