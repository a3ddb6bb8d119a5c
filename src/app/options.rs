//! The options that all programs have in common.

use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;

use super::files::{self, FileOption};
use crate::Result;

/// The options of every program: verbosity, the trace, and the watchdog.
#[derive(Debug, Clone, Default, clap::Args)]
// the heading of options that were added before these would apply to those that have none
#[command(next_help_heading = None::<&'static str>)]
pub struct CommonOptions {
    /// Write a trace of every rank's activities to this file, for ui.perfetto.dev or
    /// chrome://tracing
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub trace: Option<PathBuf>,

    /// End the job with exit code 1 if a rank makes no progress for this long, such as 300s, at any time
    /// from the start of MPI; every rank first reports where it is. Choose a time longer than any
    /// wait in a good run, such as that for a checkpoint or for a slower rank's first pass over the
    /// data
    #[arg(long, value_name = "TIME", value_parser = parse_time, help_heading = "Machine")]
    pub watchdog: Option<Duration>,

    /// Log more; give it twice for everything
    #[arg(short, long, action = clap::ArgAction::Count, global = true)]
    pub verbose: u8,

    /// Log only warnings and errors
    #[arg(short, long, conflicts_with = "verbose", global = true)]
    pub quiet: bool,
}

impl CommonOptions {
    /// Returns the files that these options name.
    pub fn files(&self) -> Vec<FileOption<'_>> {
        self.trace.iter().map(|path| FileOption::output("--trace", path)).collect()
    }
}

/// The command line of a program.
pub trait Program: Parser {
    /// Returns the options that all programs share.
    fn common(&self) -> &CommonOptions;

    /// Checks the files that options name before any of them is opened: see [`files::check`]. Not
    /// collective; rank 0 calls it.
    ///
    /// # Errors
    /// A file cannot be used as its option says.
    fn check_files(&self) -> Result<()> {
        files::check(&self.common().files())
    }
}

/// Parses a time with its unit: not 0, and not months, which `10M` would be.
///
/// # Errors
/// The text is not such a time; the message says what was expected.
pub fn parse_time(text: &str) -> std::result::Result<Duration, String> {
    const MONTH: Duration = Duration::from_secs(28 * 86_400);
    match humantime::parse_duration(text) {
        Ok(time) if !time.is_zero() && time < MONTH => Ok(time),
        _ => Err("expected a time such as 300s, 55m or 2h, above 0 and below 28 days".into()),
    }
}
