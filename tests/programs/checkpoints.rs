//! Checkpoints as a user meets them: refusals, recoveries, and reading by other software.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::{Job, Mounted, data, directory, mpiexec, say_skipped, until};
use phalanx::checkpoint::{self, Boundary, Contents, Description, StateSource, write_and_prune};
use phalanx::nn::{Initial, TensorSpec};

fn sync_sgd(ranks: usize, arguments: &str) -> Job {
    let job = mpiexec(ranks, env!("CARGO_BIN_EXE_sync_sgd")).args(["--threads", "1", "--eval-every", "0"]);
    job.args(arguments.split_whitespace())
}

fn steps_in(directory: &Path) -> Vec<u64> {
    let found = checkpoint::list(directory).expect("the directory can be read");
    found.into_iter().map(|(step, _)| step).collect()
}

#[test]
fn the_newest_are_kept_and_a_finished_run_stays_finished() {
    let (directory, path) = directory();
    let arguments = format!("--steps 45 --checkpoint-dir {path}/new/runs --checkpoint-every 10 --keep 2");
    let first = sync_sgd(2, &arguments).run().expect(0);
    let checkpoints = directory.path().join("new/runs");
    assert_eq!(steps_in(&checkpoints), [40, 45]);
    let again = sync_sgd(3, &arguments).run().expect(0);
    again.says_once("resuming after step 45");
    assert_eq!((first.digest(), Some(45)), (again.digest(), again.result()["resumed_after"].as_u64()));
    // nothing is written without a directory; with one, a file at every interval of time
    let by_time = format!("--steps 300 --checkpoint-dir {path}/timed --checkpoint-every 50ms --keep 0");
    sync_sgd(2, &by_time).run().expect(0);
    let steps = steps_in(&directory.path().join("timed"));
    assert!(steps.len() > 2 && steps.last() == Some(&300), "{steps:?}");
}

#[test]
fn another_run_is_refused_with_the_difference() {
    let (_directory, path) = directory();
    let base = format!("--model mlp --hidden 20 --steps 4 --checkpoint-dir {path}");
    sync_sgd(1, &base).run().expect(0);
    for (change, said) in [
        ("--seed 2", "--seed was 1, is 2"),
        ("--hidden 21", "--hidden was [20], is [21]"),
        ("--activation tanh", "--activation was relu, is tanh"),
        ("--model lenet", "--model was mlp, is lenet"),
        ("--batch-size 64", "--batch-size was 128, is 64"),
        ("--optimizer adam", "--optimizer was sgd, is adam"),
        ("--standardise none", "--standardise was preset, is none"),
        ("--data synthetic --synthetic-samples 9000", "checksum of the data was"),
        ("--data synthetic --synthetic-samples 9001", "training samples was 9000, is 9001"),
    ] {
        // lenet does not take the sizes of an mlp
        let base = if change == "--model lenet" { base.replace("--hidden 20", "") } else { base.clone() };
        let done = sync_sgd(2, &format!("{base} {change}")).run().expect(2);
        done.says_once("it belongs to another run").says_once(said).says_once("step-00000004.h5");
    }
    // these may change, and the change is logged
    let changed = format!("{base} --steps 6 --learning-rate 0.01 --micro-batches 2 --log-every 1");
    let done = sync_sgd(2, &changed).run().expect(0);
    done.says_once("resuming after step 4").says_once("--learning-rate was 0.05, is 0.01");
    done.says_once("steps in all was 4, is 6");
}

