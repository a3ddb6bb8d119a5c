//! The proof, before anything runs, that a schedule is complete and free of deadlock.

use std::collections::HashMap;

use super::{Action, Schedule, Timeline, Work};
use crate::{Error, Result};

/// The properties of a sound schedule.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// For each rank, the largest number of live micro-batches, counted once for each of its
    /// stages: those between their forward pass and the end of their backward pass.
    pub peak_live: Vec<usize>,
    /// The fraction of all ranks' time in which they are idle, if passes take as long as they cost
    /// and messages take no time.
    pub bubble: f64,
    /// The passes with their times.
    pub timeline: Timeline,
}

/// For each action, its rank and its place in the rank's list.
type ActionPlaces = HashMap<Action, (usize, usize)>;

impl Schedule {
    /// Proves that every stage does every pass of every micro-batch exactly once, on one rank, in a
    /// possible order; that gradients are added up in the order of the micro-batches; that every
    /// message is sent once and received once, after its value is computed and before it is used; and
    /// that all ranks finish even if every send blocks until its receive is reached. (The pipeline
    /// waits less: for a send only before its array is used again, for a receive only before its value
    /// is used.)
    ///
    /// # Errors
    /// One of these does not hold; the message names the action.
    pub fn check(&self) -> Result<Report> {
        let fault = |why: String| Error::input("checking the schedule", why);
        let places = self.places().map_err(fault)?;
        self.check_passes(&places).map_err(fault)?;
        self.check_messages(&places).map_err(fault)?;
        self.check_rendezvous(&places).map_err(fault)?;
        let timeline = Timeline::new(self).map_err(|stuck| {
            let (rank, action) = stuck[0];
            fault(format!("rank {rank} waits for ever with {action}"))
        })?;
        Ok(Report { peak_live: self.peak_live(), bubble: timeline.bubble(), timeline })
    }

    fn places(&self) -> std::result::Result<ActionPlaces, String> {
        let mut places = ActionPlaces::new();
        for (rank, actions) in self.ranks.iter().enumerate() {
            if actions.is_empty() {
                return Err(format!("rank {rank} has nothing to do"));
            }
            for (at, action) in actions.iter().enumerate() {
                if action.stage >= self.num_stages || action.micro_batch >= self.num_micro_batches {
                    let (stages, micro_batches) = (self.num_stages, self.num_micro_batches);
                    return Err(format!(
                        "{action} on rank {rank} is outside of {stages} stages and {micro_batches} \
                         micro-batches"
                    ));
                }
                if let Some((other, _)) = places.insert(*action, (rank, at)) {
                    return Err(format!("{action} is done twice, on rank {other} and on rank {rank}"));
                }
            }
        }
        Ok(places)
    }

    fn check_passes(&self, places: &ActionPlaces) -> std::result::Result<(), String> {
        for (stage, owner) in self.owners().into_iter().enumerate() {
            let owner = owner.ok_or_else(|| format!("{stage}F0 is missing: no rank has stage {stage}"))?;
            for micro_batch in 0..self.num_micro_batches {
                let action = |work| Action::new(stage, work, micro_batch);
                let has = |work| places.contains_key(&action(work));
                let missing = |work| Err(format!("{} is missing", action(work)));
                let twice = |half| Err(format!("{} is in {} already", action(half), action(Work::Backward)));
                match (has(Work::Backward), has(Work::InputGradient), has(Work::WeightGradient)) {
                    (true, false, false) | (false, true, true) => {}
                    (true, true, _) => return twice(Work::InputGradient),
                    (true, _, true) => return twice(Work::WeightGradient),
                    (false, true, false) => return missing(Work::WeightGradient),
                    (false, false, true) => return missing(Work::InputGradient),
                    (false, false, false) => return missing(Work::Backward),
                }
                if !has(Work::Forward) {
                    return missing(Work::Forward);
                }
                for work in [Work::Forward, Work::Backward, Work::InputGradient, Work::WeightGradient] {
                    if let Some((rank, _)) = places.get(&action(work)).filter(|(rank, _)| *rank != owner) {
                        return Err(format!(
                            "{} is on rank {rank}, but stage {stage} is rank {owner}'s",
                            action(work)
                        ));
                    }
                }
                for (first, second) in [
                    (Work::Forward, Work::Backward),
                    (Work::Forward, Work::InputGradient),
                    (Work::InputGradient, Work::WeightGradient),
                ] {
                    in_order(places, action(first), action(second))?;
                }
            }
            self.check_sums(places, stage)?;
        }
        Ok(())
    }

    /// Checks that the passes of `stage` add up the gradients of parameters in the order of the
    /// micro-batches, as sums of one order need it.
    fn check_sums(&self, places: &ActionPlaces, stage: usize) -> std::result::Result<(), String> {
        let adds = |micro_batch| {
            let works = [Work::Backward, Work::WeightGradient].map(|w| Action::new(stage, w, micro_batch));
            works.into_iter().find(|action| places.contains_key(action))
        };
        let pairs = (1..self.num_micro_batches).filter_map(|at| adds(at - 1).zip(adds(at)));
        for (first, second) in pairs {
            in_order(places, first, second)
                .map_err(|why| format!("{why}, but gradients are added up in the order of micro-batches"))?;
        }
        Ok(())
    }

