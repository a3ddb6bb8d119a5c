//! The templates on a real Slurm cluster: warnings, signals, preemption, lost nodes. Every job ends with the digest of a run that
//! nothing disturbed.
//!
//! `$PHALANX_SLURM_UP` names a script that brings a cluster of four nodes up on this machine, writes the variables that reach it
//! to /tmp/slurm-ci/env.sh, and takes nodes down with `--kill-node`. Without it the tests are skipped, aloud.
//!
//! Nothing is disturbed by a clock: a job that is to be disturbed keeps a pace (`--pace`) as long as the test holds it, which makes
//! its first start longer than the disturbance takes, however slow or fast the machine is; what follows runs freely.
//!
//! A start may be lost in `MPI_Init` (`slurm/README.md` says how). The templates of training programs take that as a lost rank and
//! start again; other templates are submitted again here. Both are counted, and said at the end.

mod support;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use support::{mpiexec, say_skipped};

const PROGRAMS: &str = env!("CARGO_BIN_EXE_sync_sgd");
const TRAINING: &str = "--eval-every 0 --checkpoint-every 50 --log-every 1000";

/// The least time of a step while a job is held, in milliseconds.
const PACE: u64 = 50;

/// Stands for `sync_sgd`: the program, and what the test wants it to be given besides.
const HELD: &str = "#!/bin/sh\nexec \"$REAL\" \"$@\" $(cat \"$PACE\" 2>/dev/null)\n";

/// Starts that were lost in `MPI_Init`.
static LOST: AtomicUsize = AtomicUsize::new(0);

/// A Slurm cluster on this machine.
struct Cluster {
    script: PathBuf,
    variables: Vec<(String, String)>,
    folder: tempfile::TempDir,
}

impl Cluster {
    /// Brings it up in this mode: see the script.
    fn up(mode: &str) -> Option<Cluster> {
        let Some(script) = std::env::var_os("PHALANX_SLURM_UP").map(PathBuf::from) else {
            say_skipped("there is no Slurm cluster: $PHALANX_SLURM_UP names no script that brings one up");
            return None;
        };
        let output = Command::new(&script).env("SLURM_CI_MODE", mode).output().expect("the script can be started");
        let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        let cannot = said.contains("no bridge support");
        assert!(cannot || output.status.success(), "{said}");
        if cannot || !said.contains(&format!("mode {mode}")) {
            say_skipped(&format!("no Slurm cluster in mode {mode} on this machine: {said}"));
            return None;
        }
        let text = fs::read_to_string("/tmp/slurm-ci/env.sh").expect("the script writes how to reach the cluster");
        let exports = text.lines().filter_map(|line| line.strip_prefix("export ")?.split_once('='));
        let variables = exports.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
        Some(Cluster { script, variables, folder: tempfile::tempdir().expect("a directory can be made") })
    }

    fn run(&self, words: &[&str]) -> String {
        let output = self.command(words).output().unwrap_or_else(|error| panic!("{words:?}: {error}"));
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{words:?}: {said}{}", String::from_utf8_lossy(&output.stderr));
        said
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).current_dir(env!("CARGO_MANIFEST_DIR")).env_remove("RUST_LOG");
        command.envs(self.variables.iter().map(|(name, value)| (name, value)));
        command
    }

    /// Submits a template, with more options for `sbatch` and arguments for the program.
    fn submit(&self, name: &str, launch: &str, template: &str, options: &str, arguments: &str) -> Job<'_> {
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

    fn sbatch(&self, job: &Job<'_>) -> String {
        let [name, launch, template, options, arguments] = &job.submission;
        let mut words = vec!["sbatch".to_owned(), "--parsable".into(), format!("--output={}", job.log.display())];
        // what a launcher that crashes leaves behind does not belong into the checkout
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

    fn path(&self, name: &str, what: &str) -> PathBuf {
        self.folder.path().join(format!("{name}.{what}"))
    }

    /// A folder with all programs, and [`HELD`] in the place of `sync_sgd`.
    fn programs(&self) -> PathBuf {
        let folder = self.path("all", "programs");
        if fs::create_dir(&folder).is_ok() {
            let built = Path::new(PROGRAMS).parent().expect("a program is in a folder");
            for name in ["pi", "ping", "collectives", "probe", "tensor_mlp", "pipeline"] {
                std::os::unix::fs::symlink(built.join(name), folder.join(name)).expect("a link can be made");
            }
            let held = folder.join("sync_sgd");
            fs::write(&held, HELD).expect("a script can be written");
            fs::set_permissions(&held, PermissionsExt::from_mode(0o755)).expect("a mode can be set");
        }
        folder
    }

    /// Submits `training` under `name`, to go on at its own speed.
    fn train(&self, name: &str, launch: &str, options: &str, training: &Training) -> Job<'_> {
        self.submit(name, launch, "sync_sgd", options, &training.arguments())
    }

    /// The same at the pace of [`PACE`], until [`Job::let_go`].
    fn hold(&self, name: &str, launch: &str, options: &str, training: &Training) -> Job<'_> {
        fs::write(self.path(name, "pace"), format!("--pace {PACE}ms")).expect("a file can be written");
        self.train(name, launch, options, training)
    }
}

