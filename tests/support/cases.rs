//! Library cases under real `mpiexec`: a test target without libtest lists its cases, starts itself again for each of them
//! on each number of ranks, and counts what the ranks report. An exit code alone proves nothing.

use std::process::ExitCode;
use std::time::Duration;

use libtest_mimic::{Arguments, Failed, Trial};
use phalanx::comm::World;

use super::mpiexec;

/// A case, and the numbers of ranks it runs on.
pub struct Case {
    /// Its name.
    pub name: &'static str,
    /// Numbers of ranks.
    pub ranks: &'static [usize],
    /// What every rank does; it panics if something is wrong.
    pub run: fn(&World),
}

/// The argument that makes the program one rank of a case.
const RANK_SIDE: &str = "--rank-side";

/// The `main` of a target with these cases, and others that must end the job, soon, with a text on stderr.
pub fn main(cases: &'static [Case], failing: &'static [(Case, &str)]) -> ExitCode {
    if let Some(code) = rank_side(cases, failing) {
        return code;
    }
    run(cases, failing, None)
}

/// The same for cases that need CUDA: on a GPU if there is one, else on an emulated one.
pub fn main_on_cuda(cases: &'static [Case]) -> ExitCode {
    if let Some(code) = rank_side(cases, &[]) {
        return code;
    }
    match super::cuda::libraries() {
        Ok(libraries) => run(cases, &[], libraries),
        Err(why) => {
            super::say_skipped(&why);
            ExitCode::SUCCESS
        }
    }
}

/// One rank of a case, if that is what this process is.
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
    arguments.test_threads = Some(1);
    let trials = cases.iter().flat_map(|case| {
        let trial = |&ranks| {
            Trial::test(format!("{}_{ranks}_ranks", case.name), move || launch(case.name, ranks, libraries))
        };
        case.ranks.iter().map(trial).collect::<Vec<_>>()
    });
    let failing = failing.iter().flat_map(|(case, text)| {
        let trial = |&ranks| {
            Trial::test(format!("{}_{ranks}_ranks", case.name), move || fail(case.name, ranks, text))
        };
        case.ranks.iter().map(trial).collect::<Vec<_>>()
    });
    libtest_mimic::run(&arguments, trials.chain(failing).collect()).exit_code()
}

fn launch(name: &str, ranks: usize, libraries: Option<&'static str>) -> Result<(), Failed> {
    let program = std::env::current_exe()?;
    let job = mpiexec(ranks, program).args([RANK_SIDE, name]).limit(Duration::from_secs(300));
    let done = job.libraries(libraries).run();
    let completed = |rank| done.stdout.contains(&format!("completed {name} on rank {rank} of {ranks}\n"));
    for line in done.stdout.lines().filter(|line| line.contains("SKIPPED")) {
        super::say_skipped(&format!("{name}: {}", line.trim_start_matches("SKIPPED: ")));
    }
    if done.code == Some(0) && (0..ranks).all(completed) {
        return Ok(());
    }
    Err(done.describe().into())
}

fn fail(name: &str, ranks: usize, text: &str) -> Result<(), Failed> {
    let program = std::env::current_exe()?;
    let done = mpiexec(ranks, program).args([RANK_SIDE, name]).limit(Duration::from_secs(30)).run();
    if done.code != Some(0) && done.stderr.contains(text) {
        return Ok(());
    }
    Err(done.describe().into())
}
