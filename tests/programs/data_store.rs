//! Samples of packed files: the same bits wherever they are kept and however they are read, and
//! clear errors for files that are damaged, changed or unreadable.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::support::{Done, Job, mpiexec, until};
use ndarray::{Array1, Array2};
use tempfile::TempDir;

/// Features of a sample: a block of a megabyte holds 128 samples.
const FEATURES: usize = 2048;

fn job(ranks: usize, data: &Path, arguments: &str) -> Job {
    let job = mpiexec(ranks, env!("CARGO_BIN_EXE_sync_sgd")).args(["--threads", "1", "--model", "mlp"]);
    let job = job.args(["--hidden", "2", "--batch-size", "48", "--progress", "never"]);
    job.args([Path::new("--data"), data]).args(arguments.split_whitespace()).limit(Duration::from_secs(60))
}

fn run(ranks: usize, data: &Path, arguments: &str) -> Done {
    job(ranks, data, arguments).run()
}

/// Runs a job on which all ranks agree that it must be refused.
fn refused(ranks: usize, data: &Path, arguments: &str) -> Done {
    job(ranks, data, arguments).without_grace().run().expect(2)
}

fn digest(ranks: usize, data: &Path, arguments: &str) -> String {
    run(ranks, data, arguments).expect(0).digest()
}

/// Writes samples `first` to `first + num` of a set of classes, in packed chunks.
fn write(path: &Path, first: usize, num: usize) {
    write_chunks(path, first, num, false);
}

/// As [`write`], with checksums of the chunks if `has_checksums`.
fn write_chunks(path: &Path, first: usize, num: usize, has_checksums: bool) {
    let x = Array2::from_shape_fn((num, FEATURES), |(row, column)| {
        let row = first + row;
        ((row * 31 + column * 7 + row * column) % 97) as f32 / 50.0 - 1.0
    });
    let y = Array1::from_shape_fn(num, |row| ((first + row) % 3) as i64);
    let file = hdf5::File::create(path).unwrap();
    let packed = file.new_dataset_builder().with_data(&x).chunk((32, FEATURES)).shuffle().deflate(1);
    let packed = if has_checksums { packed.fletcher32() } else { packed };
    packed.create("x").unwrap();
    file.new_dataset_builder().with_data(&y).create("y").unwrap();
}

fn folder() -> TempDir {
    tempfile::tempdir().unwrap()
}

fn packed(folder: &TempDir, num: usize) -> PathBuf {
    let path = folder.path().join("data.h5");
    write(&path, 0, num);
    path
}

#[test]
fn the_same_bits_wherever_samples_are_kept() {
    let folder = folder();
    let path = packed(&folder, 1500);
    // 29 steps in an epoch, and a last batch of 6 samples
    let common = "--test-fraction 0.1 --steps 70 --standardise features --quiet";
    for ranks in [1, 2, 3, 4] {
        let on = digest(ranks, &path, &format!("{common} --data-store on"));
        let full = digest(ranks, &path, &format!("{common} --data-store off --shuffle full"));
        assert_eq!(on, full, "{ranks} ranks");
        let blocks = format!("{common} --shuffle blocks --shuffle-window 2");
        let on = digest(ranks, &path, &format!("{blocks} --data-store on"));
        let off = digest(ranks, &path, &format!("{blocks} --data-store off"));
        assert_eq!(on, off, "{ranks} ranks");
        assert_ne!(on, full);
    }
    let kept = run(2, &path, "--steps 1 --data-store on --shuffle-window 2").expect(0);
    kept.says_once("--shuffle-window has no effect: all samples are kept in memory");
    let read = run(2, &path, "--steps 1 --data-store off --shuffle-window 2").expect(0);
    assert!(!read.stderr.contains("has no effect"), "{}", read.describe());
}

