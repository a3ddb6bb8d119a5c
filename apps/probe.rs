//! Finds out by experiment what an MPI library supports: tries each operation, on host and GPU
//! memory, blocking and not, small and above 2 GiB, in a job of its own that may die.
//!
//! ```text
//! probe                                               jobs of two ranks by mpiexec
//! probe --launcher 'srun -N 2 -n 4' --json mpi.json   jobs by srun; also writes the results to a
//!                                                     file, for sync_sgd --probe mpi.json
//! probe --launcher 'srun -N 2 -n 8' --topology        the placement of a job's ranks
//! ```
//!
//! `probe` is started as a single process, without a launcher, because it starts its own jobs.

use std::ffi::OsString;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use phalanx::app::{CommonOptions, FileOption, Program, check_files, parse_time, print_line};
use phalanx::comm::{World, ranks_on_nodes};
use phalanx::probe::{
    Findings, Trial, TrialOutcome, attempt, describe_job, request_description, start, topology,
};
use phalanx::{Error, Result};

/// Find out what this MPI can do: try each operation in a job of its own, which may die.
#[derive(Parser)]
#[command(name = "probe", version, args_override_self = true)]
struct Arguments {
    /// Command that starts a job
    #[arg(long, value_name = "COMMAND", default_value = "mpiexec -n 2")]
    launcher: String,

    /// Print the placement of a job's ranks instead of probing
    #[arg(long, conflicts_with_all = ["json", "quick"])]
    topology: bool,

    /// Skip buffers above 2 GiB
    #[arg(long)]
    quick: bool,

    /// Kill a job after this time
    #[arg(long, value_name = "TIME", default_value = "2m", value_parser = parse_time)]
    limit: Duration,

    /// Also write the results to this file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// The command line of the jobs that the program starts.
#[derive(Parser)]
#[command(name = "probe")]
struct Inside {
    #[arg(long)]
    describe: bool,

    #[arg(long)]
    attempt: Option<Trial>,

    #[command(flatten)]
    common: CommonOptions,
}

fn run(arguments: &Arguments) -> Result<ExitCode> {
    let Arguments { launcher, limit, .. } = arguments;
    let mut json = arguments.json.as_deref().map(create).transpose()?;
    let description = request_description(launcher, *limit)?;
    print_line(&format!("{}, thread level {}", description.mpi, description.thread_level))?;
    print_line(&format!("CUDA-aware: {}", description.cuda))?;
    let (ranks, nodes) = (description.places.len(), description.num_nodes());
    print_line(&format!("{}, by `{launcher}`\n", ranks_on_nodes(ranks, nodes)))?;
    print_line(&topology(&description))?;
    if arguments.topology {
        return Ok(ExitCode::SUCCESS);
    }
    let has_devices = description.has_devices();
    let mut findings = Findings { description, trials: Vec::new() };
    for trial in Trial::all(!arguments.quick, has_devices) {
        findings.trials.push(start(launcher, trial, *limit)?);
    }
    print_line(&findings.table())?;
    if let Some(file) = &mut json {
        let path = arguments.json.as_deref().unwrap_or(Path::new(""));
        let doing = format!("writing the results to {}", path.display());
        let text = serde_json::to_string_pretty(&findings).map_err(|error| Error::failed(&doing, error))?;
        // a terminal has no length
        let is_file = file.metadata().is_ok_and(|metadata| metadata.is_file());
        let cleared = if is_file { file.set_len(0) } else { Ok(()) };
        let written = cleared.and_then(|()| file.write_all((text + "\n").as_bytes()));
        written.map_err(|error| Error::failed(doing, error))?;
    }
    let is_sound = findings.trials.iter().all(|tried| tried.outcome != TrialOutcome::Wrong);
    Ok(if is_sound { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Opens the file for the results before minutes are spent on finding them. Its contents stay until
/// then.
fn create(path: &Path) -> Result<File> {
    check_files(&[FileOption::output("--json", path)])?;
    let opened = File::options().write(true).create(true).truncate(false).open(path);
    opened.map_err(|error| Error::input(format!("creating --json {}", path.display()), error))
}

/// Runs a rank of a job.
fn inside(world: &World, arguments: &Inside) -> Result<()> {
    let text = match arguments.attempt {
        Some(trial) => attempt(world, trial)?,
        None => {
            let description = describe_job(world)?;
            serde_json::to_string(&description).map_err(|error| Error::failed("describing the job", error))?
        }
    };
    if world.is_root() { print_line(&text) } else { Ok(()) }
}

impl Program for Inside {
    fn common(&self) -> &CommonOptions {
        &self.common
    }
}

fn main() -> ExitCode {
    let is_inside = |argument: OsString| argument == "--describe" || argument == "--attempt";
    if std::env::args_os().any(is_inside) { phalanx::app::main(inside) } else { phalanx::app::tool(run) }
}
