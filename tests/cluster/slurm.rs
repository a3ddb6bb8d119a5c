//! A Slurm cluster, its jobs, and the expected end of a job.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::support::{mpiexec, say_skipped};

const PROGRAMS: &str = env!("CARGO_BIN_EXE_sync_sgd");
const TRAINING: &str = "--model mlp --hidden 32 --batch-size 32 --eval-every 0 --log-every 1000";

/// The least time of a step while a job is held, in milliseconds.
const PACE: u64 = 100;

/// A script in the place of `sync_sgd`, which adds the arguments that the test has written to a
/// file.
const HELD: &str = "#!/bin/sh\nexec \"$REAL\" \"$@\" $(cat \"$PACE\" 2>/dev/null)\n";

/// Starts that were lost in `MPI_Init`.
pub static LOST: AtomicUsize = AtomicUsize::new(0);

/// A Slurm cluster on this machine.
pub struct Cluster {
    pub script: PathBuf,
    variables: Vec<(String, String)>,
    folder: tempfile::TempDir,
}

impl Cluster {
    /// Starts the cluster in a mode of the script.
    pub fn up(mode: &str) -> Option<Cluster> {
        let Some(script) = std::env::var_os("PHALANX_SLURM_UP").map(PathBuf::from) else {
            say_skipped("there is no Slurm cluster: $PHALANX_SLURM_UP names no script that brings one up");
            return None;
        };
        let output =
            Command::new(&script).env("SLURM_CI_MODE", mode).output().expect("the script can be started");
        let said =
            String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        let cannot = said.contains("no bridge support");
        assert!(cannot || output.status.success(), "{said}");
        if cannot || !said.contains(&format!("mode {mode}")) {
            say_skipped(&format!("no Slurm cluster in mode {mode} on this machine: {said}"));
            return None;
        }
        let folder = std::env::var("SLURM_CI_DIR").unwrap_or_else(|_| "/tmp/slurm-ci".into());
        let text = fs::read_to_string(format!("{folder}/env.sh"));
        let text = text.expect("the script writes how to reach the cluster");
        let exports = text.lines().filter_map(|line| line.strip_prefix("export ")?.split_once('='));
        let variables = exports.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
        Some(Cluster { script, variables, folder: tempfile::tempdir().expect("a directory can be made") })
    }

    pub fn run(&self, words: &[&str]) -> String {
        let output = self.command(words).output().unwrap_or_else(|error| panic!("{words:?}: {error}"));
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{words:?}: {said}{}", String::from_utf8_lossy(&output.stderr));
        said
    }

    pub fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).current_dir(env!("CARGO_MANIFEST_DIR")).env_remove("RUST_LOG");
        command.envs(self.variables.iter().map(|(name, value)| (name, value)));
        command
    }

    /// Submits a template, with more options for `sbatch` and arguments for the program.
    pub fn submit(
        &self,
        name: &str,
        launch: &str,
        template: &str,
        options: &str,
        arguments: &str,
    ) -> Job<'_> {
        let mut job = Job {
            cluster: self,
            submission: [name, launch, template, options, arguments].map(str::to_owned),
            id: String::new(),
            log: self.path(name, "log"),
            checkpoints: self.path(name, "checkpoints"),
        };
        job.id = self.sbatch(&job);
        job
    }

    pub fn sbatch(&self, job: &Job<'_>) -> String {
        let [name, launch, template, options, arguments] = &job.submission;
        let mut words =
            vec!["sbatch".to_owned(), "--parsable".into(), format!("--output={}", job.log.display())];
        // core dumps of a crashed launcher stay out of the checkout
        words.push(format!("--chdir={}", self.folder.path().display()));
        words.extend(options.split_whitespace().map(str::to_owned));
        words.push(format!("slurm/{template}.sbatch"));
        words.extend(arguments.split_whitespace().map(str::to_owned));
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let output = self
            .command(&words)
            .env("LAUNCH", launch)
            .env("PROGRAMS", self.programs())
            .env("REAL", PROGRAMS)
            .env("PACE", self.path(name, "pace"))
            .env("CHECKPOINTS", &job.checkpoints)
            .output()
            .expect("sbatch can be started");
        assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    }

    pub fn path(&self, name: &str, what: &str) -> PathBuf {
        self.folder.path().join(format!("{name}.{what}"))
    }

    /// Returns a folder with all programs, with [`HELD`] in the place of `sync_sgd`.
    pub fn programs(&self) -> PathBuf {
        let folder = self.path("all", "programs");
        if fs::create_dir(&folder).is_ok() {
            let built = Path::new(PROGRAMS).parent().expect("a program is in a folder");
            for name in ["pi", "ping", "collectives", "probe", "tensor_mlp", "pipeline", "hybrid"] {
                std::os::unix::fs::symlink(built.join(name), folder.join(name)).expect("a link can be made");
            }
            let held = folder.join("sync_sgd");
            fs::write(&held, HELD).expect("a script can be written");
            fs::set_permissions(&held, PermissionsExt::from_mode(0o755)).expect("a mode can be set");
        }
        folder
    }

    /// Submits `training` under `name`, to run at full speed.
    pub fn train(&self, name: &str, launch: &str, options: &str, training: &Training) -> Job<'_> {
        self.submit(name, launch, "sync_sgd", options, &training.arguments())
    }

    /// Submits `training` under `name`, to run at [`PACE`] until [`Job::let_go`].
    pub fn hold(&self, name: &str, launch: &str, options: &str, training: &Training) -> Job<'_> {
        fs::write(self.path(name, "pace"), format!("--pace {PACE}ms")).expect("a file can be written");
        self.train(name, launch, options, training)
    }
}