/// A job that was submitted.
struct Job<'a> {
    cluster: &'a Cluster,
    /// Name, launcher, template, options and arguments.
    submission: [String; 5],
    id: String,
    log: PathBuf,
    checkpoints: PathBuf,
}

impl Job<'_> {
    fn said(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    #[track_caller]
    fn until(&self, what: &str, condition: impl Fn() -> bool) {
        let start = Instant::now();
        while !condition() {
            assert!(start.elapsed() < LIMIT, "job {} never: {what}\n{}\n{}", self.id, self.state(), self.said());
            assert!(!self.has_failed(), "{what}: {}\n{}", self.state(), self.said());
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    fn state(&self) -> String {
        self.cluster.run(&["scontrol", "show", "job", &self.id])
    }

    fn has_failed(&self) -> bool {
        let state = self.state();
        ["FAILED", "TIMEOUT", "CANCELLED"].iter().any(|over| state.contains(&format!("JobState={over}")))
    }

    fn is_done(&self) -> bool {
        self.state().contains("JobState=COMPLETED")
    }

    /// From its next start on, the job goes on at its own speed.
    fn let_go(&self) {
        fs::remove_file(self.cluster.path(&self.submission[0], "pace")).expect("the job has been held");
    }

    /// Waits for the checkpoint after so many steps.
    fn reach(&self, step: u64) -> &Self {
        self.until(&format!("step {step}"), || {
            let found = phalanx::checkpoint::list(&self.checkpoints).unwrap_or_default();
            found.last().is_some_and(|(newest, _)| *newest >= step)
        });
        self
    }

    /// Waits for the end of a job that starts once, which must be a good one, and returns what was said. If the start is lost, the
    /// job is submitted again.
    #[track_caller]
    fn end(&mut self) -> String {
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
            // the logs are appended to
            let _ = fs::remove_file(&self.log);
            self.id = self.cluster.sbatch(self);
        }
        panic!("three starts were lost\n{}", self.said());
    }

    /// Waits for the end of a job that trains, which must be a good one, with this digest, after `num_starts` that were not lost, and
    /// no more.
    #[track_caller]
    fn end_with(&self, num_starts: usize, expected: &str) {
        self.until("the end", || self.is_done());
        let said = self.said();
        let mut starts: Vec<&str> = said.split(", start ").skip(1).collect();
        starts.retain(|start| !was_lost(start));
        LOST.fetch_add(said.matches(", start ").count() - starts.len(), Ordering::Relaxed);
        assert!(starts.len() >= num_starts, "{said}");
        assert!(num_starts < 2 || said.contains("going on after step"), "{said}");
        assert!(said.contains(expected), "{expected} is not in\n{said}");
    }
}

/// How long a job may take for anything: there may be much else on the machine.
const LIMIT: Duration = Duration::from_secs(400);

/// True if this is what a start says of which a rank died in `MPI_Init`: the report of a crash, from where a message meets a transport
/// that has not been set up, before the program has said anything.
fn was_lost(said: &str) -> bool {
    let crashed =
        ["Signal: Segmentation fault", "Segmentation fault", "signal 11"].iter().any(|text| said.contains(text));
    crashed && !said.contains("samples to train") && !said.contains("ranks on ")
}

/// A run of so many steps, and what it ends with if nothing disturbs it.
struct Training {
    num_steps: u64,
    digest: String,
}

impl Training {
    /// One on `ranks` ranks that lasts at least so long while it is held.
    fn of(ranks: usize, seconds: u64) -> Training {
        let num_steps = seconds * 1000 / PACE;
        let job = mpiexec(ranks, PROGRAMS).args(["--threads", "1", "--eval-every", "0", "--log-every", "0"]);
        let digest = job.args([format!("--steps={num_steps}")]).limit(LIMIT).run().expect(0).digest();
        Training { num_steps, digest }
    }

    fn arguments(&self) -> String {
        format!("{TRAINING} --steps {}", self.num_steps)
    }
}

#[test]
fn jobs_survive_everything_that_slurm_does_to_them() {
    let Some(cluster) = Cluster::up("uts") else { return };
    let training = Training::of(4, 150);
    // Slurm looks at the time twice a minute, so this one goes on beside the others: it is over after 60 to 90 s. The warning comes
    // up to 30 s early; it would be lost if that were before the script has begun
    let timed = cluster.hold("timed", "srun", "--time=1 --signal=B:USR1@25", &training);
    every_template_runs(&cluster);
    signals(&cluster, &training);
    timed.until("the end of the time", || timed.said().contains("ended with code 75"));
    timed.let_go();
    timed.end_with(2, &training.digest);
    preemption(&cluster, &training);
    lost_node(&cluster, &training);
    drop(cluster);
    two_incarnations();
    let lost = LOST.load(Ordering::Relaxed);
    println!("{lost} starts were lost in MPI_Init");
}

fn every_template_runs(cluster: &Cluster) {
    let short = "--steps 20 --data synthetic --synthetic-samples 2000 --model mlp";
    let jobs = [
        cluster.submit("tensor", "srun", "tensor_mlp", "", short),
        cluster.submit("tensor2", "mpiexec", "tensor_mlp", "", short),
        cluster.submit("stage", "srun", "pipeline", "", &format!("{short} --hidden 64,64,64")),
        cluster.submit("stage2", "mpiexec", "pipeline", "", &format!("{short} --hidden 64,64,64")),
    ];
    for job in &jobs {
        job.end_with(1, "\"steps\":20");
    }
    let mut pi = cluster.submit("pi", "srun", "pi", "", "--terms 1000000");
    let mut ping = cluster.submit("ping", "mpiexec", "ping", "", "--largest 4096 --repeats 5");
    let mut measured = cluster.submit("collectives", "srun", "collectives", "", "--to 64 --seconds 0.01 --json");
    let mut probed = cluster.submit("probe", "srun", "probe", "", "--quick");
    assert!(measured.end().contains("\"ranks\":4,"), "{}", measured.said());
    let said = probed.end();
    // a trial may be lost too: it is a start
    let dead = said.lines().filter(|line| line.contains("DIES") && !line.contains("signal")).count();
    assert!(said.contains("2 ranks on ") && dead == 0, "{said}");
    assert!(pi.end().contains("on 4 ranks"), "{}", pi.said());
    assert!(ping.end().contains("the token came back"), "{}", ping.said());
    let scaling = cluster.submit("scaling-%a", "srun", "scaling", "", &format!("--batch-per-rank 8 {short}"));
    scaling.until("the end of the array", || {
        let states = scaling.state();
        states.matches("JobState=COMPLETED").count() == 4
    });
    for (task, ranks) in [1, 2, 4, 8].into_iter().enumerate() {
        let log = cluster.path(&format!("scaling-{task}"), "log");
        let said = fs::read_to_string(&log).expect("every task of an array has a log");
        assert!(said.contains(&format!("\"ranks\":{ranks},")), "{said}");
        assert!(said.contains(&format!("20 steps of {} samples", 8 * ranks)), "{said}");
    }
}

/// Slurm's warning, sent by hand, and a signal to the ranks alone.
fn signals(cluster: &Cluster, training: &Training) {
    let hold = |name: &str, launch: &str| cluster.hold(name, launch, "", training);
    let sent: [(Job<'_>, &[&str]); 4] = [
        (hold("warned", "srun"), &["--batch", "--signal=USR1"]),
        (hold("warned2", "mpiexec"), &["--batch", "--signal=USR1"]),
        (hold("usr1", "srun"), &["--signal=USR1"]),
        (hold("term", "srun"), &["--signal=TERM"]),
    ];
    for (job, signal) in &sent {
        let words = [&["scancel"], *signal, &[job.reach(50).id.as_str()]].concat();
        cluster.run(&words);
        job.let_go();
    }
    for (job, _) in &sent {
        job.end_with(2, &training.digest);
    }
}

/// A job of a higher partition needs the nodes.
fn preemption(cluster: &Cluster, training: &Training) {
    let low = "--partition=low";
    let jobs = [cluster.hold("low", "srun", low, training), cluster.hold("low2", "mpiexec", low, training)];
    jobs.iter().for_each(|job| {
        job.reach(100);
        job.let_go();
    });
    cluster.run(&["sbatch", "--partition=test", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=sleep 1"]);
    for job in &jobs {
        job.end_with(2, &training.digest);
    }
}

/// The power of a node fails: `mpiexec` sees it at once, and its job asks for another start; `srun` waits until Slurm sees it.
fn lost_node(cluster: &Cluster, training: &Training) {
    let on = "--nodelist=n[1-2]";
    let jobs = [cluster.hold("node", "srun", on, training), cluster.hold("node2", "mpiexec", on, training)];
    jobs.iter().for_each(|job| {
        job.reach(100);
        job.let_go();
    });
    let script = cluster.script.to_string_lossy().into_owned();
    cluster.run(&[&script, "--kill-node", "n2"]);
    jobs[1].until("the end of the launcher", || jobs[1].said().contains("sync_sgd ended with code"));
    // in half a minute Slurm would find out by itself; this is what an operator does
    cluster.run(&["scontrol", "update", "nodename=n2", "state=down", "reason=lost"]);
    for job in &jobs {
        elsewhere(job);
    }
    for job in &jobs {
        job.end_with(2, &training.digest);
        assert!(!job.state().contains("NodeList=n[1-2]"), "{}", job.state());
    }
    cluster.run(&[&script, "--start-node", "n2"]);
}

/// Lets a job that has lost a node start again on any.
fn elsewhere(job: &Job<'_>) {
    job.until("another start", || job.state().contains("JobState=PENDING"));
    job.cluster.run(&["scontrol", "update", &format!("JobId={}", job.id), "ReqNodeList="]);
}

/// A node is cut off from the network with all ranks of a job on it: they run on while the job is started elsewhere, so two
/// incarnations write one directory.
fn two_incarnations() {
    let Some(cluster) = Cluster::up("net") else { return };
    // both keep the pace, so both are at it at the same time
    let training = Training::of(2, 80);
    let job = cluster.hold("cut", "srun", "--nodes=1 --nodelist=n1", &training);
    job.reach(50);
    cluster.run(&["ip", "link", "set", "sci1", "down"]);
    cluster.run(&["scontrol", "update", "nodename=n1", "state=down", "reason=cut"]);
    elsewhere(&job);
    job.until("two incarnations", || job.said().contains("going on after step"));
    // two ranks of each, and a launcher of the new one
    let directory = job.checkpoints.to_string_lossy().into_owned();
    assert!(processes_with(&directory) >= 5, "there are not two incarnations\n{}", job.said());
    job.end_with(2, &training.digest);
    job.until("the end of both", || job.said().matches(&training.digest).count() == 2);
    cluster.run(&["ip", "link", "set", "sci1", "up"]);
    let found = phalanx::checkpoint::newest_sound(&job.checkpoints).expect("the directory can be read");
    assert!(found.damaged.is_empty(), "{:?}", found.damaged);
    assert_eq!(found.checkpoint.map(|found| found.description.step), Some(training.num_steps));
}

/// How many processes have `text` in their command line.
fn processes_with(text: &str) -> usize {
    let processes = fs::read_dir("/proc").expect("Linux has /proc").flatten();
    let has_text = |path: PathBuf| {
        let line = fs::read(path.join("cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).contains(text)
    };
    processes.filter(|entry| has_text(entry.path())).count()
}

/// `$PHALANX_SLURM_STARTS` starts of a template, six at a time, on a machine whose cores are all taken: every job ends well. Those whose
/// start was lost were started again; their number is printed.
#[test]
#[ignore = "takes a quarter of an hour: make slurm-starts"]
fn jobs_start_on_a_loaded_machine() {
    let Some(cluster) = Cluster::up("uts") else { return };
    let wanted = std::env::var("PHALANX_SLURM_STARTS").ok().and_then(|text| text.parse().ok()).unwrap_or(20);
    let _load = Load::start();
    let short = "--steps 5 --data synthetic --synthetic-samples 500 --model mlp --hidden none";
    let mut running: Vec<Job<'_>> = Vec::new();
    for number in 0..wanted {
        while running.len() == 6 {
            running.retain(|job| !job.is_done());
            assert!(!running.iter().any(Job::has_failed), "{}", running.iter().map(Job::said).collect::<String>());
            std::thread::sleep(Duration::from_millis(100));
        }
        running.push(cluster.submit(&format!("start{number}"), "srun", "sync_sgd", "", short));
    }
    running.iter().for_each(|job| job.until("the end", || job.is_done()));
    let mut lost = 0;
    for number in 0..wanted {
        let said = fs::read_to_string(cluster.path(&format!("start{number}"), "log")).expect("every job has a log");
        assert!(said.contains("\"steps\":5,"), "{said}");
        lost += said.matches(", start ").count() - 1;
    }
    println!("{wanted} jobs ended well; {lost} starts were lost");
}

/// A process on every core that does nothing but run, at the priority of all others.
struct Load(Vec<Child>);

impl Load {
    fn start() -> Load {
        let num_cores = std::thread::available_parallelism().map_or(1, usize::from);
        let spin = || Command::new("sh").args(["-c", "while :; do :; done"]).spawn().expect("a shell can be started");
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
