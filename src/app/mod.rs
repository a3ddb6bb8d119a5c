//! The frame of every program: starts MPI, reads the arguments, sets up logging, and returns one
//! exit code for the job.

mod command_line;
mod files;
mod launcher;
mod log_lines;
mod options;
mod output;
mod progress;
mod trace_file;
mod watchdog;

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use clap::Parser;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use signal_hook::consts::SIGTERM;

use crate::comm::{World, abort};
use crate::device::flush_subnormals;
use crate::trace::{self, Name};
use crate::{Error, Result};
use command_line::CommandLine;
use output::say;

pub use command_line::VERSION;
pub use files::{FileOption, check as check_files};
pub use log_lines::set_step;
pub use options::{CommonOptions, Program, parse_time};
pub use output::{print_bytes, print_line};
pub use progress::{Progress, ProgressMode};
pub use trace_file::{Summary, Trace};

/// The exit code of a job that stopped before its end with a checkpoint to continue from:
/// `EX_TEMPFAIL` of sysexits.h, which batch scripts take as "start me again".
pub const STOPPED: u8 = 75;

/// The time that a rank with an error of its own leaves to the one before it, which may have the same one: it
/// then speaks, and ends the job.
const FIRST_WORD: Duration = Duration::from_millis(500);

/// The ranks that wait for each other so; later ones wait as long as the last of them.
const MOST_TURNS: usize = 4;

/// The end of a program's run. A program without a pipeline returns an exit code or nothing, which
/// converts to it.
#[derive(Debug, Clone, Copy)]
pub struct Finished {
    /// The exit code of the program.
    pub exit_code: ExitCode,
    /// The share of the ranks' time that a pipeline's schedule leaves idle, with which a trace
    /// compares the measured one.
    pub expected_bubble: Option<f64>,
}

impl From<ExitCode> for Finished {
    fn from(exit_code: ExitCode) -> Finished {
        Finished { exit_code, expected_bubble: None }
    }
}

impl From<()> for Finished {
    fn from((): ()) -> Finished {
        ExitCode::SUCCESS.into()
    }
}

/// The number of files that a process may open at a time if the system lets it: a set of many HDF5 files has
/// three open for each. Launchers close as many before they start a process, so that a million takes time.
const MOST_OPEN_FILES: u64 = 1 << 16;

/// Raises the number of files that this process may open at a time.
fn allow_open_files() {
    let limit = getrlimit(Resource::Nofile);
    let raised = limit.maximum.unwrap_or(MOST_OPEN_FILES).min(MOST_OPEN_FILES);
    if limit.current.is_some_and(|current| current < raised) {
        // a system that refuses this says so again where a file cannot be opened
        let _ = setrlimit(Resource::Nofile, Rlimit { current: Some(raised), ..limit });
    }
}

