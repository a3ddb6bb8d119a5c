//! Training data of every format, valid and damaged: what is read, and how the rest is refused.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::support::data::{self, hdf5_file, put};
use crate::support::{Done, Job, mpiexec, say_skipped};
use flate2::Compression;
use flate2::write::GzEncoder;
use ndarray::{Array1, Array2, Array4};
use serde_json::Value;
use tempfile::TempDir;

fn training(ranks: usize, path: &Path, arguments: &str) -> Job {
    let job = mpiexec(ranks, env!("CARGO_BIN_EXE_sync_sgd")).args([
        "--threads",
        "1",
        "--quiet",
        "--batch-size",
        "8",
    ]);
    job.args([Path::new("--data"), path]).args(arguments.split_whitespace()).limit(Duration::from_secs(60))
}

fn train(ranks: usize, path: &Path, arguments: &str) -> Done {
    training(ranks, path, arguments).run()
}

fn result(ranks: usize, path: &Path, arguments: &str) -> Value {
    train(ranks, path, arguments).expect(0).result()
}

/// Checks on 1 and 3 ranks for exit code 2 and both texts once on stderr.
#[track_caller]
fn refused(path: &Path, arguments: &str, why: &str) {
    for ranks in [1, 3] {
        let done = training(ranks, path, arguments).without_grace().run().expect(2);
        done.says_once(why);
        assert!(
            done.stderr.contains(&path.display().to_string()),
            "the file is not named\n{}",
            done.describe()
        );
    }
}

fn folder() -> TempDir {
    tempfile::tempdir().unwrap()
}

// --- HDF5

#[test]
fn more_files_than_the_soft_limit_are_open_at_a_time() {
    let folder = folder();
    let path = folder.path().display();
    (0..60).for_each(|number| data::table_of(&folder.path().join(format!("run-{number:02}.h5")), 8));
    let command = format!(
        "ulimit -Sn 100 && exec {} --threads 1 --quiet --steps 2 --model mlp --data '{path}/run-*.h5'",
        env!("CARGO_BIN_EXE_sync_sgd")
    );
    assert_eq!(mpiexec(2, "sh").args(["-c", &command]).run().expect(0).result()["steps"], 2);
}

#[test]
fn hdf5_tables_images_classes_and_values() {
    let folder = folder();
    let (x, y) = data::rows(40);
    let path = hdf5_file(folder.path(), |file| {
        put(file, "x", &x);
        put(file, "y", &y);
        put(file, "whole", &x.mapv(|value| (value * 5.0) as i32));
        put(file, "real", &x.mapv(f64::from));
        put(file, "value", &Array1::from_shape_fn(40, |row| row as f64 / 40.0));
        put(file, "values", &Array2::from_shape_fn((40, 3), |(row, column)| (row + column) as f32 / 40.0));
        put(
            file,
            "images",
            &Array4::from_shape_fn((40, 3, 32, 32), |(n, c, y, x)| ((n * 3 + c * 5 + y + x) % 256) as u8),
        );
        file.create_group("group").unwrap();
        put(file, "group/x", &x);
    });
    let classes = result(2, &path, "--model mlp --epochs 2 --test-fraction 0.25");
    assert_eq!((classes["steps"].as_u64(), classes["accuracy"].is_number()), (Some(8), true), "{classes}");
    // the same numbers in another type, or within a group, give the same bits
    for inputs in ["/real", "/group/x"] {
        let again =
            result(2, &path, &format!("--model mlp --epochs 2 --test-fraction 0.25 --inputs {inputs}"));
        assert_eq!(again["parameters_digest"], classes["parameters_digest"]);
    }
    let whole = result(3, &path, "--model mlp --inputs /whole --standardise features --epochs 1");
    assert!(whole["accuracy"].is_null() && whole["loss"].as_f64().unwrap() < 5.0, "{whole}");
    for (targets, parameters) in [("/value", 6 * 4 + 4 + 4 + 1), ("/values", 6 * 4 + 4 + 12 + 3)] {
        let values = result(3, &path, &format!("--model mlp --hidden 4 --targets {targets} --epochs 1"));
        assert_eq!((values["parameters"].as_u64(), values["accuracy"].is_null()), (Some(parameters), true));
    }
    let images = result(2, &path, "--model cifar --inputs /images --epochs 1");
    assert_eq!(images["parameters"], 62_006 - 7 * 85, "three classes instead of ten");
    let deep = result(2, &path, "--model deep-mlp --epochs 1");
    assert_eq!(deep["parameters"], 4 * 36);
}

#[test]
fn hdf5_gives_what_the_same_numbers_in_memory_give() {
    // the embedded digits, written as a user would
    let folder = folder();
    let digits = hdf5::File::open(Path::new(env!("CARGO_MANIFEST_DIR")).join("data/digits.h5")).unwrap();
    let images: Vec<u8> = digits.dataset("train/images").unwrap().read_raw().unwrap();
    let labels: Vec<u8> = digits.dataset("train/labels").unwrap().read_raw().unwrap();
    let images = ndarray::Array3::from_shape_vec((9000, 28, 28), images).unwrap();
    let path = hdf5_file(folder.path(), |file| {
        put(file, "x", &images);
        put(file, "y", &Array1::from(labels));
    });
    let arguments = ["--threads", "1", "--quiet", "--steps", "20", "--standardise", "none"];
    let embedded =
        mpiexec(2, env!("CARGO_BIN_EXE_sync_sgd")).args(arguments).args(["--batch-size", "8"]).run();
    let embedded = embedded.expect(0).result();
    let own = result(2, &path, "--steps 20 --standardise none");
    assert_eq!(own["parameters_digest"], embedded["parameters_digest"]);
}