#[test]
fn a_run_resumes_in_the_middle_of_an_epoch() {
    let folder = folder();
    let path = packed(&folder, 1500);
    for (ranks, arguments) in [(1, "--data-store on"), (3, "--data-store off --shuffle-window 2")] {
        let arguments = &format!("{arguments} --learning-rate-schedule constant");
        let whole = digest(ranks, &path, &format!("--steps 70 {arguments}"));
        let directory = folder.path().join(format!("checkpoints-{ranks}"));
        let common = format!("{arguments} --checkpoint-dir {}", directory.display());
        for steps in [13, 45, 70] {
            let done = run(ranks, &path, &format!("--steps {steps} {common}")).expect(0);
            assert_eq!(done.stderr.contains("have not changed since"), steps > 13, "{}", done.describe());
            assert!(steps < 70 || done.digest() == whole, "{}", done.describe());
        }
        let other = format!("--steps 80 {common} --shuffle blocks --shuffle-window 3");
        refused(ranks, &path, &other).says_once("--shuffle-window");
    }
    // the order is that of the checkpoint, also where samples are kept elsewhere than before
    let constant = "--learning-rate-schedule constant";
    for (first, then) in [("on", "off"), ("off", "on")] {
        let window = if first == "off" { "--shuffle-window 2" } else { "" };
        let whole = digest(2, &path, &format!("--steps 50 {constant} --data-store {first} {window}"));
        let directory = folder.path().join(first);
        let common = format!("{constant} {window} --checkpoint-dir {}", directory.display());
        run(2, &path, &format!("--steps 20 --data-store {first} {common}")).expect(0);
        let file = directory.join("step-00000020.h5");
        for from in [format!("auto {common}"), format!("{} {constant} {window}", file.display())] {
            let again = format!("--steps 50 --data-store {then} --resume {from}");
            let resumed = run(3, &path, &again).expect(0);
            assert_eq!(resumed.digest(), whole, "{}", resumed.describe());
            let slow = resumed.stderr.contains("each is read by itself");
            assert_eq!(slow, first == "on", "{}", resumed.describe());
        }
    }
    // a file that was written again is looked through again
    write(&path, 0, 1500);
    let directory = folder.path().join("checkpoints-1");
    let again = run(1, &path, &format!("--steps 75 --checkpoint-dir {}", directory.display())).expect(0);
    assert!(!again.stderr.contains("have not changed since"), "{}", again.describe());
}

#[test]
fn several_files_are_one_set_in_the_order_of_their_names() {
    let folder = folder();
    let whole = packed(&folder, 700);
    for (name, first, num) in [("run-1.h5", 0, 300), ("run-2.h5", 300, 150), ("run-3.h5", 450, 250)] {
        write(&folder.path().join(name), first, num);
    }
    let pattern = folder.path().join("run-*.h5");
    for store in ["on", "off"] {
        let arguments = format!("--steps 20 --shuffle full --data-store {store}");
        assert_eq!(digest(2, &pattern, &arguments), digest(2, &whole, &arguments));
    }
    let tested = folder.path().join("test.h5");
    write(&tested, 700, 100);
    let done = run(2, &pattern, &format!("--steps 20 --test-data {}", tested.display())).expect(0);
    assert!(done.stderr.contains("700 samples to train, 100 to test"), "{}", done.describe());
    assert!(done.result()["accuracy"].is_number());
    let data_wait = done.result()["data_wait"].as_f64().unwrap();
    assert!((0.0..0.5).contains(&data_wait), "{data_wait}");
    refused(2, &folder.path().join("none-*.h5"), "").says_once("no file matches this pattern");
    // another number of features, and another type
    let odd = folder.path().join("run-4.h5");
    let file = hdf5::File::create(&odd).unwrap();
    file.new_dataset_builder().with_data(&Array2::<f32>::ones((5, 7))).create("x").unwrap();
    file.new_dataset_builder().with_data(&Array1::from(vec![0_i64, 1, 2, 0, 1])).create("y").unwrap();
    drop(file);
    let refused = refused(2, &pattern, "--steps 20");
    refused.says_once("run-4.h5: it has inputs of 7 features f32 and targets of 1 i64, but");
}

#[test]
fn a_trace_shows_how_samples_are_read() {
    let folder = folder();
    let (path, trace) = (packed(&folder, 1500), folder.path().join("trace.json"));
    let arguments = format!("--steps 40 --data-store off --shuffle-window 2 --trace {}", trace.display());
    run(2, &path, &arguments).expect(0);
    let text = fs::read_to_string(&trace).unwrap();
    for name in ["unpack samples", "read samples", "\"loader\""] {
        assert!(text.contains(name), "{name} is missing");
    }
}

