//! Schedules as CSV files: a row for each rank, a cell for each action in the notation of PyTorch's
//! `torch.distributed.pipelining`, empty cells where a rank waits.

use super::{Action, Schedule};
use crate::{Error, Result};

impl Schedule {
    /// Parses a schedule and adds messages if it has none. Errors name `source`.
    ///
    /// # Errors
    /// The text is not CSV, a cell is not an action, or the passes cannot be ordered.
    pub fn from_csv(text: &str, source: &str) -> Result<Schedule> {
        let doing = || format!("reading the schedule {source}");
        let mut reader =
            csv::ReaderBuilder::new().has_headers(false).flexible(true).from_reader(text.as_bytes());
        let mut ranks = Vec::new();
        for row in reader.records() {
            let row = row.map_err(|error| Error::input(doing(), error))?;
            // the reader does not count the empty lines before a row
            let start = row.position().map_or(0, |position| position.byte() as usize);
            let start = text.len() - text[start..].trim_start_matches(['\r', '\n']).len();
            let line = 1 + text[..start].matches('\n').count();
            let mut actions: Vec<Action> = Vec::new();
            for (column, cell) in row.iter().enumerate().filter(|(_, cell)| !cell.trim().is_empty()) {
                let at = |why| Error::input(doing(), format!("line {line}, column {}: {why}", column + 1));
                actions.push(cell.parse().map_err(at)?);
            }
            ranks.push(actions);
        }
        let schedule = Schedule::new(ranks);
        if schedule.num_stages == 0 {
            return Err(Error::input(doing(), "it has no actions"));
        }
        if schedule.ranks.iter().flatten().any(|action| action.work.is_message()) {
            return Ok(schedule);
        }
        schedule.with_messages().map_err(|error| Error::input(doing(), error))
    }

    /// Returns the schedule as CSV, messages included.
    pub fn to_csv(&self) -> String {
        let rows = self.ranks.iter().map(|actions| {
            let cells: Vec<String> = actions.iter().map(Action::to_string).collect();
            cells.join(",") + "\n"
        });
        rows.collect()
    }
}
