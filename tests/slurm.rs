//! The templates on a real Slurm cluster: warnings, signals, preemption, lost nodes. Every job ends with the digest of a run that
//! nothing disturbed.
//!
//! `$PHALANX_SLURM_UP` names a script that brings a cluster of four nodes up on this machine, writes the variables that reach it
//! to /tmp/slurm-ci/env.sh, and takes nodes down with `--kill-node`. Without it the tests are skipped, aloud.

mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use support::{mpiexec, say_skipped};

const PROGRAMS: &str = env!("CARGO_BIN_EXE_sync_sgd");
const TRAINING: &str = "--eval-every 0 --checkpoint-every 100 --log-every 1000";

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
        let at = |what: &str| self.folder.path().join(format!("{name}.{what}"));
        let mut words = vec!["sbatch".to_owned(), "--parsable".into(), format!("--output={}", at("log").display())];
        // what a launcher that crashes leaves behind does not belong into the checkout
        words.push(format!("--chdir={}", self.folder.path().display()));
        words.extend(options.split_whitespace().map(str::to_owned));
        words.push(format!("slurm/{template}.sbatch"));
        words.extend(arguments.split_whitespace().map(str::to_owned));
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let programs = Path::new(PROGRAMS).parent().expect("a program is in a folder");
        let output = self
            .command(&words)
            .env("LAUNCH", launch)
            .env("PROGRAMS", programs)
            .env("CHECKPOINTS", at("checkpoints"))
            .output()
            .expect("sbatch can be started");
        assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
        let id = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        Job { cluster: self, id, log: at("log"), checkpoints: at("checkpoints") }
    }

    /// Submits `training` under `name`.
    fn train(&self, name: &str, launch: &str, options: &str, training: &Training) -> Job<'_> {
        self.submit(name, launch, "sync_sgd", options, &training.arguments())
    }
}

/// A job that was submitted.
struct Job<'a> {
    cluster: &'a Cluster,
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
            assert!(start.elapsed() < Duration::from_secs(240), "job {} never: {what}\n{}", self.id, self.said());
            let state = self.state();
            let is_over = ["JobState=FAILED", "JobState=TIMEOUT", "JobState=CANCELLED"];
            assert!(!is_over.iter().any(|over| state.contains(over)), "{what}: {state}\n{}", self.said());
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    fn state(&self) -> String {
        self.cluster.run(&["scontrol", "show", "job", &self.id])
    }

    /// Waits for the checkpoint after so many steps.
    fn reach(&self, step: u64) -> &Self {
        self.until(&format!("step {step}"), || {
            let found = phalanx::checkpoint::list(&self.checkpoints).unwrap_or_default();
            found.last().is_some_and(|(newest, _)| *newest >= step)
        });
        self
    }

    /// Waits for the end, which must be a good one after so many starts, and returns what was said.
    #[track_caller]
    fn end(&self, num_starts: usize) -> String {
        self.until("the end", || self.state().contains("JobState=COMPLETED"));
        let said = self.said();
        assert!(said.matches(", start ").count() >= num_starts, "{said}");
        assert!(num_starts < 2 || said.contains("going on after step"), "{said}");
        said
    }

    /// The same, and the digest must be `expected`.
    #[track_caller]
    fn end_with(&self, num_starts: usize, expected: &str) {
        let said = self.end(num_starts);
        assert!(said.contains(expected), "{expected} is not in\n{said}");
    }
}

/// A run of so many steps, and what it ends with if nothing disturbs it.
struct Training {
    num_steps: u64,
    digest: String,
}

impl Training {
    /// One that takes about so long on `ranks` ranks of this machine when nothing else runs, and a good many steps in any case.
    fn of(ranks: usize, seconds: f64) -> Training {
        let run = |num_steps: u64| {
            let job = mpiexec(ranks, PROGRAMS).args(["--threads", "1", "--eval-every", "0", "--log-every", "0"]);
            job.args([format!("--steps={num_steps}")]).run().expect(0)
        };
        let rate = run(300).result()["samples_per_second"].as_f64().expect("a rate is a number") / 128.0;
        let num_steps = ((seconds * rate) as u64).max(900);
        let digest = run(num_steps).digest();
        Training { num_steps, digest }
    }

    fn arguments(&self) -> String {
        format!("{TRAINING} --steps {}", self.num_steps)
    }
}