#[test]
fn a_directory_with_newer_checkpoints_is_not_written_by_another_branch() {
    let (_directory, path) = directory();
    let base = format!("--steps 20 --checkpoint-dir {path}/a --checkpoint-every 10");
    sync_sgd(1, &base).run().expect(0);
    for resume in ["never".to_owned(), format!("{path}/a/step-00000010.h5")] {
        let done = sync_sgd(2, &format!("{base} --resume {resume}")).run().expect(2);
        done.says_once("it holds a checkpoint of step 20 already");
    }
    // the directory of another run, whose checkpoints would be removed one by one
    let other = format!("--steps 40 --resume {path}/a/step-00000020.h5 --checkpoint-dir {path}/other");
    sync_sgd(1, &format!("--steps 10 --seed 8 --checkpoint-dir {path}/other")).run().expect(0);
    let done = sync_sgd(2, &other).run().expect(2);
    done.says_once(
        "it holds a checkpoint of step 10, of this run or another; give a new directory, or --resume auto",
    );
    assert_eq!(steps_in(Path::new(&format!("{path}/other"))), [10]);
    let whole = sync_sgd(1, "--steps 20").run().expect(0);
    let branch =
        sync_sgd(1, &format!("--steps 20 --resume {path}/a/step-00000010.h5 --checkpoint-dir {path}/b"))
            .run();
    assert_eq!(branch.expect(0).digest(), whole.digest());
    let branch = sync_sgd(1, &format!("--steps 20 --resume {path}/a")).run().expect(0);
    assert_eq!(branch.digest(), whole.digest());
    for option in ["--resume", "--init"] {
        let done = sync_sgd(2, &format!("{option} missing.h5")).run().expect(2);
        done.says_once(&format!("{option} missing.h5: No such file"));
    }
    sync_sgd(2, "--resume /").run().expect(2).says_once("the directory holds no checkpoint");
    // a run that resumes from elsewhere writes at once what the next start can resume from
    let began = format!("--steps 10 --resume {path}/a/step-00000010.h5 --checkpoint-dir {path}/d");
    sync_sgd(2, &began).run().expect(0);
    assert_eq!(steps_in(Path::new(&format!("{path}/d"))), [10]);
    let weights = format!("--steps 10 --export {path}/w.h5");
    sync_sgd(1, &weights).run().expect(0);
    let done = sync_sgd(2, &format!("--steps 20 --resume {path}/w.h5")).run().expect(2);
    done.says_once("it has no /optimizer/momentum_buffer: it holds weights alone");
    let file = format!("{path}/file");
    fs::write(&file, "text").expect("a file can be written");
    sync_sgd(2, &format!("--resume {file}")).run().expect(2).says_once("it is not a Phalanx checkpoint");
    sync_sgd(2, &format!("--checkpoint-dir {file}")).run().expect(2).says_once("Not a directory");
    sync_sgd(2, "--checkpoint-every 10").run().expect(2).says_once("  --checkpoint-dir <DIR>");
    let zero = format!("--checkpoint-dir {path}/c --checkpoint-every 0");
    sync_sgd(2, &zero).run().expect(2).says_once("a number of steps such as 500");
}

#[test]
fn a_damaged_checkpoint_is_named_and_the_one_before_it_used() {
    let (directory, path) = directory();
    let arguments = format!("--steps 30 --checkpoint-dir {path} --checkpoint-every 10");
    let first = sync_sgd(2, &arguments).run().expect(0);
    let newest = directory.path().join("step-00000030.h5");
    let mut bytes = fs::read(&newest).expect("it can be read");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&newest, bytes).expect("it can be written");
    // a later start passes it over, so that a run may resume from a checkpoint before it
    let before = format!("{arguments} --steps 20 --resume {path}/step-00000020.h5");
    sync_sgd(2, &before).run().expect(0).says_once("resuming after step 20");
    let again = sync_sgd(2, &arguments).run().expect(0);
    again.says_once("step-00000030.h5: it is damaged").says_once("resuming after step 20");
    assert_eq!(again.digest(), first.digest());
    // naming the directory skips damaged files too, and an unreadable file counts as damaged
    fs::create_dir(directory.path().join("step-00000040.h5")).expect("a directory can be made");
    let again = sync_sgd(2, &format!("{arguments} --resume {path}")).run().expect(0);
    again
        .says_once("step-00000040.h5: it is a directory, a pipe or a device")
        .says_once("resuming after step 30");
    fs::remove_dir(directory.path().join("step-00000040.h5")).expect("it can be removed");
    for step in [10, 20, 30] {
        fs::write(directory.path().join(checkpoint::file_name(step)), "").expect("it can be written");
    }
    let done = sync_sgd(2, &arguments).run().expect(2);
    done.says_once("none of its 3 checkpoints is sound");
}

