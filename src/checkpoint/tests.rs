use std::fs;
use std::io;
use std::path::Path;
use std::time::{Duration, SystemTime};

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use super::Boundary::{Created, DirectorySynced, Removed, Renamed, Synced, Wrote};
use super::*;
use crate::nn::{Initial, TensorSpec};

fn tensors() -> Vec<TensorSpec> {
    let spec = |name: &str, shape: &[usize]| TensorSpec {
        name: name.into(),
        shape: shape.to_vec(),
        initial: Initial::Uniform { bound: 1.0 },
    };
    vec![spec("conv1.weight", &[3, 2, 5, 5]), spec("conv1.bias", &[3]), spec("fc1.weight", &[7, 11])]
}

const SLOTS: [&str; 2] = ["exp_avg", "exp_avg_sq"];

/// A state in memory.
struct WholeState {
    contents: Contents,
    /// `[section × tensor]`
    values: Vec<Vec<f32>>,
}

impl StateSource for WholeState {
    fn read(&mut self, write: &mut dyn FnMut(&[f32]) -> io::Result<()>) -> io::Result<()> {
        self.values.iter().try_for_each(|values| write(values))
    }
}

impl WholeState {
    fn write(mut self, path: &Path) -> crate::Result<u64> {
        write(path, &self.contents.clone(), &mut self, &mut |_| ())
    }

    fn write_and_prune(mut self, path: &Path, keep: usize, report: &mut dyn FnMut(Boundary)) {
        write_and_prune(path, keep, &self.contents.clone(), &mut self, report).unwrap();
    }
}

fn state(step: u64) -> WholeState {
    let mut values = Vec::new();
    for section in 0..=SLOTS.len() as u64 {
        for spec in tensors() {
            let mut own = vec![0.0; spec.num_elements()];
            spec.initial.fill(step * 10 + section, &spec.name, 0, &mut own);
            values.push(own);
        }
    }
    let settings = |name: &str| [(name.to_owned(), serde_json::Value::from(step))].into();
    let description = Description {
        step,
        epoch: 3,
        loss: Some(0.1 + 0.2),
        step_in_epoch: 4,
        seed: u64::MAX,
        model: "lenet".into(),
        config: settings("ä"),
        options: settings("b"),
        written_by: settings("c"),
        network: Some("linear 10\n".repeat(9000)),
        standardise: Some(vec![[1.0, 1e-9, 0.5], [0.0, 0.0, 2.0]]),
    };
    WholeState { contents: Contents::new(&tensors(), &SLOTS, description), values }
}

fn write_to(directory: &Path, step: u64) -> std::path::PathBuf {
    let path = directory.join(file_name(step));
    state(step).write(&path).unwrap();
    path
}

#[test]
fn what_is_written_is_read_and_the_same_state_gives_the_same_bytes() {
    let directory = tempfile::tempdir().unwrap();
    let path = write_to(directory.path(), 5);
    let file = Checkpoint::open(&path).unwrap();
    let original = state(5);
    assert_eq!(file.description, original.contents.description);
    for (section, group) in ["model", "optimizer/exp_avg", "optimizer/exp_avg_sq"].iter().enumerate() {
        for (number, spec) in tensors().iter().enumerate() {
            let values = file.read(group, &spec.name, &spec.shape).unwrap();
            assert_eq!(values, original.values[3 * section + number], "{group} {}", spec.name);
        }
    }
    assert_eq!(file.tensors.len(), 9);
    let wrong = file.read("model", "conv1.bias", &[4]).unwrap_err().to_string();
    assert!(wrong.contains("its shape is [3], and the model's is [4]") && wrong.contains("step-00000005.h5"));
    let bytes = fs::read(&path).unwrap();
    write_to(directory.path(), 5);
    assert_eq!(fs::read(&path).unwrap(), bytes);
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
}

