//! Jobs whose ranks are started with different options, programs or data: all ranks end soon with
//! exit code 2, and one message names the difference.

use std::fs;
use std::path::Path;
use std::time::Duration;

use crate::support::{Done, Job, data, directory, mpiexec, program};

/// The time limit of a job, generous because the machine may be busy.
const SOON: Duration = Duration::from_secs(30);

/// Returns arguments with which a program would run to its end.
fn base(name: &str) -> &'static str {
    match name {
        "sync_sgd" => "--threads 1 --steps 5 --log-every 0 --checkpoint-dir DIR/c --keep 2",
        "tensor_mlp" => "--threads 1 --steps 5 --log-every 0 --hidden 12",
        "pipeline" => "--threads 1 --steps 5 --log-every 0 --model mlp --hidden 12,13,14",
        "collectives" => "--to 64 --seconds 0.01",
        "ping" => "--largest 64",
        _ => "",
    }
}

/// Starts three ranks, of which rank `odd` is also given `more`.
fn start(name: &str, odd: usize, more: &str) -> Done {
    let (_directory, path) = directory();
    let words = |text: &str| {
        text.replace("DIR", &path)
            .split(' ')
            .filter(|word| !word.is_empty())
            .map(String::from)
            .collect::<Vec<_>>()
    };
    let empty = |word: String| if word == "EMPTY" { String::new() } else { word };
    let mut job = None;
    for rank in 0..3 {
        let next = match job {
            None => mpiexec(1, program(name)),
            Some(job) => Job::and(job, 1, program(name)),
        };
        let own = if rank == odd { words(more) } else { Vec::new() };
        job = Some(next.args(words(base(name))).args(own.into_iter().map(empty)));
    }
    job.expect("there are ranks").without_grace().limit(SOON).run().expect(2)
}

