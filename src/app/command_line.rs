//! The command line, read on every rank and compared over all of them before anything starts.
//!
//! Ranks may be started with different arguments: by `mpiexec -n 2 a : -n 1 b`, or by a script that
//! derives them from the environment of a node. A rank that cannot begin would leave the others
//! waiting for it in their first collective operation; ranks that begin differently would train
//! nonsense. So all ranks exchange the outcome of reading their arguments (`MPI_Allgather` of 16
//! bytes), and then compare the values of all options (two times `MPI_Allreduce` of 32 bytes if all
//! are equal).

use std::ffi::OsStr;
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{ArgMatches, Command, Parser};
use xxhash_rust::xxh3::xxh3_64;

use super::output::say;
use crate::Result;
use crate::comm::World;

/// The version of the suite.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The options that ranks may be given differently: how much they log, how many threads they have,
/// and the path of the data, whose contents are compared instead.
const MAY_DIFFER: [&str; 6] = ["--data", "--pace", "--quiet", "--test-data", "--threads", "--verbose"];

/// A command line that has been read.
pub(super) struct CommandLine<A> {
    outcome: clap::error::Result<A>,
    /// Names and values of the options that must be equal on all ranks.
    settings: Vec<(String, String)>,
}

/// The outcome of reading a command line as a number: the larger, the worse.
const RUNS: u8 = 0;
const SHOWS: u8 = 1;
const WRONG: u8 = 2;

impl<A: Parser> CommandLine<A> {
    /// Reads the arguments of this process. Not collective.
    pub(super) fn read() -> CommandLine<A> {
        let mut command = A::command();
        let matches = command.try_get_matches_from_mut(std::env::args_os());
        let settings = matches.as_ref().map(|matches| settings(&command, matches)).unwrap_or_default();
        let outcome = matches.and_then(|matches| A::from_arg_matches(&matches));
        CommandLine { outcome: outcome.map_err(|error| error.format(&mut command)), settings }
    }

    /// Creates a command line that is refused for the reason `why`, whatever the arguments are.
    pub(super) fn refused(why: &str) -> CommandLine<A> {
        let outcome = Err(A::command().error(ErrorKind::ArgumentConflict, why));
        CommandLine { outcome, settings: Vec::new() }
    }

    /// Returns the options, if they could be read.
    pub(super) fn options(&self) -> Option<&A> {
        self.outcome.as_ref().ok()
    }

    /// Returns true if the arguments ask for a text, such as that of `--help`.
    pub(super) fn shows_text(&self) -> bool {
        self.state() == SHOWS
    }

    /// Prints the text that the arguments ask for.
    pub(super) fn show(&self) {
        if let Err(text) = &self.outcome {
            // a closed pipe is not an error
            let _ = text.print();
        }
    }

    fn state(&self) -> u8 {
        match &self.outcome {
            Ok(_) => RUNS,
            Err(text) if text.exit_code() == 0 => SHOWS,
            Err(_) => WRONG,
        }
    }

    /// Returns the options if all ranks could read theirs and were given equal ones; else returns
    /// the exit code of all ranks, after the lowest rank that could not read its options has
    /// printed the reason. Collective.
    ///
    /// # Errors
    /// Options differ that must be equal: the same error on every rank, with the names and values
    /// and a rank of each.
    pub(super) fn agree(self, world: &World) -> Result<std::result::Result<A, ExitCode>> {
        let all = world.communicator();
        // a rank is named unless all have the same text
        let text = self.outcome.as_ref().err().map(|text| text.render().to_string()).unwrap_or_default();
        let own = [i64::from(self.state()), xxh3_64(text.as_bytes()) as i64];
        let mut said = vec![0; 2 * all.size()];
        all.all_gather(&own, &mut said)?;
        let states: Vec<u8> = said.chunks_exact(2).map(|pair| pair[0] as u8).collect();
        let is_same = said.chunks_exact(2).all(|pair| pair == own);
        match self.outcome {
            Ok(options) if states.iter().all(|state| *state == RUNS) => {
                // between different programs all options differ
                let (program, options_given) = self.settings.split_at(2);
                all.compare("comparing the programs of the ranks", program)?;
                all.compare("comparing the command lines of the ranks", options_given)?;
                Ok(Ok(options))
            }
            outcome => {
                let worst = states.iter().copied().max().unwrap_or(WRONG);
                let speaker = states.iter().position(|state| *state == worst);
                if let (Err(text), true) = (outcome, speaker == Some(all.rank())) {
                    explain(&text, all.rank(), &states, is_same);
                }
                let is_shown = states.iter().all(|state| *state == SHOWS);
                Ok(Err(if is_shown { ExitCode::SUCCESS } else { ExitCode::from(2) }))
            }
        }
    }
}

/// Prints the outcome of reading the command line of `rank`, with the rank unless it `is_same` on
/// all.
fn explain(text: &clap::Error, rank: usize, states: &[u8], is_same: bool) {
    match states.iter().position(|state| *state == RUNS) {
        Some(other) if states[rank] == SHOWS => say(&format!(
            "rank {rank}: error: it was given --help or --version, and rank {other} was not; \
             give every rank the same arguments"
        )),
        _ if is_same || states[rank] == SHOWS => {
            let _ = text.print();
        }
        _ => say(format!("rank {rank}: {}", text.render()).trim_end()),
    }
}

/// Returns the program, its version, and the values of the options that must be equal on all ranks,
/// defaults included.
fn settings(command: &Command, matches: &ArgMatches) -> Vec<(String, String)> {
    let mut settings = Vec::from(
        [("the program", command.get_name()), ("its version", VERSION)]
            .map(|(name, value)| (name.to_owned(), value.to_owned())),
    );
    for argument in command.get_arguments() {
        let id = argument.get_id().as_str();
        let name = argument.get_long().map_or_else(|| id.to_owned(), |long| format!("--{long}"));
        if let (Ok(Some(values)), false) = (matches.try_get_raw(id), MAY_DIFFER.contains(&name.as_str())) {
            let values: Vec<_> = values.map(OsStr::to_string_lossy).collect();
            settings.push((name, values.join(",")));
        }
    }
    settings
}