#[test]
fn weights_alone_go_out_and_come_in() {
    let (directory, path) = directory();
    // a file of the working directory
    let exported = sync_sgd(2, "--steps 5 --export w.h5").directory(directory.path()).run().expect(0);
    assert!(!exported.stderr.contains("WARN"), "{}", exported.describe());
    let started = sync_sgd(3, &format!("--steps 0 --init {path}/w.h5")).run().expect(0);
    assert_eq!(started.digest(), exported.digest());
    let file = hdf5::File::open(directory.path().join("w.h5")).expect("it is an HDF5 file");
    assert_eq!(file.member_names().expect("it has members"), ["model", "network", "standardise"]);
    drop(file);
    let done = sync_sgd(2, &format!("--model deep-mlp --init {path}/w.h5")).run().expect(2);
    done.says_once("it has no tensor /model/w.0").says_once("w.h5");
    let done = sync_sgd(2, &format!("--model mlp --init {path}/w.h5")).run().expect(2);
    done.says_once("/model/fc1.weight has the shape [50, 320], and [128, 784] is wanted");
    // a file of another program
    let theirs = directory.path().join("theirs.h5");
    let file = hdf5::File::create(&theirs).expect("it can be made");
    let model = file.create_group("model").expect("a group can be made");
    let weight = ndarray::Array2::<f64>::from_elem((10, 784), 0.5);
    model.new_dataset_builder().with_data(&weight).create("fc1.weight").expect("a dataset can be written");
    model.new_dataset_builder().with_data(&[0.0; 10]).create("fc1.bias").expect("a dataset can be written");
    drop((model, file));
    let arguments = format!("--model mlp --hidden none --steps 1 --init {}", theirs.display());
    sync_sgd(2, &arguments).run().expect(0).says_once("which has no checksums");
    sync_sgd(2, &format!("--export {path}"))
        .run()
        .expect(2)
        .says_once("it is a directory; give the name of a file");
}

#[test]
fn a_full_disk_fails_the_checkpoint_and_not_the_training() {
    let (directory, path) = directory();
    let Some(mounted) = Mounted::new(&path, 448) else { return };
    let filler = directory.path().join("filler");
    fs::write(&filler, vec![0; 300 << 10]).expect("there is room for it");
    let metrics = tempfile::NamedTempFile::new().expect("a file can be made");
    let arguments = format!(
        "--steps 1500 --checkpoint-dir {path} --checkpoint-every 300 --keep 1 --metrics {}",
        metrics.path().display()
    );
    let done = sync_sgd(2, &arguments).run_with(|_| {
        until(|| fs::read_to_string(metrics.path()).is_ok_and(|rows| rows.lines().count() > 400));
        fs::remove_file(&filler).expect("it can be removed");
    });
    let steps = steps_in(directory.path());
    let num_files = fs::read_dir(directory.path()).expect("it is a directory").count();
    drop(mounted);
    let done = done.expect(0);
    let what =
        "No space left on device (os error 28); training continues, and the next checkpoint will be tried";
    done.says_once(&format!("writing {path}/step-00000300.h5: {what}"));
    assert!(!done.stderr.contains("HDF5"), "{}", done.describe());
    assert_eq!((steps, num_files), (vec![1500], 1), "{}", done.describe());
}

