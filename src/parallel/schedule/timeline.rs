//! The times of a schedule in which passes take as long as they cost and messages take no time.

use std::collections::HashMap;

use super::{Action, Schedule, Work};

/// A pass with its times.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TimedPass {
    /// The pass.
    pub action: Action,
    /// The start of the pass.
    pub start: u64,
    /// The end of the pass.
    pub end: u64,
}

/// The passes of a schedule with their times, in units of a forward pass of one stage (see
/// [`Work::cost`]).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Timeline {
    /// The passes of each rank, in order.
    pub ranks: Vec<Vec<TimedPass>>,
    /// The end of the last pass.
    pub length: u64,
}

impl Timeline {
    /// Begins each pass of `schedule` as soon as its rank is free and its inputs are computed,
    /// without regard to messages.
    ///
    /// # Errors
    /// Some passes never begin: for each rank that is stuck, its number and its next pass.
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
            // alternately from the first rank to the last and back, as forward and backward passes
            // propagate
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

    /// Returns the fraction of all ranks' time in which they are idle.
    pub fn bubble(&self) -> f64 {
        let busy: u64 = self.ranks.iter().flatten().map(|span| span.end - span.start).sum();
        let whole = self.length * self.ranks.len() as u64;
        if whole == 0 { 0.0 } else { 1.0 - busy as f64 / whole as f64 }
    }
}

/// Returns the passes on which `action` depends: of each of these lists, one must be done.
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
