//! The programs as a user runs them: results, reproducibility, options, and their answers to bad
//! input.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::support::{Done, Job, data, directory, kill, mpiexec, rank_processes, say_skipped};
use serde_json::Value;

fn sync_sgd(ranks: usize, arguments: &str) -> Job {
    let job = mpiexec(ranks, env!("CARGO_BIN_EXE_sync_sgd")).args(["--threads", "1"]);
    job.args(arguments.split_whitespace())
}

fn train(ranks: usize, arguments: &str) -> Value {
    sync_sgd(ranks, arguments).run().expect(0).result()
}

/// Returns the folder of the full MNIST, if `$PHALANX_MNIST` names it or data/fetch has been run.
fn mnist() -> Option<PathBuf> {
    let fetched = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/mnist");
    let directory = std::env::var_os("PHALANX_MNIST").map_or(fetched, PathBuf::from);
    if directory.join("train-images-idx3-ubyte.gz").exists() {
        return Some(directory);
    }
    say_skipped(&format!("the full MNIST is not in {}; data/fetch mnist gets it", directory.display()));
    None
}

#[test]
fn pi_from_one_term_a_rank_and_from_a_billion() {
    let pi = |ranks, terms: &str| {
        mpiexec(ranks, env!("CARGO_BIN_EXE_pi")).args(["--terms", terms]).run().expect(0).stdout
    };
    assert!(pi(4, "ranks").starts_with("pi = 2.895238095"));
    assert!(pi(1, "ranks").starts_with("pi = 4.000000000"));
    for ranks in [1, 2, 3, 5] {
        let line = pi(ranks, "1000003");
        let value: f64 = line.split_whitespace().nth(2).unwrap().parse().unwrap();
        assert!((value - std::f64::consts::PI).abs() < 1.0000001e-6, "{line}");
    }
    let line = pi(2, "1000000000");
    let value: f64 = line.split_whitespace().nth(2).unwrap().parse().unwrap();
    // the remainder of the series: 1/N − 1/4N³ …
    let expected = std::f64::consts::PI - 1e-9;
    assert!((value - expected).abs() < 1e-14, "{line}");
}

#[test]
fn every_rank_finalizes_mpi() {
    let (_directory, path) = directory();
    let training = format!("--threads 1 --steps 1 --eval-every 0 --checkpoint-dir {path}");
    for (program, arguments) in
        [(env!("CARGO_BIN_EXE_pi"), "--terms ranks"), (env!("CARGO_BIN_EXE_sync_sgd"), &training)]
    {
        let job = || mpiexec(3, program).args(arguments.split(' ')).must_finalize();
        // several tries, because a launcher that gets no core for two seconds fails a job that is in order
        let mut tries = (0..3).map(|_| job().run());
        assert!(tries.any(|done| done.code == Some(0)), "{}", job().run().describe());
    }
}

#[test]
fn ping_sends_its_number_and_measures() {
    for ranks in [2, 3] {
        let done = mpiexec(ranks, env!("CARGO_BIN_EXE_ping"))
            .args(["--largest", "4096", "--repeats", "5"])
            .run()
            .expect(0);
        let lines: Vec<&str> = done.stdout.trim_end().lines().map(str::trim_start).collect();
        let said = [
            "blocking: rank 1 received 43523 from rank 0",
            "non-blocking: rank 1 received 43523 from rank 0",
            &format!(
                "ring: the token came back with {}, the sum of 0 to {}",
                ranks * (ranks - 1) / 2,
                ranks - 1
            ),
        ];
        assert_eq!(lines[..3], said, "{}", done.describe());
        assert!(lines[lines.len() - 1].starts_with("4096 "), "{}", done.describe());
    }
    mpiexec(1, env!("CARGO_BIN_EXE_ping")).run().expect(2).says_once("it takes two ranks");
}

#[test]
fn lenet_learns_the_digits_on_any_number_of_ranks() {
    for ranks in [1, 2, 3] {
        let result = train(ranks, "--quiet");
        assert!(result["accuracy"].as_f64().unwrap() >= 0.97, "{result}");
        assert_eq!(
            (result["program"].as_str(), result["ranks"].as_u64()),
            (Some("sync_sgd"), Some(ranks as u64))
        );
        assert_eq!((result["parameters"].as_u64(), result["steps"].as_u64()), (Some(21840), Some(710)));
        for key in ["model", "epochs", "loss", "samples_per_second", "median_step_ms", "parameters_digest"] {
            assert!(!result[key].is_null(), "{key} in {result}");
        }
    }
}

