//! What every program shares: MPI up, arguments read, log lines set up, one exit code for the job.

mod launcher;
mod log_lines;
mod progress;
mod trace;
mod watchdog;

use std::io::{ErrorKind, Write};
use std::path::PathBuf;
use std::process::{ExitCode, Termination};

use clap::Parser;

use crate::comm::{World, abort};
use crate::device::flush_subnormals;
use crate::{Error, Result};

pub use log_lines::set_step;
pub use progress::{Progress, ProgressMode};
pub use trace::{Summary, Trace};
pub use watchdog::watch;

/// Prints a line on stderr in one piece, so that those of several ranks do not mix.
fn say(line: &str) {
    // there is nobody left to tell that stderr is gone
    let _ = std::io::stderr().write_all(format!("{line}\n").as_bytes());
}

/// The version of the suite.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Prints a line on stdout. A reader that has gone away is no failure; a full disk is. Not collective.
///
/// # Errors
/// The line cannot be written.
pub fn print_line(line: &str) -> Result<()> {
    let mut stdout = std::io::stdout().lock();
    match writeln!(stdout, "{line}").and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(Error::failed("writing to stdout", error)),
        _ => Ok(()),
    }
}

/// The options of every program: how much is said, and what is written down.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct CommonOptions {
    /// Write what every rank did when to this file, for ui.perfetto.dev or chrome://tracing
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub trace: Option<PathBuf>,

    /// Say more; twice for everything
    #[arg(short, long, action = clap::ArgAction::Count, global = true)]
    pub verbose: u8,

    /// Say only what went wrong
    #[arg(short, long, conflicts_with = "verbose", global = true)]
    pub quiet: bool,
}

/// The command line of a program.
pub trait Program: Parser {
    /// The options that it shares with every other.
    fn common(&self) -> &CommonOptions;
}

/// The exit code of a job that stopped before its end, with a checkpoint to go on from: `EX_TEMPFAIL` of sysexits.h, which
/// batch scripts take as "start me again".
pub const STOPPED: u8 = 75;

/// Runs a program: reads the command line into `A`, starts MPI, starts the log, calls `run`, writes the trace if one is wanted,
/// and returns the exit code of the process: that of what `run` returns if it succeeds.
///
/// A wrong command line is explained once, by rank 0, with exit code 2. An error that all ranks agree on
/// ([`Error::Agreed`]) is printed once and ends the job in good order; any other error is one rank's alone, so that rank
/// prints it and takes the whole job down at once, for the others may be waiting for it. Subnormal numbers are flushed to
/// zero while `run` runs.
pub fn main<A: Program, T: Termination>(run: impl FnOnce(&World, &A) -> Result<T>) -> ExitCode {
    let arguments = A::try_parse();
    // --help and --version, which need no MPI: on some clusters it does not start on the nodes for logging in
    if let Some(text) = arguments.as_ref().err().filter(|error| error.exit_code() == 0) {
        if launcher::speaks() {
            // a closed pipe is no reason to fail
            let _ = text.print();
        }
        return ExitCode::SUCCESS;
    }
    let world = match World::start() {
        Ok(world) => world,
        Err(error) => {
            say(&format!("error: {error}"));
            return ExitCode::from(error.exit_code());
        }
    };
    let arguments = match arguments {
        Ok(arguments) => arguments,
        Err(error) => {
            if world.is_root() {
                let _ = error.print();
            }
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2));
        }
    };
    log_lines::start(&world, arguments.common());
    if let Err(error) = launcher::check(&world) {
        if launcher::speaks() {
            say(&format!("error: {error}"));
        }
        return ExitCode::from(error.exit_code());
    }
    match flush_subnormals(|| observed(&world, &arguments, run)) {
        Ok(done) => done.report(),
        Err(error @ Error::Agreed { .. }) => {
            if world.is_root() {
                say(&format!("error: {error}"));
            }
            ExitCode::from(error.exit_code())
        }
        Err(error) => {
            let whose = if world.size() > 1 { format!("rank {}: ", world.rank()) } else { String::new() };
            say(&format!("{whose}error: {error}"));
            if world.size() > 1 {
                abort(error.exit_code());
            }
            ExitCode::from(error.exit_code())
        }
    }
}

/// Runs a program that needs no MPI, and returns the exit code of the process.
pub fn tool<A: Parser>(run: impl FnOnce(&A) -> Result<ExitCode>) -> ExitCode {
    run(&A::parse()).unwrap_or_else(|error| {
        say(&format!("error: {error}"));
        ExitCode::from(error.exit_code())
    })
}

fn observed<A: Program, T>(world: &World, arguments: &A, run: impl FnOnce(&World, &A) -> Result<T>) -> Result<T> {
    let Some(path) = &arguments.common().trace else {
        return run(world, arguments);
    };
    let trace = Trace::start(world, path, A::command().get_name())?;
    let outcome = run(world, arguments);
    // where all ranks agree on an error, they can still bring their records together
    if matches!(outcome, Ok(_) | Err(Error::Agreed { .. })) {
        trace.finish(world)?;
    }
    outcome
}