#[test]
fn the_name_appears_after_the_bytes_are_durable() {
    let directory = tempfile::tempdir().unwrap();
    for step in [1, 2] {
        write_to(directory.path(), step);
    }
    let (path, mut told) = (directory.path().join(file_name(3)), Vec::new());
    state(3).write_and_prune(&path, 2, &mut |boundary| {
        let renamed = matches!(boundary, Renamed | DirectorySynced | Removed);
        assert_eq!(path.exists(), renamed, "after {boundary:?}");
        told.push(boundary);
    });
    told.dedup();
    assert_eq!(told, [Created, Wrote, Synced, Renamed, DirectorySynced, Removed]);
    let steps: Vec<u64> = list(directory.path()).unwrap().into_iter().map(|(step, _)| step).collect();
    assert_eq!(steps, [2, 3]);
}

#[test]
fn a_parameter_that_is_nan_is_not_published() {
    let directory = tempfile::tempdir().unwrap();
    let mut bad = state(7);
    bad.values[8][5] = f32::INFINITY;
    bad.write(&directory.path().join(file_name(6))).unwrap();
    let mut bad = state(7);
    bad.values[2][5] = f32::NAN;
    let why = bad.write(&directory.path().join(file_name(7))).unwrap_err().to_string();
    assert!(why.contains("model/fc1.weight holds a value that is NaN or infinite"), "{why}");
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
}

#[test]
fn damaged_newer_files_do_not_crowd_out_sound_ones() {
    let directory = tempfile::tempdir().unwrap();
    for step in [10, 20] {
        write_to(directory.path(), step);
    }
    fs::write(directory.path().join(file_name(30)), "torn").unwrap();
    // left by a job that died, and by one that may still be writing
    for (name, age) in [(".step-00000040.h5.abc.tmp", 3600), (".step-00000041.h5.def.tmp", 60)] {
        let file = fs::File::create(directory.path().join(name)).unwrap();
        file.set_modified(SystemTime::now() - Duration::from_secs(age)).unwrap();
    }
    remove_temporaries(directory.path()).unwrap();
    fs::remove_file(directory.path().join(".step-00000041.h5.def.tmp")).unwrap();
    state(25).write_and_prune(&directory.path().join(file_name(25)), 1, &mut |_| ());
    let steps: Vec<u64> = list(directory.path()).unwrap().into_iter().map(|(step, _)| step).collect();
    assert_eq!((steps, fs::read_dir(directory.path()).unwrap().count()), (vec![25, 30], 2));
    assert_eq!(newest_sound(directory.path()).unwrap().checkpoint.unwrap().description.step, 25);
    // unreadable files are named too, whatever they hold
    std::os::unix::fs::symlink("nowhere", directory.path().join(file_name(50))).unwrap();
    fs::create_dir(directory.path().join(file_name(60))).unwrap();
    let found = newest_sound(directory.path()).unwrap();
    assert_eq!(found.checkpoint.unwrap().description.step, 25);
    let said: Vec<String> = found.damaged.iter().map(ToString::to_string).collect();
    assert!(said[0].contains("step-00000060.h5: it is a directory, a pipe or a device"), "{said:?}");
    assert!(said[1].contains("step-00000050.h5: No such file"), "{said:?}");
}

#[test]
fn a_failed_file_can_be_tried_again() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join(file_name(9));
    let mut writer = Writer::new(3);
    assert!(writer.wait().is_none() && writer.take().is_none());
    fs::create_dir(&path).unwrap();
    let WholeState { contents, values } = state(9);
    writer.start(path.clone(), contents.clone(), WholeState { contents, values }).unwrap();
    assert!(writer.wait().is_some_and(|outcome| outcome.is_err()));
    fs::remove_dir(&path).unwrap();
    writer.try_again().unwrap();
    assert!(writer.wait().is_some_and(|outcome| outcome.is_ok()));
    assert!(Checkpoint::open(&path).is_ok() && writer.take().is_some());
}

#[test]
fn a_state_of_other_lengths_is_not_published() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join(file_name(9));
    let mut short = state(9);
    short.values[1].pop();
    let why = short.write(&path).unwrap_err().to_string();
    assert!(why.contains("model/conv1.bias has 3 values, not 2"), "{why}");
    let mut few = state(9);
    few.values.pop();
    assert!(few.write(&path).unwrap_err().to_string().contains("fewer tensors"));
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
}

