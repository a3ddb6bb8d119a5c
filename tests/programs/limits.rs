//! Extreme, odd or useless input: impossible sizes, circular links, values far from zero, options
//! without effect.

use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::support::data::{self, put};
use crate::support::{Done, Job, directory, mpiexec, program, rank_processes};
use flate2::Compression;
use flate2::write::GzEncoder;
use half::f16;
use ndarray::{Array1, Array2};
use tempfile::TempDir;

fn job(name: &str, ranks: usize, arguments: &str) -> Job {
    let job = mpiexec(ranks, program(name)).args(["--threads", "1", "--log-every", "0", "--eval-every", "0"]);
    job.args(arguments.split_whitespace()).limit(Duration::from_secs(60))
}

fn run(name: &str, ranks: usize, arguments: &str) -> Done {
    job(name, ranks, arguments).run()
}

/// Checks on three ranks for exit code 2 and one line with the text.
#[track_caller]
fn refused(name: &str, arguments: &str, why: &str) {
    job(name, 3, arguments).without_grace().run().expect(2).says_once(why).says_once("error: ");
}

fn hdf5_file(write: impl FnOnce(&hdf5::File)) -> (TempDir, PathBuf) {
    let (directory, _) = directory();
    let path = data::hdf5_file(directory.path(), write);
    (directory, path)
}

#[test]
fn groups_in_a_circle_and_links_to_nothing() {
    let (_directory, path) = hdf5_file(|file| {
        let (x, y) = data::rows(40);
        put(file, "x", &x);
        put(file, "y", &y);
        let inner = file.create_group("a").and_then(|a| a.create_group("b")).expect("a group can be made");
        put(file, "a/b/deep", &x);
        file.link_hard("/a", "a/b/round").expect("a link can be made");
        inner.link_soft("/gone", "dangling").expect("a link can be made");
        file.link_soft("/around", "around").expect("a link can be made");
    });
    let train = |more: &str| format!("--data {} --model mlp --steps 1 {more}", path.display());
    refused(
        "sync_sgd",
        &train("--inputs /nothing"),
        "it has no dataset /nothing; its datasets: /x, /y, /a/b/deep",
    );
    refused("sync_sgd", &train("--inputs /a/b/dangling"), "/a/b/dangling exists, but cannot be opened");
    refused("sync_sgd", &train("--inputs /around"), "/around exists, but cannot be opened");
    refused("sync_sgd", &train("--inputs /a/b"), "/a/b is a group; its datasets: /x, /y, /a/b/deep");
}

#[test]
fn sizes_that_cannot_be() {
    let (_directory, path) = hdf5_file(|file| {
        let holes = |name: &str, rows: usize, len: usize| {
            let chunk = (1, len.min(1 << 20));
            file.new_dataset::<f32>()
                .chunk(chunk)
                .shape((rows, len))
                .create(name)
                .expect("a dataset can be made");
        };
        holes("wide", 200, 1 << 40);
        holes("targets", 200, 1 << 36);
        holes("x", 200, 4);
        holes("square", 1 << 31, 1 << 31);
        let cube = file.new_dataset::<f32>().chunk((1, 1, 1 << 10, 16)).shape((200, 1 << 30, 1 << 30, 16));
        cube.create("wraps").expect("a dataset can be made");
    });
    let train = |more: &str| format!("--data {} --model mlp --steps 1 {more}", path.display());
    let limit = "and 268435456 are the limit";
    refused("sync_sgd", &train("--inputs /wide --targets /x"), limit);
    refused("sync_sgd", &train("--inputs /x --targets /targets"), limit);
    refused("sync_sgd", &train("--inputs /wraps --targets /x"), limit);
    for (name, arguments, code) in [
        ("sync_sgd", train("--inputs /square --targets /square"), [2, 2]),
        ("sync_sgd", "--model deep-mlp --data synthetic --width 9223372036854775808".into(), [2, 2]),
        ("sync_sgd", "--model deep-mlp --data synthetic --width 2147483648 --layers 10000".into(), [2, 2]),
        ("tensor_mlp", "--model deep-mlp --data synthetic --width 1073741824".into(), [1, 2]),
        ("sync_sgd", "--model mlp --data synthetic --synthetic-shape 1048576x1048576x1048576".into(), [2, 2]),
        ("sync_sgd", "--model mlp --data synthetic --synthetic-shape 2147483648".into(), [2, 2]),
        ("sync_sgd", "--model mlp --data synthetic --synthetic-samples 18446744073709551615".into(), [2, 2]),
        ("sync_sgd", "--model mlp --hidden 4294967296,4294967296".into(), [2, 2]),
        ("pipeline", "--model mlp --hidden 2147483648,2147483648".into(), [2, 2]),
        ("sync_sgd", "--model mlp --batch-size 18446744073709551615".into(), [2, 2]),
        ("sync_sgd", "--learning-rate inf".into(), [2, 2]),
    ] {
        let done = run(name, 3, &arguments);
        assert!(code.map(Some).contains(&done.code), "{}", done.describe());
        assert!(!done.stderr.contains("panicked") && done.stderr.contains("error: "), "{}", done.describe());
    }
    refused(
        "sync_sgd",
        "--learning-rate inf",
        "--learning-rate: it is inf, but must be above 0 and finite in 32 bits",
    );
}

