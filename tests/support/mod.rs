//! Starting jobs: the only place that knows `mpiexec`, its variables and its time limit.
#![allow(dead_code)] // every test target uses its own part of this

pub mod cases;
pub mod cuda;
pub mod data;
pub mod equivalence;

use std::ffi::OsString;
use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::panic::{self, AssertUnwindSafe};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Prints that a test is skipped, to the real stderr, which libtest does not capture.
pub fn say_skipped(why: &str) {
    let _ = writeln!(std::io::stderr(), "SKIPPED: {why}");
}

/// Returns the number of repetitions that `$PHALANX_SOAK` asks for; `None` in an ordinary run, which tests
/// a sample.
pub fn soak() -> Option<usize> {
    std::env::var("PHALANX_SOAK").ok()?.parse().ok()
}

/// Returns the processes that process `parent` has started.
pub fn children(parent: u32) -> Vec<u32> {
    let parent = format!("PPid:\t{parent}");
    let processes = std::fs::read_dir("/proc").expect("Linux has /proc");
    let numbers = processes.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let status =
        |process: &u32| std::fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    let mut found: Vec<u32> =
        numbers.filter(|process| status(process).lines().any(|line| line == parent)).collect();
    found.sort_unstable();
    found
}

/// Returns the ranks that a launcher has started, directly or through daemons: its descendants
/// without children.
pub fn rank_processes(launcher: u32) -> Vec<u32> {
    let below =
        |process: u32| if children(process).is_empty() { vec![process] } else { rank_processes(process) };
    children(launcher).into_iter().flat_map(below).collect()
}

/// Sends a signal with the shell's own `kill`; a number after a minus sign names a process group.
pub fn kill(signal: &str, process: &str) {
    let _ = Command::new("bash").args(["-c", &format!("kill -{signal} -- {process}")]).status();
}

/// Creates a temporary directory; returns it and its path.
pub fn directory() -> (tempfile::TempDir, String) {
    let directory = tempfile::tempdir().expect("a directory can be made");
    let path = directory.path().display().to_string();
    (directory, path)
}

/// A small file system that is mounted, until it is dropped.
pub struct Mounted(String);

impl Mounted {
    /// Mounts one of `kibibytes` at `path`, a directory; says that the test is skipped where that is refused.
    pub fn new(path: &str, kibibytes: usize) -> Option<Mounted> {
        let size = format!("size={kibibytes}k");
        let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", &size, "tmpfs", path]).output();
        if mounted.is_ok_and(|output| output.status.success()) {
            return Some(Mounted(path.to_owned()));
        }
        say_skipped("no disk can be full: only root can mount a small file system here");
        None
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").args(["-l", &self.0]).status();
    }
}

/// Returns the path of a program.
pub fn program(name: &str) -> &'static str {
    match name {
        "sync_sgd" => env!("CARGO_BIN_EXE_sync_sgd"),
        "tensor_mlp" => env!("CARGO_BIN_EXE_tensor_mlp"),
        "pipeline" => env!("CARGO_BIN_EXE_pipeline"),
        "hybrid" => env!("CARGO_BIN_EXE_hybrid"),
        "pi" => env!("CARGO_BIN_EXE_pi"),
        "ping" => env!("CARGO_BIN_EXE_ping"),
        "collectives" => env!("CARGO_BIN_EXE_collectives"),
        "predict" => env!("CARGO_BIN_EXE_predict"),
        "generate" => env!("CARGO_BIN_EXE_generate"),
        other => panic!("there is no program {other}"),
    }
}

/// Blocks until `condition` is true; fails after a minute.
pub fn until(mut condition: impl FnMut() -> bool) {
    for _ in 0..60_000 {
        if condition() {
            return;
        }
        thread::sleep(Duration::from_millis(1));
    }
    panic!("it did not come to that");
}

/// Returns a library search path that begins with `directory`.
pub fn library_path(directory: &str) -> String {
    let others = std::env::var("LD_LIBRARY_PATH").map(|others| format!(":{others}")).unwrap_or_default();
    format!("{directory}{others}")
}

/// The number of jobs of this target that run.
static RUNNING: Mutex<usize> = Mutex::new(0);

/// Notified when a job ends.
static ENDED: Condvar = Condvar::new();

/// Returns the number of jobs that may run at a time: one for each core, because most wait for most of their
/// time, but few, because they may share a GPU.
pub fn most_jobs() -> usize {
    thread::available_parallelism().map_or(1, usize::from).min(4)
}

/// The permission to run a job, or a job alone.
struct Turn(usize);

impl Turn {
    fn take(is_alone: bool) -> Turn {
        let share = if is_alone { most_jobs() } else { 1 };
        let mut running = running();
        while *running + share > most_jobs() {
            running = ENDED.wait(running).unwrap_or_else(|poisoned| poisoned.into_inner());
        }
        *running += share;
        Turn(share)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        *running() -= self.0;
        ENDED.notify_all();
    }
}

