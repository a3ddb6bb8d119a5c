//! [`ReadingProgress`], what the log and the watchdog learn of a long pass over samples.

use std::time::{Duration, Instant};

use crate::trace::{self, Name, Span};

/// The time between two log lines about the progress of a pass.
const BETWEEN_LINES: Duration = Duration::from_secs(10);

/// The progress of a pass over blocks of samples.
pub(super) struct ReadingProgress {
    name: Name,
    num_done: usize,
    last_line: Instant,
    span: Option<Span>,
}

impl ReadingProgress {
    /// Begins a pass, of which traces have spans called `name`.
    pub(super) fn new(name: Name) -> ReadingProgress {
        ReadingProgress { name, num_done: 0, last_line: Instant::now(), span: Some(trace::work(name)) }
    }

    /// Counts one block of `num_blocks`, and logs the share that is done, in percent, if the last line is
    /// old: `describe` puts it into words.
    pub(super) fn count(&mut self, num_blocks: usize, describe: impl FnOnce(usize) -> String) {
        self.num_done += 1;
        // a new span shows the watchdog that the pass makes progress
        self.span = None;
        self.span = Some(trace::work(self.name));
        if self.last_line.elapsed() > BETWEEN_LINES {
            self.last_line = Instant::now();
            log::info!("{}", describe(100 * self.num_done / num_blocks.max(1)));
        }
    }
}