#[test]
fn features_far_from_zero_are_standardised_as_they_should_be() {
    const ROWS: usize = 9000;
    let noise = |row: usize, column: usize| ((row * 7919 + column * 104_729) % 10_007) as f64 / 5003.0 - 1.0;
    let columns = [(1e6, 0.7), (1e5, 1.0), (1.0, 1e-4), (0.0, 1.0), (-3e4, 1e-2), (5.0, 0.0)];
    let x = Array2::from_shape_fn((ROWS, 6), |(row, column)| {
        let (mean, deviation) = columns[column];
        (mean + deviation * noise(row, column)) as f32
    });
    let mut z = x.mapv(f64::from);
    for mut column in z.columns_mut() {
        let mean = column.sum() / ROWS as f64;
        column.mapv_inplace(|value| value - mean);
        let deviation = (column.mapv(|value| value * value).sum() / ROWS as f64).sqrt();
        column.mapv_inplace(|value| if deviation > 0.0 { value / deviation } else { value });
    }
    let y = Array1::from_shape_fn(ROWS, |row| i64::from(noise(row, 0) + noise(row, 1) > 0.0));
    let (_directory, path) = hdf5_file(|file| {
        put(file, "x", &x);
        put(file, "z", &z.mapv(|value| value as f32));
        put(file, "one", &x.column(0).to_owned());
        put(file, "z_one", &z.column(0).mapv(|value| value as f32));
        put(file, "y", &y);
    });
    let loss = |ranks: usize, more: &str| {
        let arguments =
            format!("--data {} --model mlp --hidden 9 --activation tanh --steps 30 {more}", path.display());
        run("sync_sgd", ranks, &arguments).expect(0).result()["loss"].as_f64().expect("a loss is a number")
    };
    for (raw, scaled) in [("x", "z"), ("one", "z_one")] {
        let expected = loss(1, &format!("--inputs {scaled} --standardise none"));
        for ranks in [1, 2, 3] {
            let found = loss(ranks, &format!("--inputs {raw} --standardise features"));
            assert!((found / expected - 1.0).abs() < 1e-5, "{ranks} ranks: {found}, not {expected}");
        }
    }
}

