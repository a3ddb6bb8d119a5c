//! Runs that are stopped before their end: by a time limit, by signals, by the watchdog.

use std::fs;
use std::time::Duration;

use crate::support::{Done, Job, directory, kill, mpiexec, rank_processes, until};
use phalanx::checkpoint;

fn sync_sgd(ranks: usize, arguments: &str) -> Job {
    let job = mpiexec(ranks, env!("CARGO_BIN_EXE_sync_sgd")).args(["--threads", "1", "--eval-every", "0"]);
    job.args(arguments.split_whitespace())
}

#[test]
fn the_end_of_the_time_stops_a_run_in_good_order() {
    let (directory, path) = directory();
    let arguments = format!("--epochs 100000 --checkpoint-dir {path} --log-every 0");
    let done = sync_sgd(2, &format!("{arguments} --time-limit 1s --metrics {path}/m.jsonl")).run().expect(75);
    done.says_once("stopped after step").says_once("as asked by 1 of 2 ranks");
    let rows = fs::read_to_string(directory.path().join("m.jsonl")).expect("there are metrics");
    let files = checkpoint::list(directory.path()).expect("the directory can be read");
    let steps: Vec<u64> = files.into_iter().map(|(step, _)| step).collect();
    assert_eq!(steps, [rows.lines().count() as u64]);
    let done = sync_sgd(2, &format!("{arguments} --stop-before 2m")).run().expect(2);
    done.says_once("--stop-before: Slurm does not say how much time is left");
    let slurm = |left: u64| {
        let end = move || {
            let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
            (now.expect("it is after 1970").as_secs() + left).to_string()
        };
        sync_sgd(2, &format!("{arguments} --stop-before 2m")).env("SLURM_JOB_END_TIME", end).run()
    };
    slurm(60).expect(2).says_once("it is 2m, but Slurm leaves the job");
    slurm(126).expect(75).says_once("resuming after step");
}

#[test]
fn a_signal_before_the_first_step_stops_in_good_order_too() {
    let (directory, path) = directory();
    let arguments =
        format!("--epochs 100000 --checkpoint-dir {path} --data synthetic --synthetic-samples 400000");
    let done = sync_sgd(2, &arguments).run_with(|launcher| {
        let listens = |process: &u32| {
            // launchers have daemons that catch signals for other purposes; so does MPICH, but not
            // SIGTERM
            let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
            let is_rank = status.lines().next().is_some_and(|name| name.ends_with("sync_sgd"));
            let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
            let caught = caught.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
            is_rank && caught.is_some_and(|mask| mask & 1 << (15 - 1) != 0)
        };
        until(|| rank_processes(launcher).len() == 2 && rank_processes(launcher).iter().all(listens));
        kill("TERM", &rank_processes(launcher)[1].to_string());
    });
    done.expect(75).says_once("stopped after step 1, as asked by 1 of 2 ranks");
    assert!(directory.path().join("step-00000001.h5").exists());
}

#[test]
fn a_signal_in_an_evaluation_stops_it_and_the_next_start_repeats_it() {
    let (_directory, path) = directory();
    let metrics = format!("{path}/m.csv");
    let arguments = format!(
        "--steps 2 --eval-every 1steps --batch-size 8 --checkpoint-dir {path} --metrics {metrics} \
         --data synthetic --synthetic-samples 400000"
    );
    let stopped = sync_sgd(3, &arguments).run_with(|launcher| {
        // a row is written between a step and the evaluation that follows, of thousands of parts
        until(|| fs::read_to_string(&metrics).is_ok_and(|rows| rows.lines().count() == 2));
        kill("TERM", &rank_processes(launcher)[1].to_string());
    });
    let stopped = stopped.expect(75);
    stopped.says_once("stopped after step 1, as asked by 1 of 3 ranks");
    assert!(!stopped.stderr.contains("test: loss"), "{}", stopped.describe());
    let again = sync_sgd(3, &arguments).run().expect(0);
    again.says_once("resuming after step 1, step 1 of epoch 1");
    assert_eq!(again.stderr.matches("test: loss").count(), 2, "{}", again.describe());
}

/// Sends two signals to rank 0 in a step that ends only when `then` has let rank 1 go on.
fn signal_twice(signals: [&str; 2], then: impl FnOnce(u32)) -> Done {
    let (_directory, path) = directory();
    let metrics = format!("{path}/m.csv");
    let arguments = format!("--epochs 100000 --checkpoint-dir {path} --metrics {metrics}");
    sync_sgd(2, &arguments).run_with(|launcher| {
        until(|| fs::metadata(&metrics).is_ok_and(|file| file.len() > 1000));
        let ranks = rank_processes(launcher);
        kill("STOP", &ranks[1].to_string());
        std::thread::sleep(Duration::from_millis(200));
        kill(signals[0], &ranks[0].to_string());
        std::thread::sleep(Duration::from_millis(1300));
        kill(signals[1], &ranks[0].to_string());
        then(ranks[1]);
    })
}

#[test]
fn a_second_signal_stops_at_once() {
    let done = signal_twice(["TERM", "TERM"], |_| ());
    assert!(!matches!(done.code, Some(0 | 75)), "{}", done.describe());
    done.says_once("received SIGTERM");
}

/// At the time limit, Slurm sends SIGTERM to a job that it has warned by another signal.
#[test]
fn another_signal_is_the_same_request() {
    let done = signal_twice(["INT", "TERM"], |stopped| {
        std::thread::sleep(Duration::from_millis(200));
        kill("CONT", &stopped.to_string());
    });
    done.expect(75).says_once("received SIGINT").says_once("as asked by 1 of 2 ranks");
}

#[test]
fn a_watchdog_says_where_every_rank_stands_and_ends_the_job() {
    let (_directory, path) = directory();
    let metrics = format!("{path}/m.csv");
    let arguments = format!("--epochs 100000 --watchdog 2s --metrics {metrics} --threads 1 --model mlp");
    let job = mpiexec(3, env!("CARGO_BIN_EXE_pipeline")).args(arguments.split_whitespace());
    let done = job.run_with(|launcher| {
        until(|| fs::metadata(&metrics).is_ok_and(|file| file.len() > 1000));
        kill("STOP", &rank_processes(launcher)[1].to_string());
    });
    let done = done.expect(1);
    done.says_once("rank 0: no progress for 2s").says_once("rank 2: no progress for 2s");
    for line in done.stderr.lines().filter(|line| line.contains("no progress")) {
        // in a message from or to the stopped rank, or in a collective operation
        assert!(line.contains(": step ") && line.contains(" bytes") && line.contains(", since 20"), "{line}");
    }
}