#[test]
fn the_last_checkpoint_is_tried_twice() {
    let (directory, path) = directory();
    let (metrics, checkpoints) = (directory.path().join("m.csv"), directory.path().join("checkpoints"));
    let arguments = format!(
        "--steps 1500 --checkpoint-dir {path}/checkpoints --checkpoint-every 1400 --metrics {path}/m.csv"
    );
    let done = sync_sgd(2, &arguments).run_with(|_| {
        until(|| fs::metadata(&metrics).is_ok_and(|file| file.len() > 1000));
        fs::remove_dir_all(&checkpoints).expect("it can be removed");
        // the directory cannot be created while a file has its name
        fs::write(&checkpoints, "").expect("it can be written");
    });
    let done = done.expect(1);
    done.says_once("; training continues, and the next checkpoint will be tried");
    done.says_once("; trying once more, because this is the last checkpoint");
    assert_eq!(done.result()["steps"], 1500, "{}", done.describe());
}

/// A state of one tensor and one slot, all of the same value.
struct FlatState(f32);

impl StateSource for FlatState {
    fn read(&mut self, write: &mut dyn FnMut(&[f32]) -> io::Result<()>) -> io::Result<()> {
        let values = vec![self.0; 700 * 1000];
        (0..2).try_for_each(|_| write(&values))
    }
}

fn write_flat_state(path: &Path, step: u64, report: &mut dyn FnMut(Boundary)) {
    let initial = Initial::Normal { deviation: 1.0 };
    let spec = TensorSpec { name: "fc1.weight".into(), shape: vec![700, 1000], initial };
    let description = Description { step, ..Description::default() };
    let contents = Contents::new(std::slice::from_ref(&spec), &["momentum_buffer"], description);
    write_and_prune(path, 1, &contents, &mut FlatState(step as f32), report).expect("it can be written");
}

/// Dies after a number of actions: the process that
/// [`a_writer_that_dies_anywhere_leaves_a_sound_checkpoint`] starts, not a test.
#[test]
#[ignore = "a part of another test"]
fn writer_that_dies() {
    let variable = |name: &str| std::env::var(name).expect("the other test sets it");
    let mut left: usize = variable("PHALANX_DIE_AFTER").parse().expect("it is a number");
    let path = PathBuf::from(variable("PHALANX_DIE_WRITING"));
    write_flat_state(&path, 2, &mut |_| {
        left -= 1;
        if left == 0 {
            std::process::abort();
        }
    });
}

#[test]
fn a_writer_that_dies_anywhere_leaves_a_sound_checkpoint() {
    let program = std::env::current_exe().expect("a test has a path");
    let mut was_renamed = Vec::new();
    for die_after in 1.. {
        let (directory, _) = directory();
        let path = |step| directory.path().join(checkpoint::file_name(step));
        write_flat_state(&path(1), 1, &mut |_| ());
        let output = Command::new(&program)
            .args(["--exact", "checkpoints::writer_that_dies", "--ignored"])
            .env("PHALANX_DIE_AFTER", die_after.to_string())
            .env("PHALANX_DIE_WRITING", path(2))
            .output()
            .expect("it can be started");
        let found = checkpoint::newest_sound(directory.path()).expect("the directory can be read");
        assert!(found.damaged.is_empty());
        let step = found.checkpoint.expect("one is sound").description.step;
        was_renamed.push(step == 2);
        if output.status.success() {
            break;
        }
    }
    // created, six blocks and what is between them, synced: then the file has its name
    assert!(was_renamed.len() > 10 && was_renamed.is_sorted(), "{was_renamed:?}");
    assert!(was_renamed.iter().filter(|renamed| **renamed).count() == 4, "{was_renamed:?}");
}

/// Returns a Python with h5py and NumPy, if there is one.
fn python() -> Option<String> {
    let python = std::env::var("PHALANX_PYTHON").unwrap_or_else(|_| "python3".into());
    let found = Command::new(&python).args(["-c", "import h5py, numpy"]).output();
    if found.is_ok_and(|output| output.status.success()) {
        return Some(python);
    }
    say_skipped(&format!("{python} has no h5py and NumPy; $PHALANX_PYTHON names another"));
    None
}

