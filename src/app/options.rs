//! What all programs have in common on the command line.

use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;

use super::files::{self, FileOption};
use crate::Result;

/// The options of every program: how much is said, what is written down, and when a job that hangs is ended.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct CommonOptions {
    /// Write what every rank did when to this file, for ui.perfetto.dev or chrome://tracing
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub trace: Option<PathBuf>,

    /// End the job with exit code 1 if a rank does nothing for this long (300s), from the start of MPI on, after every rank has
    /// said where it stands; to be longer than anything that ranks wait for in a good run, such as a checkpoint, or a
    /// slower rank's first pass over the data
    #[arg(long, value_name = "TIME", value_parser = parse_time, help_heading = "Machine")]
    pub watchdog: Option<Duration>,

    /// Say more; twice for everything
    #[arg(short, long, action = clap::ArgAction::Count, global = true)]
    pub verbose: u8,

    /// Say only what went wrong
    #[arg(short, long, conflicts_with = "verbose", global = true)]
    pub quiet: bool,
}

impl CommonOptions {
    /// The files that these options name.
    pub fn files(&self) -> Vec<FileOption<'_>> {
        self.trace.iter().map(|path| FileOption::output("--trace", path)).collect()
    }
}

/// The command line of a program.
pub trait Program: Parser {
    /// The options that it shares with every other.
    fn common(&self) -> &CommonOptions;

    /// Looks at the files that options name before any of them is opened: see [`files::check`]. Not collective; rank 0 does it.
    ///
    /// # Errors
    /// A file cannot be used as the option says.
    fn check_files(&self) -> Result<()> {
        files::check(&self.common().files())
    }
}

/// Reads a time with its unit; not 0, and not months, which `10M` would be.
///
/// # Errors
/// It is none; what was expected.
pub fn parse_time(text: &str) -> std::result::Result<Duration, String> {
    const MONTH: Duration = Duration::from_secs(28 * 86_400);
    match humantime::parse_duration(text) {
        Ok(time) if !time.is_zero() && time < MONTH => Ok(time),
        _ => Err("expected a time such as 300s, 55m or 2h, above 0".into()),
    }
}