/// Runs a program: reads the command line into `A`, starts MPI, compares the command lines of the
/// ranks, starts logging, checks the files that options name, calls `run`, writes the trace if one
/// is wanted, and returns the exit code of the process: that of the result of `run` if it succeeds.
///
/// A wrong command line, on whichever ranks, is explained once, with exit code 2 on all. An error
/// that all ranks agree on ([`Error::Agreed`]) is printed once and ends the job in good order. Any
/// other error belongs to one rank, which prints it and aborts the whole job, because the others may be
/// waiting for it. The lowest such rank goes first, for others may have the same error. Subnormal numbers
/// are flushed to zero while `run` runs.
pub fn main<A: Program, T: Into<Finished>>(run: impl FnOnce(&World, &A) -> Result<T>) -> ExitCode {
    let line = CommandLine::<A>::read();
    // --help and --version need no MPI, which does not start on the login nodes of some clusters,
    // unless other ranks wait in it
    if line.shows_text() && !launcher::announces_several() {
        line.show();
        return ExitCode::SUCCESS;
    }
    if let Some(limit) = line.options().and_then(|options| options.common().watchdog) {
        watchdog::watch(limit);
    }
    allow_open_files();
    let starting = trace::work(Name::Start);
    let world = match World::start() {
        Ok(world) => world,
        Err(error) => return fail(&error),
    };
    drop(starting);
    if let Err(error) = launcher::check(&world) {
        match launcher::speaks() {
            true if line.shows_text() => line.show(),
            true => say(&format!("error: {error}")),
            false => {}
        }
        return ExitCode::from(if line.shows_text() { 0 } else { error.exit_code() });
    }
    let outcome = match line.agree(&world) {
        Ok(Err(code)) => return code,
        Ok(Ok(arguments)) => {
            log_lines::start(&world, arguments.common());
            flush_subnormals(|| observed(&world, &arguments, run))
        }
        Err(error) => Err(error),
    };
    match outcome {
        Ok(exit_code) => exit_code,
        Err(error @ Error::Agreed { .. }) => {
            if world.is_root() {
                fail(&error)
            } else {
                ExitCode::from(error.exit_code())
            }
        }
        Err(error) if world.size() == 1 => fail(&error),
        Err(error) => {
            if has_the_word(world.rank()) {
                say(&format!("rank {}: error: {error}", world.rank()));
            }
            abort(error.exit_code())
        }
    }
}

/// Waits for the turn of `rank` to speak of an error. Returns false if another rank has ended the job
/// meanwhile: launchers send SIGTERM then, which may be caught.
fn has_the_word(rank: usize) -> bool {
    let is_over = Arc::new(AtomicBool::new(false));
    // without the signal this rank speaks too
    let _ = signal_hook::flag::register(SIGTERM, Arc::clone(&is_over));
    let end = Instant::now() + FIRST_WORD * rank.min(MOST_TURNS) as u32;
    while Instant::now() < end && !is_over.load(Ordering::Relaxed) {
        thread::sleep(Duration::from_millis(5));
    }
    !is_over.load(Ordering::Relaxed)
}

/// Runs a program that uses no MPI and is a single process, and returns the exit code of the
/// process.
pub fn tool<A: Parser>(run: impl FnOnce(&A) -> Result<ExitCode>) -> ExitCode {
    if launcher::announces_several() {
        return refuse_several::<A>();
    }
    run(&A::parse()).unwrap_or_else(|error| fail(&error))
}

/// Prints `error`, and returns the exit code that it gives the job.
fn fail(error: &Error) -> ExitCode {
    say(&format!("error: {error}"));
    ExitCode::from(error.exit_code())
}

/// Refuses to be one of several processes, for a program that has no ranks. Other programs in the
/// job may wait for it in MPI, so it starts MPI before it refuses.
fn refuse_several<A: Parser>() -> ExitCode {
    let line =
        CommandLine::<A>::refused("this program runs as a single process; start it without mpiexec or srun");
    let agreed = World::start().and_then(|world| line.agree(&world));
    match agreed {
        Ok(outcome) => outcome.err().unwrap_or(ExitCode::from(2)),
        Err(error) => fail(&error),
    }
}

fn observed<A: Program, T: Into<Finished>>(
    world: &World,
    arguments: &A,
    run: impl FnOnce(&World, &A) -> Result<T>,
) -> Result<ExitCode> {
    world.communicator().agree_with_root(|| arguments.check_files())?;
    let Some(path) = &arguments.common().trace else {
        return run(world, arguments).map(|done| done.into().exit_code);
    };
    let trace = Trace::start(world, path, A::command().get_name())?;
    match run(world, arguments).map(Into::into) {
        Ok(Finished { exit_code, expected_bubble }) => {
            trace.finish(world, expected_bubble)?;
            Ok(exit_code)
        }
        // where all ranks agree on an error, they can still gather their records
        Err(error @ Error::Agreed { .. }) => {
            trace.finish(world, None)?;
            Err(error)
        }
        Err(error) => Err(error),
    }
}