/// Additional arguments of one rank, and a part of the expected message.
const DIFFERENT: [(&str, &[(&str, &str)]); 6] = [
    (
        "sync_sgd",
        &[
            ("--seed 2", "--seed is 1 on rank 0 and 2 on rank"),
            ("--model mlp", "--model is unset on rank 0 and mlp on rank"),
            ("--model mlp --activation gelu", "--activation is relu on rank 0 and gelu on rank"),
            ("--steps 7", "--steps is 5 on rank 0 and 7 on rank"),
            ("--epochs 3", "--epochs is 10 on rank 0 and 3 on rank"),
            ("--batch-size 64", "--batch-size is 128 on rank 0 and 64 on rank"),
            ("--micro-batches 2", "--micro-batches is unset on rank 0 and 2 on rank"),
            ("--optimizer adam", "--optimizer is sgd on rank 0 and adam on rank"),
            ("--learning-rate 0.1", "--learning-rate is unset on rank 0 and 0.1 on rank"),
            ("--momentum 0.5", "--momentum is 0.9 on rank 0 and 0.5 on rank"),
            ("--nesterov", "--nesterov is false on rank 0 and true on rank"),
            ("--weight-decay 0.1", "--weight-decay is unset on rank 0 and 0.1 on rank"),
            ("--learning-rate-schedule linear", "--learning-rate-schedule is cosine on rank 0 and linear"),
            ("--warmup-steps 3", "--warmup-steps is 0 on rank 0 and 3 on rank"),
            ("--final-learning-rate 0.01", "--final-learning-rate is 0 on rank 0 and 0.01 on rank"),
            ("--clip-norm 1", "--clip-norm is unset on rank 0 and 1 on rank"),
            ("--bucket-mb 1", "--bucket-mb is unset on rank 0 and 1 on rank"),
            ("--overlap off", "--overlap is on on rank 0 and off on rank"),
            ("--zero 1", "--zero is auto on rank 0 and 1 on rank"),
            ("--check-replicas 5", "--check-replicas is 1000 on rank 0 and 5 on rank"),
            ("--eval-every 0", "--eval-every is 1 on rank 0 and 0 on rank"),
            ("--metrics DIR/m.csv", "--metrics is unset on rank 0 and "),
            ("--progress never", "--progress is auto on rank 0 and never on rank"),
            ("--trace DIR/t.json", "--trace is unset on rank 0 and "),
            ("--checkpoint-every 2", "--checkpoint-every is 10m on rank 0 and 2 on rank"),
            ("--time-limit 1h", "--time-limit is unset on rank 0 and 1h on rank"),
            ("--export DIR/w.h5", "--export is unset on rank 0 and "),
            ("--init DIR/w.h5", "--init is unset on rank 0 and "),
            ("--resume never", "--resume is auto on rank 0 and never on rank"),
            ("--standardise features", "--standardise is preset on rank 0 and features on rank"),
            ("--device auto", "--device is cpu on rank 0 and auto on rank"),
            ("--watchdog 5m", "--watchdog is unset on rank 0 and 5m on rank"),
            // the value of another option
            ("--data synthetic", "--data is digits on rank 0 and synthetic on rank"),
            // a command line that is wrong, or asks for something else
            ("--oops", "unexpected argument '--oops'"),
            ("--threads EMPTY", "invalid value '' for '--threads <N>'"),
            ("--steps", "a value is required for '--steps <N>'"),
            ("--batch-size -5", "error: "),
            ("--help", "it was given --help or --version, and rank"),
            ("--version", "it was given --help or --version, and rank"),
        ],
    ),
    (
        "tensor_mlp",
        &[
            ("--learning-rate 0.1", "--learning-rate is unset on rank 0 and 0.1 on rank"),
            ("--momentum 0.5", "--momentum is 0.9 on rank 0 and 0.5 on rank"),
            ("--optimizer adamw", "--optimizer is sgd on rank 0 and adamw on rank"),
            (
                "--learning-rate-schedule step",
                "--learning-rate-schedule is cosine on rank 0 and step on rank",
            ),
            ("--activation tanh", "--activation is relu on rank 0 and tanh on rank"),
            ("--no-bias", "--no-bias is false on rank 0 and true on rank"),
            ("--split gather", "--split is pairs on rank 0 and gather on rank"),
            ("--model deep-mlp", "--model is unset on rank 0 and deep-mlp on rank"),
            ("--seed 0", "--seed is 1 on rank 0 and 0 on rank"),
            ("--oops", "unexpected argument '--oops'"),
        ],
    ),
    (
        "pipeline",
        &[
            ("--schedule gpipe", "--schedule is 1f1b on rank 0 and gpipe on rank"),
            ("--stages 2,1,1", "--stages is unset on rank 0 and 2,1,1 on rank"),
            ("--recompute", "--recompute is false on rank 0 and true on rank"),
            ("--micro-batches 16", "--micro-batches is unset on rank 0 and 16 on rank"),
            ("--learning-rate 0.1", "--learning-rate is unset on rank 0 and 0.1 on rank"),
            ("--optimizer adam", "--optimizer is sgd on rank 0 and adam on rank"),
            ("--show-schedule", "--show-schedule is unset on rank 0 and - on rank"),
            ("--steps 7", "--steps is 5 on rank 0 and 7 on rank"),
            ("--help", "it was given --help or --version, and rank"),
        ],
    ),
    (
        "collectives",
        &[
            ("--operation all-reduce", "--operation is unset on rank 0 and all-reduce on rank"),
            ("--to 1KiB", "--to is 64 on rank 0 and 1KiB on rank"),
            ("--demo", "cannot be used with '--demo'"),
            ("--json --compare", "--compare is false on rank 0 and true on rank"),
        ],
    ),
    (
        "ping",
        &[("--repeats 7", "--repeats is 50 on rank 0 and 7 on rank"), ("--wrong", "unexpected argument")],
    ),
    (
        "pi",
        &[("--terms 7", "--terms is 1000000 on rank 0 and 7 on rank"), ("--terms 0", "invalid value '0'")],
    ),
];