#[test]
fn features_that_float32_cannot_resolve_are_named() {
    let (x, y) = data::rows(40);
    let (_directory, path) = hdf5_file(|file| {
        let mut times = x.mapv(f64::from);
        times.column_mut(2).mapv_inplace(|value| 1.7e9 + 10.0 * value);
        put(file, "times", &times);
        put(file, "x", &x);
        put(file, "y", &y);
    });
    let arguments = format!("--data {} --model mlp --steps 1 --standardise features", path.display());
    let done = run("sync_sgd", 2, &format!("{arguments} --inputs /times")).expect(0);
    done.says_once(
        "feature or channel 2 (counted from 0) is 1.700e9 in all samples, but numbers are 1.3e2 apart",
    );
    let done = run("sync_sgd", 2, &format!("{arguments} --inputs /x")).expect(0);
    assert!(!done.stderr.contains("feature or channel"), "{}", done.describe());
}

#[test]
fn half_precision_is_read() {
    let (x, y) = data::rows(40);
    let (_directory, path) = hdf5_file(|file| {
        let half = x.mapv(f16::from_f32);
        put(file, "half", &half);
        put(file, "single", &half.mapv(f32::from));
        put(file, "y", &y);
    });
    let digest = |inputs: &str| {
        run("sync_sgd", 2, &format!("--data {} --model mlp --inputs {inputs} --steps 3", path.display()))
            .expect(0)
            .digest()
    };
    assert_eq!(digest("half"), digest("single"));
}

#[test]
fn class_numbers_may_be_larger_than_the_number_of_samples() {
    let (_directory, path) = hdf5_file(|file| {
        let (x, y) = data::rows(40);
        put(file, "x", &x);
        put(file, "y", &y.mapv(|class| class * 30));
    });
    let result =
        run("sync_sgd", 2, &format!("--data {} --model mlp --hidden none --steps 2", path.display()))
            .expect(0)
            .result();
    assert_eq!(result["parameters"], 61 * 7);
}

#[test]
fn weights_that_are_no_numbers_are_named() {
    let (_directory, path) = hdf5_file(|file| {
        file.create_group("model").expect("a group can be made");
        let mut weight = Array2::<f32>::zeros((10, 784));
        weight[[3, 5]] = f32::NAN;
        put(file, "model/fc1.weight", &weight);
        put(file, "model/fc1.bias", &Array1::<f32>::zeros(10));
    });
    let arguments = format!("--model mlp --hidden none --steps 2 --init {}", path.display());
    refused(
        "sync_sgd",
        &arguments,
        "/model/fc1.weight holds NaN (element 2357); every weight must be a finite number",
    );
}

#[test]
fn names_that_lead_nowhere() {
    let (directory, path) = directory();
    std::os::unix::fs::symlink("loop", directory.path().join("loop")).expect("a link can be made");
    let long = "n".repeat(300);
    for (option, why) in
        [("loop", "Too many levels of symbolic links"), (long.as_str(), "File name too long")]
    {
        for name in ["--data", "--init", "--resume", "--checkpoint-dir", "--metrics", "--trace"] {
            refused("sync_sgd", &format!("--steps 1 {name} {path}/{option}"), why);
        }
    }
    let output = Command::new(env!("CARGO_BIN_EXE_probe")).args(["--json", "/nowhere/at/all.json"]).output();
    let output = output.expect("probe can be started");
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(
        String::from_utf8_lossy(&output.stderr).contains("creating --json /nowhere/at/all.json"),
        "{output:?}"
    );
}

/// A file of a few hundred KB that unpacks to 4 GB is refused without holding it in memory.
#[test]
fn a_bomb_is_not_held() {
    let (directory, path) = directory();
    let pack = |bytes: &[u8]| {
        let mut packed = GzEncoder::new(Vec::new(), Compression::fast());
        packed.write_all(bytes).expect("memory takes what is written");
        packed.finish().expect("memory takes what is written")
    };
    let mut file = pack(&[0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 28, 0, 0, 0, 28]);
    let zeros = pack(&vec![0; 64 << 20]);
    (0..64).for_each(|_| file.extend(&zeros));
    fs::write(directory.path().join("train-images-idx3-ubyte.gz"), &file).expect("it can be written");
    for name in ["train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"] {
        fs::write(directory.path().join(name), [0, 0, 8, 1, 0, 0, 0, 0]).expect("it can be written");
    }
    let mut peak = 0;
    let job = mpiexec(1, program("sync_sgd")).args(["--threads", "1", "--data", &path]);
    let done = job.run_with(|launcher| {
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(60) {
            let Some(rank) = rank_processes(launcher).first().copied() else {
                if start.elapsed() > Duration::from_secs(5) {
                    break;
                }
                continue;
            };
            let status = fs::read_to_string(format!("/proc/{rank}/status")).unwrap_or_default();
            let high = status
                .lines()
                .find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB")?.parse().ok());
            peak = peak.max(high.unwrap_or(0_usize));
        }
    });
    done.expect(2).says_once("its header announces 2 × 28 × 28 bytes, but more follow");
    assert!(peak > 0 && peak < 300_000, "{peak} kB");
}