fn running() -> MutexGuard<'static, usize> {
    RUNNING.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Lets a job end in order although its launcher has not confirmed the `MPI_Finalize` of a rank.
const MAY_EXIT_UNCONFIRMED: &str = "OMPI_MCA_orte_allowed_exit_without_sync";

/// Variables that allow more ranks than cores, let waiting ranks yield, pin no rank, and bear with a launcher
/// that is busy.
pub const SETTINGS: [(&str, &str); 9] = [
    ("OMPI_MCA_rmaps_base_oversubscribe", "1"),
    ("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe"),
    ("OMPI_MCA_mpi_yield_when_idle", "1"),
    ("OMPI_MCA_hwloc_base_binding_policy", "none"),
    ("PRTE_MCA_hwloc_default_binding_policy", "none"),
    // the ranks of tests share a node; looking for the fabrics of a cluster takes Open MPI 0.2 s a job
    ("OMPI_MCA_pml", "ob1"),
    // a rank waits two seconds for its launcher to confirm `MPI_Finalize`; a launcher that gets no core for
    // so long would say that the rank never called it, and fail the job (open-mpi/ompi#13344)
    (MAY_EXIT_UNCONFIRMED, "1"),
    // allow root, as which containers run tests
    ("OMPI_ALLOW_RUN_AS_ROOT", "1"),
    ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"),
];

/// A job to be started.
pub struct Job {
    /// Numbers of ranks with a program and its arguments; several entries start as one job.
    parts: Vec<(usize, PathBuf, Vec<OsString>)>,
    variables: Vec<(String, Box<dyn Fn() -> String>)>,
    directory: Option<PathBuf>,
    limit: Duration,
}

/// The outcome of a job.
pub struct Done {
    /// The exit code; `None` if a signal ended the job.
    pub code: Option<i32>,
    /// All output on stdout.
    pub stdout: String,
    /// All output on stderr.
    pub stderr: String,
    /// The duration of the job.
    pub elapsed: Duration,
    command: String,
}

/// Runs the command `$0 "$@"` without the files that the test has open. HDF5 lets a new process inherit
/// them, and with them their locks, for as long as that process runs: a job that one test starts while
/// another writes a file would keep that file locked.
const WITHOUT_FILES: &str = r#"
for file in /proc/self/fd/*; do
  number=${file##*/}
  (( number > 2 )) && eval "exec $number>&-"
done
exec "$0" "$@""#;

/// Returns a job of `ranks` ranks of `program` under `mpiexec`; `$MPIEXEC` names another launcher.
pub fn mpiexec(ranks: usize, program: impl Into<PathBuf>) -> Job {
    let parts = vec![(ranks, program.into(), Vec::new())];
    Job { parts, variables: Vec::new(), directory: None, limit: Duration::from_secs(120) }
}

impl Job {
    /// Adds arguments for the ranks added last.
    pub fn args<A: Into<OsString>>(mut self, arguments: impl IntoIterator<Item = A>) -> Job {
        let (_, _, all) = self.parts.last_mut().expect("a job has a program");
        all.extend(arguments.into_iter().map(Into::into));
        self
    }

    /// Adds `ranks` more ranks, of `program`; later arguments are for them.
    pub fn and(mut self, ranks: usize, program: impl Into<PathBuf>) -> Job {
        self.parts.push((ranks, program.into(), Vec::new()));
        self
    }

    /// Adds an environment variable, whose value is computed when the job starts.
    pub fn env(mut self, name: &str, value: impl Fn() -> String + 'static) -> Job {
        self.variables.push((name.into(), Box::new(value)));
        self
    }

    /// Makes Open MPI's launcher kill the other ranks as soon as one has failed, and not two seconds
    /// later: for errors on which all ranks agree, and which have been printed by then.
    pub fn without_grace(self) -> Job {
        self.env("OMPI_MCA_odls_base_sigkill_timeout", || "0".into())
    }

    /// Makes Open MPI's launcher fail the job unless every rank calls `MPI_Finalize`.
    pub fn must_finalize(self) -> Job {
        self.env(MAY_EXIT_UNCONFIRMED, || "0".into())
    }

    /// Makes the job search `directory` first for libraries.
    pub fn libraries(self, directory: Option<&'static str>) -> Job {
        match directory {
            None => self,
            Some(directory) => self.env("LD_LIBRARY_PATH", move || library_path(directory)),
        }
    }

    /// Sets the job's working directory.
    pub fn directory(self, directory: impl Into<PathBuf>) -> Job {
        Job { directory: Some(directory.into()), ..self }
    }

