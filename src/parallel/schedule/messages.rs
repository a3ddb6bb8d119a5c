//! The messages between passes.

use super::{Action, Schedule, Timeline, Work};
use crate::{Error, Result};

impl Schedule {
    /// Adds the messages to a schedule of passes. A value is sent as soon as it is computed, and
    /// the receive is placed at that time on the other rank, if every pass takes as long as it
    /// costs. The passes in the order of their ends, each followed by both ends of its message, are
    /// then an order in which all actions can happen one by one, so the schedule cannot deadlock
    /// even if every send waits for its receive. Consecutive stages on one rank need no message.
    ///
    /// # Errors
    /// Passes wait for each other in a cycle, or for a pass that is missing.
    pub fn with_messages(&self) -> Result<Schedule> {
        let timeline = Timeline::new(self).map_err(|stuck| {
            let waiting: Vec<_> =
                stuck.iter().map(|(rank, action)| format!("rank {rank} at {action}")).collect();
            let why =
                format!("ranks wait for passes that are missing or come too late: {}", waiting.join(", "));
            Error::input("ordering the passes of a schedule", why)
        })?;
        let mut passes: Vec<_> = timeline
            .ranks
            .iter()
            .enumerate()
            .flat_map(|(rank, spans)| spans.iter().map(move |span| (span.end, rank, span.action)))
            .collect();
        // stable: passes of a rank stay in order
        passes.sort_by_key(|(end, ..)| *end);
        let owner = self.owners();
        let mut ranks = vec![Vec::new(); self.ranks.len()];
        for (_, rank, action) in passes {
            ranks[rank].push(action);
            let send = match action.work {
                Work::Forward if action.stage + 1 < self.num_stages => Work::SendActivation,
                Work::Backward | Work::InputGradient if action.stage > 0 => Work::SendGradient,
                _ => continue,
            };
            let send = Action { work: send, ..action };
            let Some(receive) = send.partner() else {
                continue;
            };
            if let Some(other) = owner[receive.stage].filter(|other| *other != rank) {
                ranks[rank].push(send);
                ranks[other].push(receive);
            }
        }
        Ok(Schedule { ranks, ..*self })
    }
}
