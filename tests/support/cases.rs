//! Library cases under a real `mpiexec`. A target without libtest lists its cases, starts itself
//! again under `mpiexec` for each case and number of ranks, and requires a completion line from
//! every rank, because an exit code alone proves nothing.

use std::process::ExitCode;
use std::time::Duration;

use libtest_mimic::{Arguments, Failed, Trial};
use phalanx::comm::World;

use super::{mpiexec, soak};

/// A case and the numbers of ranks that it runs on.
pub struct Case {
    /// The name, unique within the target.
    pub name: &'static str,
    /// The numbers of ranks.
    pub ranks: &'static [usize],
    /// The body, which runs on every rank and panics on an error.
    pub run: fn(&World),
}

/// The argument that makes the program one rank of a case.
const RANK_SIDE: &str = "--rank-side";

/// Runs `cases`, and `failing` cases that must end their job soon with a text on stderr: the `main`
/// of a target.
pub fn main(cases: &'static [Case], failing: &'static [(Case, &str)]) -> ExitCode {
    if let Some(code) = rank_side(cases, failing) {
        return code;
    }
    run(cases, failing, None)
}

/// As [`main`], on a GPU if there is one, else on the emulated one: the `main` of a target that needs CUDA.
pub fn main_on_cuda(cases: &'static [Case], failing: &'static [(Case, &str)]) -> ExitCode {
    if let Some(code) = rank_side(cases, failing) {
        return code;
    }
    match super::cuda::libraries() {
        Ok(libraries) => run(cases, failing, libraries),
        Err(why) => {
            super::say_skipped(&why);
            ExitCode::SUCCESS
        }
    }
}

/// Runs one rank of a case if this process was started as one.
fn rank_side(cases: &'static [Case], failing: &'static [(Case, &str)]) -> Option<ExitCode> {
    let mut arguments = std::env::args().skip(1);
    if arguments.next().as_deref() == Some(RANK_SIDE) {
        let name = arguments.next().expect("a name follows");
        let mut all = cases.iter().chain(failing.iter().map(|(case, _)| case));
        let case = all.find(|case| case.name == name).expect("the name is one of the cases");
        let world = World::start().expect("MPI starts");
        (case.run)(&world);
        println!("completed {name} on rank {} of {}", world.rank(), world.size());
        return Some(ExitCode::SUCCESS);
    }
    None
}

fn run(
    cases: &'static [Case],
    failing: &'static [(Case, &str)],
    libraries: Option<&'static str>,
) -> ExitCode {
    let mut arguments = Arguments::from_args();
    arguments.test_threads = Some(super::most_jobs());
    let trials = cases.iter().flat_map(|case| {
        let trial = |&ranks| {
            Trial::test(format!("{}_{ranks}_ranks", case.name), move || launch(case.name, ranks, libraries))
        };
        case.ranks.iter().map(trial).collect::<Vec<_>>()
    });
    let failing = failing.iter().flat_map(|(case, text)| {
        let trial = |&ranks| {
            Trial::test(format!("{}_{ranks}_ranks", case.name), move || {
                fail(case.name, ranks, libraries, text)
            })
        };
        case.ranks.iter().map(trial).collect::<Vec<_>>()
    });
    libtest_mimic::run(&arguments, trials.chain(failing).collect()).exit_code()
}

fn launch(name: &str, ranks: usize, libraries: Option<&'static str>) -> Result<(), Failed> {
    let program = std::env::current_exe()?;
    let seconds = if soak().is_some() { 3000 } else { 300 };
    let job = mpiexec(ranks, program).args([RANK_SIDE, name]).limit(Duration::from_secs(seconds));
    let done = job.libraries(libraries).run();
    let completed = |rank| done.stdout.contains(&format!("completed {name} on rank {rank} of {ranks}\n"));
    for line in done.stdout.lines().filter(|line| line.contains("SKIPPED")) {
        super::say_skipped(&format!("{name}: {}", line.trim_start_matches("SKIPPED: ")));
    }
    for line in done.stdout.lines().filter(|line| line.starts_with("counted: ")) {
        println!("{name}: {line}");
    }
    if done.code == Some(0) && (0..ranks).all(completed) {
        return Ok(());
    }
    Err(done.describe().into())
}

fn fail(name: &str, ranks: usize, libraries: Option<&'static str>, text: &str) -> Result<(), Failed> {
    let program = std::env::current_exe()?;
    let job = mpiexec(ranks, program).args([RANK_SIDE, name]).limit(Duration::from_secs(30));
    let done = job.libraries(libraries).run();
    let names_rank =
        done.stderr.lines().any(|line| line.starts_with("rank ") && line.contains(": panicked at "));
    if done.code == Some(1) && names_rank && done.stderr.contains(text) {
        return Ok(());
    }
    Err(done.describe().into())
}
