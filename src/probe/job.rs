//! Trials from the outside: jobs that may die.

use std::io::Read;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use super::attempt::{LEFT_OUT, WORKS};
use super::{Description, Outcome, Trial, Tried};
use crate::{Error, Result};

/// What a job left: how it ended, unless it was killed for taking too long, and what it said.
struct Ended {
    status: Option<ExitStatus>,
    stdout: String,
    stderr: String,
    seconds: f64,
}

/// Asks a job what MPI says of itself, and where its ranks are.
///
/// # Errors
/// The job could not be started or did not end well; what it said.
pub fn describe(launcher: &str, limit: Duration) -> Result<Description> {
    let doing = format!("starting a job with `{launcher}`");
    let ended = run(launcher, &["--describe"], limit)?;
    let line = ended.stdout.lines().last().unwrap_or_default();
    serde_json::from_str(line).map_err(|_| {
        let said = last_line(&ended.stderr);
        let way_out = "choose another --launcher, such as 'mpiexec -n 2' or 'srun -n 2 --mpi=pmix'";
        Error::input(doing, format!("{}: {said}; {way_out}", ending(&ended)))
    })
}

/// Makes a trial and says how it ended.
///
/// # Errors
/// The launcher cannot be started.
pub fn start(launcher: &str, trial: Trial, limit: Duration) -> Result<Tried> {
    let ended = run(launcher, &["--attempt", &trial.to_string()], limit)?;
    let said = ended.stdout.lines().last().unwrap_or_default();
    let is_done = ended.status.is_some_and(|status| status.success());
    let (outcome, note) = match &ended.status {
        None => (Outcome::Hung, format!("killed after {limit:?}")),
        _ if is_done && said.starts_with(LEFT_OUT) => (Outcome::LeftOut, said[LEFT_OUT.len()..].to_owned()),
        _ if is_done && said == WORKS => (Outcome::Works, said.to_owned()),
        _ if ended.stderr.contains("elements are wrong") => (Outcome::Wrong, last_line(&ended.stderr)),
        _ => (Outcome::Died, format!("{}: {}", ending(&ended), last_line(&ended.stderr))),
    };
    Ok(Tried::new(trial, outcome, note, ended.seconds))
}

fn run(launcher: &str, arguments: &[&str], limit: Duration) -> Result<Ended> {
    let failed = |error: std::io::Error| Error::input(format!("starting a job with `{launcher}`"), error);
    let words = words(launcher);
    let mut command = Command::new(words[0]);
    command.args(&words[1..]).arg(std::env::current_exe().map_err(failed)?).args(arguments);
    // a group of its own, so that all of it can be killed
    command.process_group(0).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let start = Instant::now();
    let mut child = command.spawn().map_err(failed)?;
    let streams = [collect(child.stdout.take()), collect(child.stderr.take())];
    let status = wait(&mut child, start + limit);
    let seconds = start.elapsed().as_secs_f64();
    let [stdout, stderr] = streams.map(said);
    Ok(Ended { status, stdout, stderr, seconds })
}

/// The words of `launcher`. A job of `srun` ends when one of its ranks dies, which it does not by itself.
fn words(launcher: &str) -> Vec<&str> {
    let mut words: Vec<&str> = launcher.split_whitespace().collect();
    match words.first() {
        None => words.push("mpiexec"),
        Some(first) if first.rsplit('/').next() == Some("srun") => words.insert(1, "--kill-on-bad-exit=1"),
        Some(_) => {}
    }
    words
}

/// Reads `stream` piece by piece, on a thread of its own.
fn collect(mut stream: Option<impl Read + Send + 'static>) -> Receiver<Vec<u8>> {
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        let mut block = [0; 4096];
        // what was read before a failure is what there is
        while let Some(Ok(len @ 1..)) = stream.as_mut().map(|stream| stream.read(&mut block)) {
            if sender.send(block[..len].to_vec()).is_err() {
                break;
            }
        }
    });
    receiver
}

/// All that was said; a rank that outlives its launcher may keep the stream open.
fn said(pieces: Receiver<Vec<u8>>) -> String {
    let mut bytes = Vec::new();
    while let Ok(piece) = pieces.recv_timeout(Duration::from_secs(1)) {
        bytes.extend(piece);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// How the job ended; nothing if it had to be killed.
fn wait(child: &mut Child, end: Instant) -> Option<ExitStatus> {
    while Instant::now() < end {
        if let Ok(Some(status)) = child.try_wait() {
            return Some(status);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    // launchers pass on a request to end; what does not heed it is killed
    for signal in ["-TERM", "-KILL"] {
        let _ = Command::new("kill")
            .args([signal, "--", &format!("-{}", child.id())])
            .stderr(Stdio::null())
            .status();
        std::thread::sleep(Duration::from_millis(500));
    }
    let _ = child.wait();
    None
}

fn ending(ended: &Ended) -> String {
    match ended.status {
        None => "it had to be killed".to_owned(),
        Some(status) => match (status.code(), status.signal()) {
            (Some(code), _) => format!("exit code {code}"),
            (None, signal) => format!("signal {}", signal.unwrap_or_default()),
        },
    }
}

/// The last line that says something: launchers frame theirs with dashes, and MPICH ends with empty ones.
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
        // what the user says comes later, and counts
        assert_eq!(words("/opt/bin/srun -K0"), ["/opt/bin/srun", "--kill-on-bad-exit=1", "-K0"]);
        assert_eq!(words(" "), ["mpiexec"]);
    }
}