#[test]
fn lenet_learns_mnist() {
    let Some(directory) = mnist() else { return };
    // other numbers of ranks end with the same bits, see one_hash.rs
    let job = sync_sgd(2, "--quiet --epochs 10 --eval-every 0").limit(Duration::from_secs(300));
    let result = job.args([Path::new("--data"), &directory]).run().expect(0).result();
    assert!(result["accuracy"].as_f64().unwrap() >= 0.989, "{result}");
}

#[test]
fn the_same_command_gives_the_same_bits() {
    for arguments in [
        "--steps 30",
        "--steps 30 --zero 1 --bucket-mb 0.01 --micro-batches 4",
        "--model deep-mlp --data synthetic --width 64 --steps 10 --optimizer adamw",
    ] {
        for ranks in [1, 2, 3] {
            let digest = || train(ranks, &format!("--quiet {arguments}"))["parameters_digest"].clone();
            let first = digest();
            assert_eq!(first, digest(), "{arguments} on {ranks} ranks");
            assert_ne!(first, train(ranks, &format!("--quiet {arguments} --seed 2"))["parameters_digest"]);
        }
    }
}

#[test]
fn every_model_trains_on_synthetic_data() {
    for (model, accuracy) in [("mlp", true), ("lenet", true), ("cifar", true), ("deep-mlp", false)] {
        let width = if model == "deep-mlp" { "--width 32" } else { "" };
        let result = train(
            2,
            &format!("--quiet --model {model} --data synthetic {width} --synthetic-samples 500 --epochs 2"),
        );
        assert_eq!(result["accuracy"].is_number(), accuracy, "{result}");
        assert_eq!(result["steps"], 8, "500 samples in batches of 128 are four steps an epoch");
    }
    let values = train(
        3,
        "--quiet --model mlp --data synthetic --synthetic-shape 7 --synthetic-targets values:3 --hidden none",
    );
    assert!(values["accuracy"].is_null() && values["test_loss"].as_f64().unwrap() < 1.0, "{values}");
}

#[test]
fn the_teacher_can_be_learnt() {
    let result = train(
        2,
        "--quiet --model mlp --data synthetic --synthetic-shape 20 --synthetic-targets classes:4 \
         --synthetic-samples 60000 --epochs 5",
    );
    assert!(result["accuracy"].as_f64().unwrap() > 0.85, "{result}");
}

#[test]
fn metrics_have_a_row_per_step() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["metrics.csv", "metrics.jsonl"] {
        let path = folder.path().join(name);
        sync_sgd(2, "--quiet --steps 7").args([Path::new("--metrics"), &path]).run().expect(0);
        let text = fs::read_to_string(&path).unwrap();
        let lines: Vec<_> = text.lines().collect();
        if name.ends_with("csv") {
            assert_eq!(lines[0], "step,epoch,loss,accuracy,gradient_norm,learning_rate,step_ms");
            assert_eq!((lines.len(), lines[7].starts_with("7,")), (8, true));
        } else {
            let last: Value = serde_json::from_str(lines[6]).unwrap();
            assert_eq!((lines.len(), last["step"].as_u64()), (7, Some(7)));
            assert!(last["loss"].as_f64().unwrap() > 0.0 && last["gradient_norm"].as_f64().unwrap() > 0.0);
        }
    }
}

#[test]
fn log_lines_come_from_rank_0_with_level_and_step_and_no_bar() {
    let done = sync_sgd(3, "--steps 20 --log-every 10").run().expect(0);
    done.says_once("INFO  step 10: epoch");
    done.says_once("sync_sgd: ranks 3, nodes 1, threads of a rank 1;");
    assert!(!done.stderr.contains('\r') && !done.stderr.contains("left"), "{}", done.describe());
    assert_eq!(done.stdout.lines().count(), 1, "{}", done.describe());
    let quiet = sync_sgd(2, "--steps 2 --quiet").run().expect(0);
    // an MPI may print messages of its own
    assert!(!quiet.stderr.contains("INFO") && !quiet.stderr.contains("step"), "{}", quiet.describe());
}

/// Evaluations come every two steps, and the lowest of their losses is named with its step.
#[test]
fn evaluations_every_two_steps_and_the_lowest_loss() {
    // too large a rate, with which the last loss is not the lowest
    let arguments = "--steps 7 --eval-every 2steps --learning-rate 2";
    let done = mpiexec(2, env!("CARGO_BIN_EXE_sync_sgd")).args(["--threads", "1"]);
    let done = done.args(arguments.split_whitespace()).run().expect(0);
    let loss = |line: &str| -> f64 {
        let (_, rest) = line.split_once("test: loss ").expect("the line has a loss");
        rest.split_whitespace().next().and_then(|number| number.parse().ok()).expect("it is a number")
    };
    let lines = done.stderr.lines().filter(|line| line.contains("test: loss "));
    let losses: Vec<f64> = lines.map(loss).collect();
    assert_eq!(losses.len(), 4, "after steps 2, 4, 6 and 7: {}", done.describe());
    let at = (0..4).min_by(|one, other| losses[*one].total_cmp(&losses[*other])).expect("there are four");
    assert!(at < 3, "{}", done.describe());
    done.says_once(&format!("lowest test loss: {:.4} after step {}", losses[at], [2, 4, 6][at]));
}