#[test]
fn what_is_valid_does_not_depend_on_the_ranks() {
    let losses: Vec<f64> = [1, 2, 3, 5]
        .into_iter()
        .map(|ranks| {
            let done = run("sync_sgd", ranks, "--micro-batches 5 --batch-size 16 --steps 20").expect(0);
            assert_eq!(done.stderr.contains("some are empty"), ranks > 3, "{}", done.describe());
            done.result()["loss"].as_f64().expect("a loss is a number")
        })
        .collect();
    assert!(losses.iter().all(|loss| (loss / losses[0] - 1.0).abs() < 1e-5), "{losses:?}");
    refused(
        "sync_sgd",
        "--micro-batches 17 --batch-size 16 --steps 2",
        "17 micro-batches are more than the 16 samples",
    );
}

#[test]
fn options_of_no_use_are_refused() {
    let (directory, path) = directory();
    data::table(&directory.path().join("d.h5"));
    let file = format!("--data {path}/d.h5");
    for (name, arguments, why) in [
        ("sync_sgd", "--hidden 12", "--hidden: it has no effect in this run: it is for --model mlp"),
        ("sync_sgd", "--activation relu", "--activation: it has no effect in this run"),
        (
            "sync_sgd",
            "--model mlp --layers 3",
            "--layers: it has no effect in this run: it is for --model deep-mlp",
        ),
        ("tensor_mlp", "--width 3", "--width: it has no effect in this run"),
        (
            "sync_sgd",
            "--inputs /x",
            "--inputs: it has no effect in this run: it is for HDF5 files with inputs, and --data is digits",
        ),
        ("sync_sgd", "--synthetic-samples 9", "--synthetic-samples: it has no effect in this run"),
        ("sync_sgd", "--optimizer adam --momentum 0.5", "it is for --optimizer sgd, and adam is chosen"),
        ("sync_sgd", "--beta2 0.9", "it is for --optimizer adam, adamw and lion, and sgd is chosen"),
        ("sync_sgd", "--optimizer lion --epsilon 1e-6", "adam and adamw, and lion is chosen"),
        ("sync_sgd", "--optimizer adam --decay matrices", "--weight-decay is 0"),
        ("sync_sgd", "--decay-factor 0.5", "it is for --learning-rate-schedule step, and cosine is chosen"),
        ("sync_sgd", "--device-transfers staged", "it is about the memory of GPUs, and --device is cpu"),
        ("sync_sgd", "--resume auto", "it has no effect in this run: auto looks in --checkpoint-dir"),
        ("tensor_mlp", "--overlap off", "it is about replicas, and this program has one"),
        ("pipeline", "--check-replicas 5 --model mlp", "it is about replicas, and this program has one"),
        ("pipeline", "--model mlp --stages-per-rank 3", "--stages-per-rank: it has no effect in this run"),
        ("pipeline", "--show-schedule --show-ranks 4 --stages 3,2", "it divides a network"),
        ("sync_sgd", "--data synthetic --context 3", "--synthetic-shape tokens:LENGTH makes sequences"),
        (
            "sync_sgd",
            "--data synthetic --model gpt --context 3 --synthetic-shape tokens:9",
            "--context: it has no effect in this run: --synthetic-shape is given",
        ),
        ("sync_sgd", "--data synthetic --model resnet --width 12", "must be a multiple of 8"),
    ] {
        refused(name, &format!("--steps 1 {arguments}"), why);
    }
    let deep = format!("{file} --model deep-mlp --targets /y --steps 1");
    refused(
        "sync_sgd",
        &deep,
        "--targets: it has no effect in this run: the loss of the network, mean-of-squares, reads no targets",
    );
    refused("pipeline", "--model mlp --stages 0", "a stage of 0 layers has nothing to do");
    run("sync_sgd", 2, "--threads 200 --steps 1").expect(0).says_once("--threads 200 is more than the ");
    // with effect, but not on every rank
    let few = run("sync_sgd", 3, "--batch-size 3 --steps 1").expect(0);
    few.says_once("1 of 3 replicas have no samples, because the 3 samples of a batch");
    let one = run("tensor_mlp", 3, "--leaves 1 --steps 1").expect(0);
    one.says_once("2 of 3 ranks that share layers have no part of linear layers");
}