/// Damages a file in one of several ways, and names it.
fn damage(random: &mut ChaCha8Rng, path: &Path, bytes: &[u8], others: &[Vec<u8>]) -> String {
    let mut below = |limit: usize| random.next_u64() as usize % limit;
    let mut bytes = bytes.to_vec();
    let what = match below(10) {
        0 => {
            bytes.clear();
            "emptied".into()
        }
        1 => {
            bytes = others[below(others.len())].clone();
            "replaced".into()
        }
        2 | 3 => {
            bytes.truncate(below(bytes.len()));
            format!("cut to {} bytes", bytes.len())
        }
        4 => {
            bytes.extend(std::iter::repeat_n(0, 1 + below(5000)));
            "longer".into()
        }
        // the first bytes are HDF5's and the seal's, where most of the meaning is
        near => {
            let at = if near < 7 { below(4096) } else { below(bytes.len()) };
            bytes[at] ^= 1 << below(8);
            format!("byte {at} changed")
        }
    };
    fs::write(path, bytes).unwrap();
    what
}

#[test]
fn no_damage_passes_and_the_one_before_is_found() {
    let directory = tempfile::tempdir().unwrap();
    let sound = write_to(directory.path(), 50);
    let path = write_to(directory.path(), 100);
    let bytes = fs::read(&path).unwrap();
    let foreign = directory.path().join("foreign.h5");
    hdf5::File::create(&foreign).unwrap().create_group("model").unwrap();
    let others = [fs::read(&sound).unwrap(), fs::read(&foreign).unwrap(), b"text\n".to_vec(), vec![0; 600]];
    let mut random = ChaCha8Rng::seed_from_u64(4);
    for _ in 0..1000 {
        let what = damage(&mut random, &path, &bytes, &others);
        let Found { checkpoint, damaged } = newest_sound(directory.path()).unwrap();
        assert_eq!(checkpoint.map(|found| found.description.step), Some(50), "{what}");
        let [error] = damaged.as_slice() else { panic!("{what}: {damaged:?}") };
        assert!(error.to_string().contains("step-00000100.h5"), "{what}: {error}");
    }
    fs::write(&path, bytes).unwrap();
    assert_eq!(newest_sound(directory.path()).unwrap().checkpoint.unwrap().description.step, 100);
}

#[test]
fn every_byte_of_the_seal_counts() {
    let directory = tempfile::tempdir().unwrap();
    let path = write_to(directory.path(), 1);
    let bytes = fs::read(&path).unwrap();
    for at in 0..seal::LEN + 16 {
        let mut bytes = bytes.clone();
        bytes[at] ^= 0x20;
        fs::write(&path, bytes).unwrap();
        assert!(Checkpoint::open(&path).is_err(), "byte {at}");
    }
}

#[test]
fn a_foreign_file_gives_weights_but_no_checkpoint() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("weights.h5");
    let file = hdf5::File::create(&path).unwrap();
    let group = file.create_group("model").unwrap();
    group.new_dataset_builder().with_data(&[1.0_f64, 2.0]).create("fc1.bias").unwrap();
    drop((group, file));
    assert!(Checkpoint::open(&path).err().unwrap().to_string().contains("--init takes weights"));
    let weights = Checkpoint::open_weights(&path).unwrap();
    assert!(!weights.is_sealed());
    assert_eq!(weights.read("model", "fc1.bias", &[2]).unwrap(), [1.0, 2.0]);
}

#[test]
fn two_writers_of_one_directory_leave_sound_files() {
    let directory = tempfile::tempdir().unwrap();
    let write_all = || {
        for step in 1..40 {
            state(step).write_and_prune(&directory.path().join(file_name(step)), 2, &mut |_| ());
        }
    };
    std::thread::scope(|scope| {
        let writers = [scope.spawn(write_all), scope.spawn(write_all)];
        while !writers.iter().all(|writer| writer.is_finished()) {
            assert!(newest_sound(directory.path()).unwrap().damaged.is_empty());
        }
    });
    let Found { checkpoint, damaged } = newest_sound(directory.path()).unwrap();
    assert!(checkpoint.unwrap().description.step == 39 && damaged.is_empty());
}