    fn check_messages(&self, places: &ActionPlaces) -> std::result::Result<(), String> {
        let owners = self.owners();
        let all =
            self.ranks.iter().enumerate().flat_map(|(rank, actions)| actions.iter().map(move |a| (a, rank)));
        for (action, rank) in all.filter(|(action, _)| action.work.is_message()) {
            let partner = action.partner().filter(|partner| partner.stage < self.num_stages);
            let partner =
                partner.ok_or_else(|| format!("{action} on rank {rank} has no stage at its other end"))?;
            if owners[action.stage] != Some(rank) {
                return Err(format!(
                    "{action} is on rank {rank}, which does not have stage {}",
                    action.stage
                ));
            }
            if owners[partner.stage] == Some(rank) {
                return Err(format!("{action} is a message from rank {rank} to itself; leave it out"));
            }
            if !places.contains_key(&partner) {
                return Err(format!("{action} on rank {rank} has no {partner}"));
            }
        }
        for stage in 1..self.num_stages {
            for micro_batch in 0..self.num_micro_batches {
                let action = |stage, work| Action::new(stage, work, micro_batch);
                let backward = |stage| {
                    let whole = action(stage, Work::Backward);
                    if places.contains_key(&whole) { whole } else { action(stage, Work::InputGradient) }
                };
                let (forward, next_forward) =
                    (action(stage - 1, Work::Forward), action(stage, Work::Forward));
                if owners[stage - 1] == owners[stage] {
                    in_order(places, forward, next_forward)?;
                    in_order(places, backward(stage), backward(stage - 1))?;
                    continue;
                }
                for (first, second) in [
                    (forward, action(stage - 1, Work::SendActivation)),
                    (action(stage, Work::ReceiveActivation), next_forward),
                    (backward(stage), action(stage, Work::SendGradient)),
                    (action(stage - 1, Work::ReceiveGradient), backward(stage - 1)),
                ] {
                    if let Some(message) =
                        [first, second].into_iter().find(|action| !places.contains_key(action))
                    {
                        return Err(format!("{message} is missing"));
                    }
                    in_order(places, first, second)?;
                }
            }
        }
        Ok(())
    }

    /// Steps the ranks through their lists, a send and its receive only at the same time.
    fn check_rendezvous(&self, places: &ActionPlaces) -> std::result::Result<(), String> {
        let mut at = vec![0; self.ranks.len()];
        let mut moved = true;
        while moved {
            moved = false;
            for rank in 0..self.ranks.len() {
                while let Some(action) = self.ranks[rank].get(at[rank]) {
                    if let Some(partner) = action.partner() {
                        let (other, place) = places[&partner];
                        if at[other] != place {
                            break;
                        }
                        at[other] += 1;
                    }
                    at[rank] += 1;
                    moved = true;
                }
            }
        }
        let Some(mut rank) = (0..at.len()).find(|rank| at[*rank] < self.ranks[*rank].len()) else {
            return Ok(());
        };
        // a waiting rank's partner has not been reached, so its rank waits too: there is a cycle
        let mut chain = Vec::new();
        while !chain.contains(&rank) {
            chain.push(rank);
            let waiting = self.ranks[rank][at[rank]];
            rank = waiting.partner().map_or(rank, |partner| places[&partner].0);
        }
        let start = chain.iter().position(|link| *link == rank).unwrap_or_default();
        let words = chain[start..].iter().map(|&rank| {
            let waiting = self.ranks[rank][at[rank]];
            let partner = waiting.partner().map_or_else(String::new, |partner| format!(" for {partner}"));
            format!("rank {rank} waits at {waiting}{partner}")
        });
        Err(format!(
            "it deadlocks where sends wait until they are received: {}",
            words.collect::<Vec<_>>().join(", ")
        ))
    }

    fn peak_live(&self) -> Vec<usize> {
        let peak = |actions: &Vec<Action>| {
            let (mut live, mut most) = (0_usize, 0);
            for action in actions {
                match action.work {
                    Work::Forward => live += 1,
                    Work::Backward | Work::WeightGradient => live -= 1,
                    _ => {}
                }
                most = most.max(live);
            }
            most
        };
        self.ranks.iter().map(peak).collect()
    }
}

/// Fails if both actions are on the same rank and `second` precedes `first`.
fn in_order(places: &ActionPlaces, first: Action, second: Action) -> std::result::Result<(), String> {
    match (places.get(&first), places.get(&second)) {
        (Some((rank, before)), Some((other, after))) if rank == other && before > after => {
            Err(format!("{second} comes before {first} on rank {rank}"))
        }
        _ => Ok(()),
    }
}