#[test]
fn h5py_reads_a_checkpoint_whose_weights_give_the_same_outputs() {
    let Some(python) = python() else { return };
    let (directory, path) = directory();
    data::table_of(&directory.path().join("data.h5"), 40);
    let data =
        format!("--data {path}/data.h5 --test-fraction 0.25 --model mlp --hidden 12,9 --activation relu");
    let arguments = format!("{data} --epochs 3 --batch-size 8 --optimizer adam --checkpoint-dir {path}/c");
    let result = sync_sgd(2, &arguments).run().expect(0).result();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/forward.py");
    let output = Command::new(python)
        .args([
            script.as_os_str(),
            format!("{path}/c/step-00000012.h5").as_ref(),
            format!("{path}/data.h5").as_ref(),
        ])
        .output()
        .expect("Python can be started");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    let loss: f64 = text.trim().parse().expect("it prints a number");
    let expected = result["test_loss"].as_f64().expect("there is a test loss");
    assert!((loss - expected).abs() < 1e-6, "{loss} in NumPy, {expected} here");
}

fn inspect(words: &[&str]) -> (Option<i32>, String) {
    let output =
        Command::new(env!("CARGO_BIN_EXE_inspect")).args(words).output().expect("inspect can be started");
    let said =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    (output.status.code(), said)
}

#[test]
fn inspect_shows_verifies_and_compares() {
    let (directory, path) = directory();
    let result = sync_sgd(2, &format!("--steps 6 --checkpoint-dir {path} --checkpoint-every 3"))
        .run()
        .expect(0)
        .result();
    let [three, six] = [3, 6].map(|step| format!("{path}/{}", checkpoint::file_name(step)));
    let (code, said) = inspect(&[&six]);
    assert_eq!(code, Some(0), "{said}");
    let digest = result["parameters_digest"].as_str().expect("a digest is a string");
    for text in [
        "lenet",
        "step 6: 0 epochs and 6 steps",
        digest,
        "--seed 1",
        "10 × 1 × 5 × 5",
        "every checksum is right",
    ] {
        assert!(said.contains(text), "{text} in {said}");
    }
    let (code, said) = inspect(&[&six, &six, "--tolerance", "0"]);
    assert!(code == Some(0) && said.contains("the same tensors, bit for bit"), "{said}");
    let (code, said) = inspect(&[&three, &six, "--tolerance", "1e-9"]);
    assert!(
        code == Some(1) && said.contains("/optimizer/momentum_buffer/fc1.bias") && said.contains("differ"),
        "{said}"
    );
    // an infinity in one of the files is beyond any tolerance, in whatever order
    let [finite, infinite] = [0.5, f64::INFINITY].map(|value| {
        let file = format!("{path}/{value}.h5");
        let written = hdf5::File::create(&file).expect("it can be made");
        let model = written.create_group("model").expect("a group can be made");
        model.new_dataset_builder().with_data(&[value, 1.0]).create("w").expect("a dataset can be written");
        file
    });
    for files in [[&finite, &infinite], [&infinite, &finite]] {
        let (code, said) = inspect(&[files[0], files[1], "--tolerance", "1"]);
        assert_eq!(code, Some(1), "{said}");
    }
    let (code, said) = inspect(&[&path]);
    assert!(code == Some(0) && said.lines().count() == 2 && said.contains(digest), "{said}");
    let mut bytes = fs::read(&six).expect("it can be read");
    bytes[100_000] ^= 4;
    fs::write(directory.path().join("step-00000006.h5"), bytes).expect("it can be written");
    let (code, said) = inspect(&[&six]);
    assert!(code == Some(2) && said.contains("step-00000006.h5: it is damaged"), "{said}");
    let (code, said) = inspect(&[&path]);
    assert!(code == Some(1) && said.lines().count() == 2 && said.contains("it is damaged"), "{said}");
}