#[test]
fn errors_name_the_file_that_is_wrong() {
    let (directory, path) = directory();
    let idx = |name: &str, sizes: &[u32], bytes: &[u8]| {
        let mut file = vec![0, 0, 8, sizes.len() as u8];
        sizes.iter().for_each(|size| file.extend(size.to_be_bytes()));
        file.extend(bytes);
        fs::write(directory.path().join(name), file).expect("it can be written");
    };
    for name in ["train", "t10k"] {
        idx(&format!("{name}-images-idx3-ubyte"), &[2, 28, 28], &[0; 2 * 784]);
        idx(&format!("{name}-labels-idx1-ubyte"), &[2], &[3, 10]);
    }
    let why = format!("reading {path}/train-labels-idx1-ubyte: label 1 is 10, expected 0 to 9");
    refused("sync_sgd", &format!("--data {path} --steps 1"), &why);
    idx("train-labels-idx1-ubyte", &[3], &[3; 3]);
    let why =
        format!("reading {path}/train-labels-idx1-ubyte: 3 labels for the 2 images of {path}/train-images");
    refused("sync_sgd", &format!("--data {path} --steps 1"), &why);
    fs::write(directory.path().join("s.csv"), "0B0,0F0\n").expect("it can be written");
    let done = run("pipeline", 1, &format!("--model mlp --schedule {path}/s.csv --steps 1")).expect(2);
    done.says_once(&format!("reading the schedule {path}/s.csv"));
}

#[test]
fn a_run_that_has_nothing_left_to_do_says_its_loss() {
    let (_directory, path) = directory();
    let train = || run("sync_sgd", 2, &format!("--steps 7 --checkpoint-dir {path}")).expect(0).result();
    let (first, again) = (train(), train());
    assert_eq!(again["resumed_after"], 7);
    assert!(first["loss"].is_number() && again["loss"] == first["loss"], "{first} {again}");
}

#[test]
fn a_long_pass_says_that_it_is_at_it() {
    let (_directory, path) = hdf5_file(|file| {
        file.new_dataset::<u8>()
            .chunk((4096, 16))
            .deflate(1)
            .shape((4_000_000, 16))
            .create("x")
            .expect("it can be made");
        let y = Array1::from_shape_fn(4_000_000, |row| (row % 2) as u8);
        file.new_dataset_builder().with_data(&y).create("y").expect("it can be made");
    });
    let train = format!("--data {} --model mlp --hidden none --steps 1", path.display());
    let pass = "looking through 4000000 samples (0.3 GB)";
    run("sync_sgd", 2, &format!("{train} --standardise features")).expect(0).says_once(pass);
    // without moments or a checksum the pass reads class numbers only
    let done = run("sync_sgd", 2, &train).expect(0);
    assert!(!done.stderr.contains(pass), "{}", done.describe());
}