#[test]
fn hdf5_that_does_not_fit_is_refused() {
    let dir = folder();
    let (x, y) = data::rows(40);
    let path = hdf5_file(dir.path(), |file| {
        put(file, "x", &x);
        put(file, "y", &y);
        put(file, "few", &Array1::from(vec![0_i64; 39]));
        put(file, "negative", &y.mapv(|label| label - 1));
        put(file, "far", &y.mapv(|label| label * 600_000));
        put(file, "same", &y.mapv(|_| 0));
        let mut holes = x.clone();
        holes[[33, 2]] = f32::NAN;
        put(file, "holes", &holes);
        put(file, "deep", &ndarray::Array5::<f32>::zeros((40, 1, 1, 1, 1)));
        let text: Vec<hdf5::types::VarLenUnicode> = vec!["a".parse().unwrap(); 40];
        file.new_dataset_builder().with_data(&text).create("text").unwrap();
        file.new_dataset::<f32>().create("scalar").unwrap();
    });
    refused(&path, "--model mlp --inputs /nothing", "it has no dataset /nothing; its datasets: /");
    refused(&path, "--model mlp --targets /few", "/x has 40 rows, /few 39");
    refused(&path, "--model mlp --targets /negative", "/negative is -1 at row 0, class numbers start at 0");
    refused(&path, "--model mlp --targets /far", "/far holds 1200000 as a class number");
    refused(&path, "--model mlp --targets /same", "/same holds one class only, 0");
    refused(&path, "--model mlp --inputs /holes", "/holes holds NaN at row 33, element 2");
    refused(&path, "--model mlp --inputs /deep", "expected at most channels × height × width");
    refused(&path, "--model mlp --inputs /text", "expected integers or floating-point numbers");
    refused(&path, "--model mlp --inputs /scalar", "/scalar is a single number");
    let misfit = train(2, &path, "--model lenet").expect(2);
    misfit.says_once("a convolution needs images, not 6 features");
    train(2, &path, "--model lenet --targets /x")
        .expect(2)
        .says_once("the targets are 6 real values a sample");
    train(2, &path, "--model mlp --test-fraction 1").expect(2).says_once("--test-fraction: it is 1");
}

#[test]
fn what_is_no_hdf5_file_is_refused() {
    let folder = folder();
    let path = folder.path().join("data.h5");
    refused(&path, "", "No such file or directory");
    fs::write(&path, "").unwrap();
    refused(&path, "", "the file is empty");
    fs::write(&path, "not at all").unwrap();
    refused(&path, "", "it is not an HDF5 file, or is damaged");
    data::table(&path);
    refused(folder.path(), "", "data.h5: it has /x, so it is a file of samples; a pattern names several");
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
    for damaged in [&path, folder.path()] {
        refused(damaged, "", "it is not an HDF5 file, or is damaged");
    }
    fs::remove_file(&path).unwrap();
    refused(folder.path(), "", "the directory has neither train-images-idx3-ubyte.gz");
}

// --- IDX

fn idx(sizes: &[u32], bytes: &[u8]) -> Vec<u8> {
    let mut file = vec![0, 0, 8, sizes.len() as u8];
    sizes.iter().for_each(|size| file.extend(size.to_be_bytes()));
    file.extend(bytes);
    file
}

/// Creates a folder of 30 training and 10 test images of 28 × 28.
fn idx_folder() -> TempDir {
    let folder = folder();
    for (prefix, num) in [("train", 30), ("t10k", 10)] {
        let pixels: Vec<u8> = (0..num * 784).map(|i| (i * 31 % 256) as u8).collect();
        let labels: Vec<u8> = (0..num).map(|i| (i % 10) as u8).collect();
        fs::write(
            folder.path().join(format!("{prefix}-images-idx3-ubyte")),
            idx(&[num as u32, 28, 28], &pixels),
        )
        .unwrap();
        fs::write(folder.path().join(format!("{prefix}-labels-idx1-ubyte")), idx(&[num as u32], &labels))
            .unwrap();
    }
    folder
}

#[test]
fn idx_plain_and_gzipped_are_the_same() {
    let folder = idx_folder();
    let plain = result(2, folder.path(), "--epochs 2");
    assert_eq!((plain["steps"].as_u64(), plain["accuracy"].is_number()), (Some(8), true));
    for name in ["train-images-idx3-ubyte", "t10k-labels-idx1-ubyte"] {
        let bytes = fs::read(folder.path().join(name)).unwrap();
        let mut packed = GzEncoder::new(Vec::new(), Compression::default());
        packed.write_all(&bytes).unwrap();
        fs::write(folder.path().join(format!("{name}.gz")), packed.finish().unwrap()).unwrap();
        fs::remove_file(folder.path().join(name)).unwrap();
    }
    assert_eq!(result(2, folder.path(), "--epochs 2")["parameters_digest"], plain["parameters_digest"]);
}