    /// Sets the time after which the job is killed and the test fails.
    pub fn limit(mut self, limit: Duration) -> Job {
        self.limit = limit;
        self
    }

    fn command(&self) -> Command {
        let launcher = std::env::var_os("MPIEXEC").unwrap_or_else(|| "mpiexec".into());
        let mut command = Command::new("bash");
        command.args(["-c", WITHOUT_FILES]).arg(launcher);
        for (at, (ranks, program, arguments)) in self.parts.iter().enumerate() {
            if at > 0 {
                command.arg(":");
            }
            command.arg("-n").arg(ranks.to_string()).arg(program).args(arguments);
        }
        if let Some(directory) = &self.directory {
            command.current_dir(directory);
        }
        command.envs(SETTINGS);
        command.env_remove("RUST_LOG").env_remove("RUST_BACKTRACE");
        command.envs(self.variables.iter().map(|(name, value)| (name, value())));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // a process group of its own, so that the whole job can be killed
        command.process_group(0);
        command
    }

    /// Runs the job to its end.
    pub fn run(self) -> Done {
        self.start(Turn::take(false), |_| {})
    }

    /// Runs the job alone, and calls `meanwhile` with its launcher's process number once it has started.
    pub fn run_with(self, meanwhile: impl FnOnce(u32)) -> Done {
        self.start(Turn::take(true), meanwhile)
    }

    fn start(self, _turn: Turn, meanwhile: impl FnOnce(u32)) -> Done {
        let mut command = self.command();
        // after `-c` and its text
        let words = command.get_args().skip(2);
        let text = words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ");
        let start = Instant::now();
        let mut child = command.spawn().unwrap_or_else(|error| panic!("starting {text}: {error}"));
        let streams = [collect(child.stdout.take()), collect(child.stderr.take())];
        let id = child.id();
        let met = panic::catch_unwind(AssertUnwindSafe(|| meanwhile(id)));
        let code = match &met {
            Ok(()) => wait(&mut child, start, self.limit),
            Err(_) => end(&mut child),
        };
        let [stdout, stderr] = streams.map(|stream| stream.join().expect("reading a pipe does not panic"));
        let done = Done { code: code.flatten(), stdout, stderr, elapsed: start.elapsed(), command: text };
        if let Err(panic) = met {
            eprintln!("{}", done.describe());
            panic::resume_unwind(panic);
        }
        assert!(code.is_some(), "the job ran past its limit of {:?}\n{}", self.limit, done.describe());
        done
    }
}

fn collect(stream: Option<impl Read + Send + 'static>) -> JoinHandle<String> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut stream) = stream {
            let _ = stream.read_to_end(&mut bytes);
        }
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

/// Returns the exit code, or `None` if the job had to be killed.
fn wait(child: &mut Child, start: Instant, limit: Duration) -> Option<Option<i32>> {
    loop {
        if let Ok(Some(status)) = child.try_wait() {
            return Some(status.code());
        }
        if start.elapsed() > limit {
            return end(child);
        }
        thread::sleep(Duration::from_millis(5));
    }
}

/// Kills a launcher, which may still clean up first, with its group and its ranks, which may be in groups of
/// their own.
fn end(child: &mut Child) -> Option<Option<i32>> {
    let (group, ranks) = (format!("-{}", child.id()), rank_processes(child.id()));
    kill("TERM", &group);
    thread::sleep(Duration::from_millis(500));
    kill("KILL", &group);
    ranks.iter().for_each(|rank| kill("KILL", &rank.to_string()));
    let _ = child.wait();
    None
}

impl Done {
    /// Returns the command, its outcome and both streams as text.
    pub fn describe(&self) -> String {
        let Done { code, stdout, stderr, elapsed, command } = self;
        format!("$ {command}\nexit {code:?} after {elapsed:.1?}\n--- stdout\n{stdout}\n--- stderr\n{stderr}")
    }

    /// Fails unless the exit code is `code`.
    #[track_caller]
    pub fn expect(self, code: i32) -> Done {
        assert_eq!(self.code, Some(code), "{}", self.describe());
        self
    }

    /// Returns the digest of the parameters in the result line.
    #[track_caller]
    pub fn digest(&self) -> String {
        self.result()["parameters_digest"].as_str().expect("a digest is a string").to_owned()
    }

    /// Parses the last line on stdout as JSON.
    #[track_caller]
    pub fn result(&self) -> serde_json::Value {
        let line = self.stdout.trim_end().lines().last().unwrap_or_default();
        serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}\n{}", self.describe()))
    }

    /// Fails unless stderr contains `text` exactly once.
    #[track_caller]
    pub fn says_once(&self, text: &str) -> &Done {
        let times = self.stderr.matches(text).count();
        assert_eq!(times, 1, "{text:?} is said {times} times\n{}", self.describe());
        self
    }
}