#[test]
fn jobs_survive_everything_that_slurm_does_to_them() {
    let Some(cluster) = Cluster::up("uts") else { return };
    let short = Training::of(4, 3.0);
    // Slurm looks at the time twice a minute, so this one goes on beside the others. The warning comes up to 30 s early; it would
    // be lost if that were before the script has begun
    let long = Training::of(4, 25.0);
    let timed = cluster.train("timed", "srun", "--time=1 --signal=B:USR1@25", &long);
    every_template_runs(&cluster);
    signals(&cluster, &short);
    timed.end_with(2, &long.digest);
    preemption(&cluster, &short);
    lost_node(&cluster, &short);
    drop(cluster);
    two_incarnations();
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
        assert!(job.end(1).contains("\"steps\":20"), "{}", job.said());
    }
    let pi = cluster.submit("pi", "srun", "pi", "", "--terms 1000000");
    let ping = cluster.submit("ping", "mpiexec", "ping", "", "--largest 4096 --repeats 5");
    let measured = cluster.submit("collectives", "srun", "collectives", "", "--to 64 --seconds 0.01 --json");
    let probed = cluster.submit("probe", "srun", "probe", "", "--quick");
    assert!(measured.end(0).contains("\"ranks\":4,"), "{}", measured.said());
    assert!(probed.end(0).contains("2 ranks on ") && !probed.said().contains("DIES"), "{}", probed.said());
    assert!(pi.end(0).contains("on 4 ranks"), "{}", pi.said());
    assert!(ping.end(0).contains("the token came back"), "{}", ping.said());
    let scaling = cluster.submit("scaling-%a", "srun", "scaling", "", &format!("--batch-per-rank 8 {short}"));
    scaling.until("the end of the array", || {
        let states = scaling.state();
        states.matches("JobState=COMPLETED").count() == 4
    });
    for (task, ranks) in [1, 2, 4, 8].into_iter().enumerate() {
        let log = cluster.folder.path().join(format!("scaling-{task}.log"));
        let said = fs::read_to_string(&log).expect("every task of an array has a log");
        assert!(said.contains(&format!("\"ranks\":{ranks},")), "{said}");
        assert!(said.contains(&format!("20 steps of {} samples", 8 * ranks)), "{said}");
    }
}

/// Slurm's warning, sent by hand, and a signal to the ranks alone.
fn signals(cluster: &Cluster, training: &Training) {
    let train = |name: &str, launch: &str| cluster.train(name, launch, "", training);
    let sent: [(Job<'_>, &[&str]); 4] = [
        (train("warned", "srun"), &["--batch", "--signal=USR1"]),
        (train("warned2", "mpiexec"), &["--batch", "--signal=USR1"]),
        (train("usr1", "srun"), &["--signal=USR1"]),
        (train("term", "srun"), &["--signal=TERM"]),
    ];
    for (job, signal) in &sent {
        let words = [&["scancel"], *signal, &[job.reach(100).id.as_str()]].concat();
        cluster.run(&words);
    }
    for (job, _) in &sent {
        job.end_with(2, &training.digest);
    }
}

/// A job of a higher partition needs the nodes.
fn preemption(cluster: &Cluster, training: &Training) {
    let low = "--partition=low";
    let jobs = [cluster.train("low", "srun", low, training), cluster.train("low2", "mpiexec", low, training)];
    jobs.iter().for_each(|job| {
        job.reach(200);
    });
    cluster.run(&["sbatch", "--partition=test", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=sleep 1"]);
    for job in &jobs {
        job.end_with(2, &training.digest);
    }
}

/// The power of a node fails: `mpiexec` sees it at once, and its job asks for another start; `srun` waits until Slurm sees it.
fn lost_node(cluster: &Cluster, training: &Training) {
    let jobs = [cluster.train("node", "srun", "", training), cluster.train("node2", "mpiexec", "", training)];
    jobs.iter().for_each(|job| {
        job.reach(200);
        assert!(job.state().contains("NodeList=n[1-2]"), "{}", job.state());
    });
    let script = cluster.script.to_string_lossy().into_owned();
    cluster.run(&[&script, "--kill-node", "n2"]);
    jobs[1].until("the end of the launcher", || jobs[1].said().contains("sync_sgd ended with code"));
    // in half a minute Slurm would find out by itself; this is what an operator does
    cluster.run(&["scontrol", "update", "nodename=n2", "state=down", "reason=lost"]);
    for job in &jobs {
        job.end_with(2, &training.digest);
        assert!(!job.state().contains("NodeList=n[1-2]"), "{}", job.state());
    }
    cluster.run(&[&script, "--start-node", "n2"]);
}

/// A node is cut off from the network with all ranks of a job on it: they run on while the job is started elsewhere, so two
/// incarnations write one directory.
fn two_incarnations() {
    let Some(cluster) = Cluster::up("net") else { return };
    // long enough for both to be at it at the same time
    let training = Training::of(2, 20.0);
    let job = cluster.train("cut", "srun", "--nodes=1 --nodelist=n1", &training);
    job.reach(100);
    cluster.run(&["ip", "link", "set", "sci1", "down"]);
    cluster.run(&["scontrol", "update", "nodename=n1", "state=down", "reason=cut"]);
    job.until("another start", || job.state().contains("JobState=PENDING"));
    cluster.run(&["scontrol", "update", &format!("JobId={}", job.id), "ReqNodeList="]);
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