#[test]
fn help_is_printed_once_and_explains_every_option() {
    let done = sync_sgd(2, "--help").run().expect(0);
    assert_eq!(done.stdout.matches("Usage:").count(), 1, "{}", done.describe());
    let command = <phalanx::train::TrainOptions as clap::Args>::augment_args(clap::Command::new("any"));
    for option in command.get_arguments() {
        let name = option.get_long().expect("every option has a long name");
        assert!(done.stdout.contains(&format!("--{name}")), "--{name} is not in the help");
        let help = option.get_help().map(ToString::to_string).unwrap_or_default();
        assert!(!help.is_empty(), "--{name} is not explained");
        let is_flag = !option.get_action().takes_values();
        let optional = ["steps", "metrics", "trace", "checkpoint-dir", "init", "export"].contains(&name)
            || ["time-limit", "stop-before", "pace", "watchdog", "probe"].contains(&name);
        let default = !option.get_default_values().is_empty() || help.contains("[default: ");
        assert!(is_flag || optional || default, "--{name} does not say its default");
    }
}

#[test]
fn a_reader_that_has_gone_is_no_failure() {
    let wrapped = |redirection: &str| {
        let script = format!("{} --steps 1 --quiet {redirection}", env!("CARGO_BIN_EXE_sync_sgd"));
        let mut command = Command::new("bash");
        command.args(["-c", &format!("set -o pipefail; {script}")]);
        let output = command.output().expect("bash runs");
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (code, said) = wrapped("| true");
    assert!(code == Some(0) && !said.contains("error") && !said.contains("panicked"), "{code:?} {said}");
    let (code, said) = wrapped("> /dev/full");
    assert_eq!((code, said.contains("error: writing to stdout: No space left")), (Some(1), true), "{said}");
}

#[test]
fn metrics_on_a_full_disk_warn_and_let_training_go_on() {
    let done = sync_sgd(2, "--quiet --steps 5 --metrics /dev/full").run().expect(0);
    done.says_once("WARN  step 1: writing --metrics /dev/full");
    assert_eq!(done.result()["steps"], 5);
}

#[test]
fn no_steps_are_a_result_too() {
    let result = train(2, "--quiet --steps 0");
    assert!(result["loss"].is_null() && result["test_loss"].is_number(), "{result}");
}

#[test]
fn ranks_that_see_different_data_are_told_so() {
    let folder = tempfile::tempdir().unwrap();
    for (rank, rows) in [(0, 40), (1, 30)] {
        data::table_of(&folder.path().join(format!("{rank}.h5")), rows);
    }
    let wrapper = own_file_for_each_rank(folder.path());
    let done = mpiexec(2, &wrapper)
        .args(["--model", "mlp", "--batch-size", "8"])
        .limit(Duration::from_secs(30))
        .run();
    let done = done.expect(2);
    done.says_once("the number of samples to train with is 40 on rank 0 and 30 on rank 1");
    done.says_once("is it the same on every node?");
}

/// Writes a program that is `sync_sgd` with `--data` `folder`/RANK.h5.
fn own_file_for_each_rank(folder: &Path) -> PathBuf {
    let wrapper = folder.join("wrapper");
    let program = env!("CARGO_BIN_EXE_sync_sgd");
    let rank = "${OMPI_COMM_WORLD_RANK:-$PMI_RANK}";
    let script = format!("#!/bin/sh\nexec {program} \"$@\" --data {}/{rank}.h5\n", folder.display());
    fs::write(&wrapper, script).unwrap();
    assert!(Command::new("chmod").arg("+x").arg(&wrapper).status().unwrap().success());
    wrapper
}

/// Checks on 1 and 3 ranks for exit code 2 and `text` once on stderr, within seconds.
#[track_caller]
fn refused(arguments: &[&str], text: &str) {
    for ranks in [1, 3] {
        let done = sync_sgd(ranks, "").args(arguments).without_grace().limit(Duration::from_secs(30)).run();
        done.expect(2).says_once(text);
    }
}

#[test]
fn options_out_of_range_are_refused() {
    refused(&["--batch-size", "0"], "--batch-size: it is 0, but must be above 0");
    refused(&["--hidden", "128,0"], "a size of 0 leaves nothing to learn with");
    refused(&["--no-such-option"], "unexpected argument '--no-such-option'");
    refused(&["--model", "vgg"], "invalid value 'vgg'");
    refused(&["--learning-rate", "-1"], "--learning-rate: it is -1, but must be above 0");
    refused(&["--learning-rate", "1e-46"], "--learning-rate: it is 0.0000");
    refused(&["--momentum", "1"], "--momentum: it is 1, but must be from 0 to below 1");
    refused(&["--optimizer", "adam", "--beta1", "1"], "--beta1: it is 1, but must be from 0 to below 1");
    refused(&["--micro-batches", "0"], "--micro-batches: it is 0");
    refused(&["--micro-batches", "129"], "129 micro-batches are more than the ");
    refused(&["--model", "deep-mlp", "--layers", "10000000000"], "--layers: it is 10000000000");
    refused(&["--model", "deep-mlp", "--data", "synthetic", "--width", "0"], "--width: it is 0");
    refused(
        &["--model", "mlp", "--no-bias", "--hidden", "1152921504606846976,16"],
        "no size may be above 268435456",
    );
    refused(&["--threads", "20000"], "--threads: it is 20000, but must not be above 1024");
    refused(&["--threads", "0"], "--threads: it is 0, but must be at least 1");
    refused(&["--model", "deep-mlp", "--width", "100"], "--width is 100, but a sample has 784");
    refused(
        &["--model", "cifar", "--data", "synthetic", "--synthetic-shape", "10"],
        "needs images, not 10 features",
    );
    refused(&["--metrics", "/no/such/folder/metrics.csv"], "creating --metrics /no/such/folder/metrics.csv");
    let done = sync_sgd(3, "--batch-size 2").run().expect(2);
    done.says_once("a global batch of 2 cannot be shared by 3 replicas");
}

#[test]
fn a_loss_that_is_no_number_stops_the_run_with_the_step() {
    for ranks in [1, 3] {
        let done = sync_sgd(ranks, "--learning-rate 1e30 --quiet").limit(Duration::from_secs(30)).run();
        let done = done.expect(1);
        done.says_once("error: step 2: the loss is NaN; try a smaller --learning-rate");
        let last = sync_sgd(ranks, "--learning-rate 1e38 --steps 1 --quiet").run().expect(1);
        last.says_once("error: step 1: the test loss is NaN");
    }
}

#[test]
fn a_killed_rank_ends_the_job_within_seconds() {
    let job = sync_sgd(3, "--epochs 100000 --quiet").limit(Duration::from_secs(20));
    let done = job.run_with(|launcher| {
        std::thread::sleep(Duration::from_secs(2));
        let ranks = rank_processes(launcher);
        assert_eq!(ranks.len(), 3, "the launcher's children are the ranks");
        kill("KILL", &ranks[1].to_string());
    });
    assert_ne!(done.code, Some(0), "{}", done.describe());
}

#[test]
fn a_file_that_one_rank_cannot_read_ends_the_job_once() {
    let folder = tempfile::tempdir().unwrap();
    // rank 1's is missing
    let wrapper = own_file_for_each_rank(folder.path());
    for rank in [0, 2] {
        data::table(&folder.path().join(format!("{rank}.h5")));
    }
    let done: Done = mpiexec(3, &wrapper).args(["--model", "mlp"]).limit(Duration::from_secs(30)).run();
    done.expect(2).says_once("(on rank 1 only)");
}

/// `srun` with the wrong `--mpi` starts N jobs of one rank: every program reports it once for all
/// of them, and refuses to run.
#[test]
fn processes_that_do_not_see_each_other_refuse_to_run() {
    for program in ["pi", "ping", "collectives", "sync_sgd", "tensor_mlp", "pipeline"] {
        for process in ["0", "3"] {
            let mut command = Command::new(Path::new(env!("CARGO_BIN_EXE_pi")).with_file_name(program));
            command.env("SLURM_NTASKS", "4").env("SLURM_PROCID", process).env_remove("RUST_LOG");
            let output = command.output().expect("a program can be started");
            let said = String::from_utf8_lossy(&output.stderr);
            assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0), "{program}: {said}");
            let complaint =
                "error: joining the job: SLURM_NTASKS says 4 processes, but MPI sees this one only";
            assert_eq!(said.matches(complaint).count(), usize::from(process == "0"), "{program}: {said}");
            assert!(process == "0" || said.is_empty(), "{program}: {said}");
        }
    }
}