#[test]
fn what_cannot_be_kept_is_refused_with_the_numbers() {
    let folder = folder();
    let path = packed(&folder, 300);
    let digits = refused(1, Path::new("digits"), "--data-store on");
    digits.says_once("--data-store: it has no effect in this run: it is for HDF5 files");
    refused(1, &path, "--shuffle full --shuffle-window 3").says_once("it is for --shuffle blocks");
    refused(1, &path, "--shuffle-window 0").says_once("--shuffle-window");
}

// --- files that are damaged, changed or unreadable

/// Returns the place of the middle of a chunk of `/x`.
fn middle_of_chunk(path: &Path, chunk: usize) -> (u64, u64) {
    // a process that another test has just started may still hold the lock of the file
    until(|| hdf5::File::open(path).is_ok());
    let file = hdf5::File::open(path).unwrap();
    let info = file.dataset("x").unwrap().chunk_info(chunk).unwrap();
    (info.addr + info.size / 2, info.size)
}

/// Overwrites a few bytes of a file, and leaves its times as they were.
fn damage(path: &Path, (at, _): (u64, u64)) {
    use std::os::unix::fs::FileExt as _;
    let file = File::options().read(true).write(true).open(path).unwrap();
    let changed = file.metadata().unwrap().modified().unwrap();
    file.write_all_at(b"damaged!", at).unwrap();
    file.set_modified(changed).unwrap();
}

#[test]
fn a_damaged_chunk_is_named_before_training() {
    for (store, has_checksums) in [("on", true), ("on", false), ("off", true), ("off", false)] {
        let folder = folder();
        let path = folder.path().join("data.h5");
        write_chunks(&path, 0, 700, has_checksums);
        damage(&path, middle_of_chunk(&path, 9));
        for ranks in [1, 3] {
            let done = refused(ranks, &path, &format!("--data-store {store}"));
            done.says_once("data.h5: /x, rows ");
        }
    }
}

#[test]
fn a_file_that_is_damaged_or_changes_during_training_ends_the_job() {
    for (ranks, in_place, order) in [
        (1, true, "--shuffle-window 1"),
        (2, true, "--shuffle-window 1"),
        (3, false, "--shuffle-window 1"),
        // every rank reads for itself, and finds the same
        (3, false, "--shuffle full"),
    ] {
        let folder = folder();
        let path = packed(&folder, 1500);
        let chunks: Vec<(u64, u64)> = (0..46).map(|chunk| middle_of_chunk(&path, chunk)).collect();
        let [metrics, checkpoints] = ["metrics.csv", "checkpoints"].map(|name| folder.path().join(name));
        // a checkpoint is nearly always under way
        let arguments = format!(
            "--data-store off {order} --pace 5ms --metrics {} --hidden 256,256 --checkpoint-every 1 \
             --checkpoint-dir {}",
            metrics.display(),
            checkpoints.display()
        );
        let job = job(ranks, &path, &arguments).limit(Duration::from_secs(30));
        let done = job.run_with(|_| {
            until(|| fs::read_to_string(&metrics).is_ok_and(|text| text.lines().count() > 4));
            if in_place {
                chunks.iter().for_each(|chunk| damage(&path, *chunk));
            } else {
                write(&folder.path().join("other.h5"), 0, 1400);
                fs::rename(folder.path().join("other.h5"), &path).unwrap();
            }
        });
        let done = done.expect(2);
        let why = if in_place { "/x, rows " } else { "another file has taken its place" };
        done.says_once(why).says_once("error: ");
        let names = fs::read_dir(&checkpoints).unwrap().map(|entry| entry.unwrap().file_name());
        let left: Vec<_> = names.filter(|name| name.to_string_lossy().starts_with('.')).collect();
        assert!(left.is_empty(), "the checkpoint under way is not whole: {left:?}");
    }
}

#[test]
fn a_missing_filter_is_named() {
    let folder = folder();
    let path = packed(&folder, 300);
    let mut bytes = fs::read(&path).unwrap();
    // the number of a filter stands eight bytes before its name in the header of a dataset
    let at = bytes.windows(8).position(|window| window == b"deflate\0").unwrap() - 8;
    assert_eq!(bytes[at..at + 2], [1, 0]);
    bytes[at..at + 2].copy_from_slice(&32_015_u16.to_le_bytes());
    fs::write(&path, bytes).unwrap();
    let done = refused(2, &path, "");
    done.says_once("/x is stored with zstd (filter 32015), which this HDF5 library does not have");
    done.says_once("HDF5_PLUGIN_PATH");
}
