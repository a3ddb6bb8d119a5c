//! Schedules as CSV files: a row for each rank, a cell for each action in the notation of PyTorch's
//! `torch.distributed.pipelining`, empty cells where a rank waits.

use super::{Action, Schedule};
use crate::{Error, Result};

impl Schedule {
    /// Reads a schedule; `source` is named in errors. Messages are put in if it has none.
    ///
    /// # Errors
    /// It is no CSV, a cell is no action, or the passes cannot be ordered.
    pub fn from_csv(text: &str, source: &str) -> Result<Schedule> {
        let doing = || format!("reading the schedule {source}");
        let mut reader = csv::ReaderBuilder::new().has_headers(false).flexible(true).from_reader(text.as_bytes());
        let mut ranks = Vec::new();
        for (rank, row) in reader.records().enumerate() {
            let row = row.map_err(|error| Error::input(doing(), error))?;
            let cells = row.iter().map(str::trim).filter(|cell| !cell.is_empty());
            let actions: std::result::Result<Vec<Action>, String> = cells.map(str::parse).collect();
            ranks.push(actions.map_err(|why| Error::input(doing(), format!("row {}: {why}", rank + 1)))?);
        }
        let schedule = Schedule::new(ranks);
        if schedule.num_stages == 0 {
            return Err(Error::input(doing(), "it has no actions"));
        }
        if schedule.ranks.iter().flatten().any(|action| action.work.is_message()) {
            return Ok(schedule);
        }
        schedule.with_messages()
    }

    /// The schedule as CSV, messages included.
    pub fn to_csv(&self) -> String {
        let rows = self.ranks.iter().map(|actions| {
            let cells: Vec<String> = actions.iter().map(Action::to_string).collect();
            cells.join(",") + "\n"
        });
        rows.collect()
    }
}