#[test]
fn ranks_that_are_started_differently_all_say_no() {
    let mut number = 0;
    for (name, cases) in DIFFERENT {
        for (more, expected) in cases {
            // an option given twice counts once, the last time, in most programs
            let odd = 1 + number % 2;
            let done = start(name, odd, more);
            done.says_once(expected);
            assert!(done.stderr.contains(&format!("rank {odd}")), "{}", done.describe());
            number += 1;
        }
    }
    assert!(number >= 60, "{number}");
    // rank 0 may be the different one too
    start("sync_sgd", 0, "--seed 2").says_once("--seed is 2 on rank 0 and 1 on rank 1");
    start("sync_sgd", 0, "--oops").says_once("rank 0: error: unexpected argument '--oops'");
}

#[test]
fn ranks_of_different_programs_all_say_no() {
    for (first, second) in [("sync_sgd", "pipeline"), ("pi", "ping"), ("tensor_mlp", "sync_sgd")] {
        let done = mpiexec(2, program(first)).and(1, program(second)).limit(SOON).run().expect(2);
        done.says_once(&format!("the program is {first} on rank 0 and {second} on rank 2"));
    }
    let done =
        mpiexec(2, program("pi")).and(1, env!("CARGO_BIN_EXE_inspect")).args(["x.h5"]).limit(SOON).run();
    done.expect(2).says_once("this program runs as a single process");
}

#[test]
fn what_may_differ_may() {
    let (directory, path) = directory();
    for name in ["a.h5", "b.h5"] {
        data::table_of(&directory.path().join(name), 60);
    }
    let arguments = format!("--model mlp --hidden 5 --steps 3 --batch-size 6 --log-every 0 --data {path}");
    let job = mpiexec(1, program("sync_sgd")).args(format!("{arguments}/a.h5 --threads 1 -v").split(' '));
    let job = job.and(2, program("sync_sgd")).args(format!("{arguments}/b.h5 --threads 2 -q").split(' '));
    job.run().expect(0);
}

#[test]
fn data_are_compared_by_what_is_in_them() {
    let (directory, path) = directory();
    let write =
        |name: &str, last: f32| {
            let file = hdf5::File::create(directory.path().join(name)).expect("a file can be made");
            let x = ndarray::Array2::from_shape_fn((40, 3), |(n, i)| {
                if (n, i) == (39, 2) { last } else { (n + i) as f32 }
            });
            file.new_dataset_builder().with_data(&x).create("x").expect("a dataset can be made");
            let y: Vec<i32> = (0..40).map(|n| n % 3).collect();
            file.new_dataset_builder().with_data(&y).create("y").expect("a dataset can be made");
        };
    write("one.h5", 1.0);
    write("other.h5", 2.0);
    let arguments = format!("--threads 1 --model mlp --steps 3 --data {path}");
    let job = mpiexec(2, program("sync_sgd")).args(format!("{arguments}/one.h5").split(' '));
    let done =
        job.and(1, program("sync_sgd")).args(format!("{arguments}/other.h5").split(' ')).limit(SOON).run();
    done.expect(2)
        .says_once("a hash of the samples is")
        .says_once("is it the same on every node?")
        .says_once("rank 2");
}

#[test]
fn kinds_of_data_are_compared() {
    let (directory, path) = directory();
    data::table_of(&directory.path().join("table.h5"), 60);
    let arguments = "--threads 1 --model mlp --steps 3 --data";
    for (first, other) in [(format!("{path}/table.h5"), "digits"), ("digits".to_owned(), "missing.h5")] {
        let job = mpiexec(2, program("sync_sgd")).args(format!("{arguments} {first}").split(' '));
        let job = job.and(1, program("sync_sgd")).args(format!("{arguments} {other}").split(' '));
        let done = job.without_grace().limit(SOON).run().expect(2);
        assert!(done.stderr.contains("rank 2"), "{}", done.describe());
    }
}