/// A job that was submitted.
pub struct Job<'a> {
    pub cluster: &'a Cluster,
    /// Name, launcher, template, options and arguments.
    submission: [String; 5],
    pub id: String,
    log: PathBuf,
    pub checkpoints: PathBuf,
}

impl Job<'_> {
    pub fn said(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    #[track_caller]
    pub fn until(&self, what: &str, condition: impl Fn() -> bool) {
        let start = Instant::now();
        while !condition() {
            assert!(
                start.elapsed() < LIMIT,
                "job {} never: {what}\n{}\n{}",
                self.id,
                self.state(),
                self.said()
            );
            assert!(!self.has_failed(), "{what}: {}\n{}", self.state(), self.said());
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    pub fn state(&self) -> String {
        self.cluster.run(&["scontrol", "show", "job", &self.id])
    }

    pub fn has_failed(&self) -> bool {
        let state = self.state();
        // a job on a node that was lost starts again
        let ends = ["FAILED", "TIMEOUT", "CANCELLED", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"];
        ends.iter().any(|over| state.contains(&format!("JobState={over}")))
    }

    pub fn is_done(&self) -> bool {
        self.state().contains("JobState=COMPLETED")
    }

    /// Lets the job run at full speed from its next start on.
    pub fn let_go(&self) {
        fs::remove_file(self.cluster.path(&self.submission[0], "pace")).expect("the job has been held");
    }

    /// Blocks until there is a checkpoint of this step or a later one.
    pub fn reach(&self, step: u64) -> &Self {
        self.until(&format!("step {step}"), || {
            let found = phalanx::checkpoint::list(&self.checkpoints).unwrap_or_default();
            found.last().is_some_and(|(newest, _)| *newest >= step)
        });
        self
    }

    /// Blocks until a job that starts once has ended, which must be a success, and returns its log.
    /// If the start is lost, the job is submitted again.
    #[track_caller]
    pub fn end(&mut self) -> String {
        for _ in 0..3 {
            let start = Instant::now();
            while !self.is_done() && !self.has_failed() {
                assert!(start.elapsed() < LIMIT, "job {} does not end\n{}", self.id, self.said());
                std::thread::sleep(Duration::from_millis(200));
            }
            let said = self.said();
            let is_lost = was_lost(&said);
            if self.is_done() && !is_lost {
                return said;
            }
            assert!(is_lost, "{}\n{said}", self.state());
            LOST.fetch_add(1, Ordering::Relaxed);
            // logs are appended to
            let _ = fs::remove_file(&self.log);
            self.id = self.cluster.sbatch(self);
        }
        panic!("three starts were lost\n{}", self.said());
    }

    /// Blocks until a job that trains has ended, which must be a success with this digest, after
    /// `num_starts` or more starts that were not lost.
    #[track_caller]
    pub fn end_with(&self, num_starts: usize, expected: &str) {
        self.until("the end", || self.is_done());
        let said = self.said();
        let mut starts: Vec<&str> = said.split(", start ").skip(1).collect();
        starts.retain(|start| !was_lost(start));
        LOST.fetch_add(said.matches(", start ").count() - starts.len(), Ordering::Relaxed);
        assert!(starts.len() >= num_starts, "{said}");
        assert!(num_starts < 2 || said.contains("resuming after step"), "{said}");
        assert!(said.contains(expected), "{expected} is not in\n{said}");
    }
}

/// The time after which a job has failed; the machine may be busy.
const LIMIT: Duration = Duration::from_secs(400);

/// Returns true if `said`, the log of one start, shows that a rank died in `MPI_Init`: a crash
/// where a message meets a transport that is not set up, before any output of the program.
pub fn was_lost(said: &str) -> bool {
    let crashed = ["Signal: Segmentation fault", "Segmentation fault", "signal 11"]
        .iter()
        .any(|text| said.contains(text));
    crashed && !said.contains("samples to train") && !said.contains("ranks on ")
}

/// A run of a number of steps, and the digest of the undisturbed run.
pub struct Training {
    pub num_steps: u64,
    pub digest: String,
}

impl Training {
    /// Returns a run on `ranks` ranks that lasts at least `seconds` while it is held.
    pub fn of(ranks: usize, seconds: u64) -> Training {
        let num_steps = seconds * 1000 / PACE;
        let job = mpiexec(ranks, PROGRAMS).args(["--threads", "1"]).args(TRAINING.split_whitespace());
        let job = job.args([format!("--steps={num_steps}")]);
        Training { num_steps, digest: job.limit(LIMIT).run().expect(0).digest() }
    }

    pub fn arguments(&self) -> String {
        format!("{TRAINING} --checkpoint-every 20 --steps {}", self.num_steps)
    }
}

/// A busy loop on every core, at normal priority.
pub struct Load(Vec<Child>);

impl Load {
    pub fn start() -> Load {
        let num_cores = std::thread::available_parallelism().map_or(1, usize::from);
        let spin = || {
            Command::new("sh").args(["-c", "while :; do :; done"]).spawn().expect("a shell can be started")
        };
        Load((0..num_cores).map(|_| spin()).collect())
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        for process in &mut self.0 {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}
