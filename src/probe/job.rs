//! The launcher's side of trials: starts jobs that may die, and reads their outcome.

use std::io::Read;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};

use super::attempt::{LEFT_OUT, WORKS};
use super::interrupt::Interrupt;
use super::{JobDescription, Trial, TrialOutcome, TrialReport};
use crate::{Error, Result};

/// The time that a launcher has to end its ranks when it is asked to.
const GRACE: Duration = Duration::from_secs(2);

/// The end of a job: its exit status, unless it was killed for taking too long, and its output.
struct EndedJob {
    status: Option<ExitStatus>,
    stdout: String,
    stderr: String,
    seconds: f64,
}

/// Starts a job that reports MPI's description of itself and the placement of its ranks.
///
/// # Errors
/// The job could not be started or failed; the message says how.
pub fn request_description(launcher: &str, limit: Duration) -> Result<JobDescription> {
    let doing = format!("starting a job with `{launcher}`");
    let ended = run(launcher, &["--describe"], limit)?;
    let line = ended.stdout.lines().last().unwrap_or_default();
    serde_json::from_str(line).map_err(|_| {
        let said = last_line(&ended.stderr);
        let way_out = "choose another --launcher, such as 'mpiexec -n 2' or 'srun -n 2 --mpi=pmix'";
        Error::input(doing, format!("{}: {said}; {way_out}", ending(&ended)))
    })
}

/// Starts the job of a trial and reports its outcome.
///
/// # Errors
/// The launcher cannot be started.
pub fn start(launcher: &str, trial: Trial, limit: Duration) -> Result<TrialReport> {
    let ended = run(launcher, &["--attempt", &trial.to_string()], limit)?;
    let said = ended.stdout.lines().last().unwrap_or_default();
    let is_done = ended.status.is_some_and(|status| status.success());
    let (outcome, note) = match &ended.status {
        None => (TrialOutcome::Hung, format!("killed after {limit:?}")),
        _ if is_done && said.starts_with(LEFT_OUT) => {
            (TrialOutcome::LeftOut, said[LEFT_OUT.len()..].to_owned())
        }
        _ if is_done && said == WORKS => (TrialOutcome::Works, said.to_owned()),
        _ if ended.stderr.contains("elements are wrong") => (TrialOutcome::Wrong, last_line(&ended.stderr)),
        _ => (TrialOutcome::Died, format!("{}: {}", ending(&ended), last_line(&ended.stderr))),
    };
    Ok(TrialReport::new(trial, outcome, note, ended.seconds))
}

fn run(launcher: &str, arguments: &[&str], limit: Duration) -> Result<EndedJob> {
    let failed = |error: std::io::Error| Error::input(format!("starting a job with `{launcher}`"), error);
    let words = words(launcher);
    let mut command = Command::new(words[0]);
    command.args(&words[1..]).arg(std::env::current_exe().map_err(failed)?).args(arguments);
    // in a process group of its own, so that all of it can be killed
    command.process_group(0).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let interrupt = Interrupt::of_process();
    interrupt.during(|| {
        let start = Instant::now();
        let mut child = command.spawn().map_err(failed)?;
        let streams = [collect(child.stdout.take()), collect(child.stderr.take())];
        let status = wait(&mut child, start + limit, &|| interrupt.has_come());
        if status.is_none() {
            end(&mut child);
        }
        let seconds = start.elapsed().as_secs_f64();
        let [stdout, stderr] = streams.map(said);
        Ok(EndedJob { status, stdout, stderr, seconds })
    })
}

/// Splits `launcher` into words. `srun` gets an option that ends the job when one of its ranks
/// dies, which is not its default.
fn words(launcher: &str) -> Vec<&str> {
    let mut words: Vec<&str> = launcher.split_whitespace().collect();
    match words.first() {
        None => words.push("mpiexec"),
        Some(first) if first.rsplit('/').next() == Some("srun") => words.insert(1, "--kill-on-bad-exit=1"),
        Some(_) => {}
    }
    words
}

/// Reads `stream` block by block, on a thread of its own.
fn collect(mut stream: Option<impl Read + Send + 'static>) -> Receiver<Vec<u8>> {
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        let mut block = [0; 4096];
        // blocks that were read before a failure count
        while let Some(Ok(len @ 1..)) = stream.as_mut().map(|stream| stream.read(&mut block)) {
            if sender.send(block[..len].to_vec()).is_err() {
                break;
            }
        }
    });
    receiver
}

/// Returns the whole output. A rank that outlives its launcher may keep the stream open, so the
/// wait for each block is limited.
fn said(blocks: Receiver<Vec<u8>>) -> String {
    let mut bytes = Vec::new();
    while let Ok(block) = blocks.recv_timeout(Duration::from_secs(1)) {
        bytes.extend(block);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Waits for the exit status of the job, until time `end` or until `is_over` returns true.
fn wait(child: &mut Child, end: Instant, is_over: &dyn Fn() -> bool) -> Option<ExitStatus> {
    while Instant::now() < end && !is_over() {
        if let Ok(Some(status)) = child.try_wait() {
            return Some(status);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    None
}

/// Ends the job.
fn end(child: &mut Child) {
    let group = Pid::from_child(child);
    // launchers forward SIGTERM to their ranks; SIGKILL ends those that ignore it; without processes in the
    // group there is nothing to end
    let _ = kill_process_group(group, Signal::TERM);
    wait(child, Instant::now() + GRACE, &|| false);
    let _ = kill_process_group(group, Signal::KILL);
    let _ = child.wait();
}

fn ending(ended: &EndedJob) -> String {
    match ended.status {
        None => "it had to be killed".to_owned(),
        Some(status) => match (status.code(), status.signal()) {
            (Some(code), _) => format!("exit code {code}"),
            (None, signal) => format!("signal {}", signal.unwrap_or_default()),
        },
    }
}

/// Returns the line that explains a failure: launchers frame theirs with dashes, and MPICH ends
/// with empty ones.
fn last_line(text: &str) -> String {
    let says = |line: &&str| line.chars().any(char::is_alphabetic);
    let telling = |line: &&str| line.contains("rror") || line.contains("signal") || line.contains("Assert");
    let lines = || text.lines().map(str::trim).filter(says);
    lines().find(telling).or_else(|| lines().next_back()).unwrap_or("it said nothing").to_owned()
}

#[cfg(test)]
mod tests {
    use super::words;

    #[test]
    fn a_step_of_slurm_ends_when_a_rank_dies() {
        assert_eq!(words("mpiexec -n 2"), ["mpiexec", "-n", "2"]);
        assert_eq!(words("srun -n 2"), ["srun", "--kill-on-bad-exit=1", "-n", "2"]);
        // the user's own option comes later and takes precedence
        assert_eq!(words("/opt/bin/srun -K0"), ["/opt/bin/srun", "--kill-on-bad-exit=1", "-K0"]);
        assert_eq!(words(" "), ["mpiexec"]);
    }
}