#[test]
fn networks_are_compared_by_what_is_in_them() {
    let (directory, path) = directory();
    // the third rank is on a node with another file of this name
    for (folder, seed) in [("a", 1), ("b", 2)] {
        fs::create_dir(directory.path().join(folder)).expect("a directory can be made");
        let model = "--model gpt --layers 1 --heads 1 --width 4 --context 8 --batch-size 8";
        let export = format!("--export {path}/{folder}/net.h5 --seed {seed} --threads 1 --steps 1 {model}");
        mpiexec(1, program("sync_sgd")).args(export.split(' ')).run().expect(0);
    }
    for (name, more) in [("predict", "--threads 1"), ("generate", "--length 2")] {
        let on_node = |folder: &str| {
            let command = format!("cd {path}/{folder} && exec {} net.h5 {more}", program(name));
            ["-c".to_owned(), command]
        };
        let job = mpiexec(2, "sh").args(on_node("a")).and(1, "sh").args(on_node("b"));
        let done = job.without_grace().limit(SOON).run().expect(2);
        done.says_once("opening net.h5 on every node: the hash of the parameters is");
    }
}

/// A rank that never starts MPI keeps the others in `MPI_Init`, where only the watchdog ends them.
#[test]
fn the_watchdog_begins_before_mpi() {
    let arguments = "--threads 1 --steps 500 --watchdog 2s".split(' ');
    let job = mpiexec(1, program("sync_sgd")).args(arguments.clone()).and(1, "sleep").args(["100"]);
    let job = job.and(1, program("sync_sgd")).args(arguments).limit(Duration::from_secs(60));
    let done = job.run();
    assert!(!matches!(done.code, Some(0 | 2)), "{}", done.describe());
    assert!(done.stderr.contains("no progress for 2s (--watchdog)"), "{}", done.describe());
    assert!(done.stderr.contains("starting MPI"), "{}", done.describe());
}

#[test]
fn pipes_are_refused_where_they_would_hang() {
    let (directory, path) = directory();
    let pipe = |name: &str| {
        let path = directory.path().join(name);
        let made = std::process::Command::new("mkfifo").arg(&path).status().expect("mkfifo can be started");
        assert!(made.success());
    };
    pipe("p");
    pipe("p.csv");
    fs::create_dir(directory.path().join("mnist")).expect("a directory can be made");
    pipe("mnist/train-images-idx3-ubyte");
    fs::write(directory.path().join("mnist/train-labels-idx1-ubyte"), [0, 0, 8, 1, 0, 0, 0, 0])
        .expect("it can be written");
    let refused = |name: &str, more: &str| {
        let done = mpiexec(2, program(name))
            .args(["--threads", "1", "--steps", "2"])
            .args(more.replace("DIR", &path).split(' '));
        done.without_grace().limit(SOON).run().expect(2)
    };
    refused("sync_sgd", "--data DIR/p")
        .says_once("--data")
        .says_once("it is a pipe; give the name of a file");
    refused("sync_sgd", "--data DIR/mnist").says_once("it is a directory, a pipe or a device, not a file");
    refused("sync_sgd", "--trace DIR/p").says_once("--trace").says_once("it is a pipe");
    refused("sync_sgd", "--init DIR/p").says_once("--init").says_once("it is a pipe");
    refused("sync_sgd", "--metrics DIR/p").says_once("it is a pipe that nobody reads");
    refused("pipeline", "--schedule DIR/p.csv").says_once("--schedule").says_once("it is a pipe");
    // a pipe with a reader takes the metrics
    let read = |path: &Path| {
        std::process::Command::new("cat").arg(path).stdout(std::process::Stdio::piped()).spawn()
    };
    let reader = read(&directory.path().join("p")).expect("cat can be started");
    let done = mpiexec(2, program("sync_sgd"))
        .args(format!("--threads 1 --steps 2 --metrics {path}/p").split(' '))
        .run();
    done.expect(0);
    let output = reader.wait_with_output().expect("it ends with the job");
    assert_eq!(String::from_utf8_lossy(&output.stdout).lines().count(), 3);
}