#[test]
fn damaged_idx_files_are_refused() {
    let damage = |name: &str, bytes: &[u8], why: &str| {
        let folder = idx_folder();
        fs::write(folder.path().join(name), bytes).unwrap();
        refused(folder.path(), "", why);
    };
    let images = "train-images-idx3-ubyte";
    damage(images, &[], "the file is empty");
    damage(images, &idx(&[30], &[0; 30]), "an IDX file of bytes in 3 dimensions with [0, 0, 8, 3]");
    damage(images, &idx(&[30, 28, 28], &[0; 100]), "its header announces 30 × 28 × 28 bytes, but 100 follow");
    damage(images, &idx(&[29, 28, 28], &[0; 29 * 784]), "30 labels for the 29 images of");
    let mut labels = [0; 30];
    labels[7] = 10;
    damage("train-labels-idx1-ubyte", &idx(&[30], &labels), "label 7 is 10, expected 0 to 9");
    damage(
        "t10k-images-idx3-ubyte",
        &idx(&[10, 14, 14], &[0; 10 * 196]),
        "they are images of 14 × 14 with 1 channel, but the training samples are",
    );
    damage("train-images-idx3-ubyte.gz", b"\x1f\x8b\x08 cut short", "the file is damaged or cut short");
    let folder = idx_folder();
    fs::remove_file(folder.path().join("t10k-labels-idx1-ubyte")).unwrap();
    refused(folder.path(), "", "there is no t10k-labels-idx1-ubyte.gz or t10k-labels-idx1-ubyte in it");
}

// --- CIFAR-10

fn cifar_folder(records: usize) -> TempDir {
    let folder = folder();
    let root = folder.path().join("cifar-10-batches-bin");
    fs::create_dir(&root).unwrap();
    let names = (1..=5).map(|batch| format!("data_batch_{batch}.bin")).chain(["test_batch.bin".to_owned()]);
    for name in names {
        let record = |n: usize| {
            (0..3073).map(move |i| if i == 0 { (n % 10) as u8 } else { ((n * 13 + i) % 256) as u8 })
        };
        fs::write(root.join(name), (0..records).flat_map(record).collect::<Vec<u8>>()).unwrap();
    }
    folder
}

#[test]
fn cifar_trains_and_is_refused_when_damaged() {
    let folder = cifar_folder(8);
    let trained = result(2, folder.path(), "--model cifar --epochs 1");
    assert_eq!((trained["steps"].as_u64(), trained["parameters"].as_u64()), (Some(5), Some(62_006)));
    let batch = folder.path().join("cifar-10-batches-bin/data_batch_3.bin");
    let bytes = fs::read(&batch).unwrap();
    fs::write(&batch, &bytes[..bytes.len() - 1]).unwrap();
    refused(folder.path(), "--model cifar", "24583 bytes are not a whole number of records of 3073");
    let mut wrong = bytes.clone();
    wrong[3073] = 10;
    fs::write(&batch, wrong).unwrap();
    refused(folder.path(), "--model cifar", "label 1 is 10, expected 0 to 9");
    fs::remove_file(&batch).unwrap();
    refused(folder.path(), "--model cifar", "No such file or directory");
}

// --- data/fetch

fn fetch(arguments: &[&str]) -> (Option<i32>, String) {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/fetch");
    let output = Command::new(script).args(arguments).output().unwrap();
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn fetch_takes_only_the_published_files() {
    let (from, to) = (idx_folder(), folder());
    let [from, to] = [&from, &to].map(|folder| folder.path().to_str().unwrap());
    let (code, said) = fetch(&["mnist", "--from", from, "--to", to]);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("there is no train-images-idx3-ubyte.gz in"), "{said}");
    fs::write(Path::new(from).join("train-images-idx3-ubyte.gz"), "something else").unwrap();
    for set in ["mnist", "fashion-mnist"] {
        let (code, said) = fetch(&[set, "--from", from, "--to", to]);
        assert_eq!(code, Some(1), "{said}");
        assert!(said.contains("is not the published file: its MD5 should be"), "{said}");
    }
    assert!(!Path::new(to).exists(), "nothing is left behind, not even the folder");
    assert_eq!(fetch(&["no-such-set"]).0, Some(2));
    assert_eq!(fetch(&[]).0, Some(2));
}

#[test]
fn fetch_takes_local_copies() {
    let Some(copies) = std::env::var_os("PHALANX_MNIST") else {
        say_skipped("$PHALANX_MNIST does not say where copies of MNIST's files are");
        return;
    };
    let to = folder();
    let arguments = ["mnist", "--from", copies.to_str().unwrap(), "--to", to.path().to_str().unwrap()];
    let (code, said) = fetch(&arguments);
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(result(2, to.path(), "--steps 3")["steps"], 3);
    assert_eq!(fetch(&arguments).0, Some(0), "a second time they are there");
}
