//! `--trace`: the ranks' records merged into one file, on one clock, and a summary of them.

mod json;
mod summary;

pub use summary::Summary;

use std::fs::File;
use std::io::BufWriter;
use std::path::Path;

use crate::comm::{Communicator, World};
use crate::trace::{self, Event, Record};
use crate::{Error, Result};

/// Round trips by which two clocks are compared; the fastest counts.
const NUM_ROUND_TRIPS: usize = 100;

/// A trace that is being recorded.
pub struct Trace {
    path: String,
    program: String,
    /// The file, on rank 0.
    file: Option<File>,
    clock: Comparison,
}

/// The time on a rank's clock, and how far rank 0's was ahead of it then, in nanoseconds.
#[derive(Debug, Clone, Copy)]
struct Comparison {
    own: i64,
    ahead: i64,
}

impl Trace {
    /// Opens the file, whose contents stay until the run has ended, compares the clocks and starts recording.
    /// Collective.
    ///
    /// # Errors
    /// The file cannot be created: the same error on every rank.
    pub fn start(world: &World, path: &Path, program: &str) -> Result<Trace> {
        let name = path.display().to_string();
        let create = || {
            let opened = File::options().write(true).create(true).truncate(false).open(path);
            opened.map_err(|error| Error::input(format!("creating --trace {name}"), error))
        };
        let all = world.communicator();
        let file = all.agree_with_root(create)?;
        let clock = compare_clocks(all)?;
        trace::start(world.size());
        Ok(Trace { path: name, program: program.to_owned(), file, clock })
    }

    /// Ends recording and gathers the records on rank 0, on its clock. Rank 0 writes the file, logs a
    /// summary and returns it; the bubble of a pipeline is compared with `expected_bubble`. A file
    /// that cannot be written is a warning. Collective.
    ///
    /// # Errors
    /// A message to another rank fails.
    pub fn finish(self, world: &World, expected_bubble: Option<f64>) -> Result<Option<Summary>> {
        let Record { mut events, num_lost } = trace::finish();
        let all = world.communicator();
        let (before, after) = (self.clock, compare_clocks(all)?);
        for event in &mut events {
            event.start = aligned(event.start, before, after);
            event.end = aligned(event.end, before, after);
        }
        if num_lost > 0 {
            log::warn!("--trace {}: there were too many records, and {num_lost} are left out", self.path);
        }
        let ranks = gather(all, &events)?;
        let Some(file) = self.file else {
            return Ok(None);
        };
        // a device or a pipe has no length
        let _ = file.set_len(0);
        let written = json::write(BufWriter::new(file), &self.program, &ranks);
        if let Err(error) = written {
            log::warn!("writing --trace {}: {error}", self.path);
        }
        let summary = Summary::new(&ranks, expected_bubble);
        for line in summary.iter().flat_map(Summary::lines) {
            log::info!("{line}");
        }
        Ok(summary)
    }
}

/// Measures how far rank 0's clock is ahead of this rank's: Cristian's method ("Probabilistic clock
/// synchronization", 1989). Collective.
fn compare_clocks(all: &Communicator) -> Result<Comparison> {
    let mut ahead = [0_i64];
    if !all.is_root() {
        for _ in 0..NUM_ROUND_TRIPS {
            all.receive(&mut [0_i64], 0, 0)?;
            all.send(&[trace::now()], 0, 0)?;
        }
        all.receive(&mut ahead, 0, 0)?;
    }
    for rank in (1..all.size()).filter(|_| all.is_root()) {
        let mut best = (i64::MAX, 0);
        for _ in 0..NUM_ROUND_TRIPS {
            let start = trace::now();
            all.send(&[0_i64], rank, 0)?;
            let mut other = [0_i64];
            all.receive(&mut other, rank, 0)?;
            let end = trace::now();
            best = best.min((end - start, (start + end) / 2 - other[0]));
        }
        all.send(&[best.1], rank, 0)?;
    }
    Ok(Comparison { own: trace::now(), ahead: ahead[0] })
}

/// The largest drift between two clocks, as a fraction of the time: more is noise of the
/// comparisons.
const LARGEST_DRIFT: f64 = 1e-3;

/// Converts a time of this rank to rank 0's clock, whose lead changes evenly between the two
/// comparisons.
fn aligned(time: i64, before: Comparison, after: Comparison) -> i64 {
    let drift = (after.ahead - before.ahead) as f64 / (after.own - before.own).max(1) as f64;
    let drift = drift.clamp(-LARGEST_DRIFT, LARGEST_DRIFT);
    time + before.ahead + (drift * (time - before.own) as f64) as i64
}

/// Gathers all ranks' events on rank 0, and nothing elsewhere. Collective.
fn gather(all: &Communicator, events: &[Event]) -> Result<Vec<Vec<Event>>> {
    if !all.is_root() {
        all.send(&[events.len() as i64], 0, 0)?;
        all.send::<i64>(bytemuck::cast_slice(events), 0, 0)?;
        return Ok(Vec::new());
    }
    let mut ranks = vec![events.to_vec()];
    for rank in 1..all.size() {
        let mut len = [0_i64];
        all.receive(&mut len, rank, 0)?;
        let mut theirs: Vec<Event> = vec![bytemuck::Zeroable::zeroed(); len[0] as usize];
        all.receive::<i64>(bytemuck::cast_slice_mut(&mut theirs), rank, 0)?;
        ranks.push(theirs);
    }
    Ok(ranks)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks_that_drift_are_aligned_in_between() {
        let (before, after) =
            (Comparison { own: 1_000_000, ahead: 500 }, Comparison { own: 3_000_000, ahead: 700 });
        assert_eq!(aligned(1_000_000, before, after), 1_000_500);
        assert_eq!(aligned(2_000_000, before, after), 2_000_600);
        assert_eq!(aligned(3_000_000, before, after), 3_000_700);
        // a comparison that was disturbed does not turn time back
        let disturbed = Comparison { own: 1_001_000, ahead: -5000 };
        assert!(aligned(1_000_900, before, disturbed) > aligned(1_000_800, before, disturbed));
    }
}
