use std::fs;
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

fn snapshot(step: u64) -> Snapshot {
    let mut snapshot = Snapshot::new(&tensors(), &SLOTS).unwrap();
    for slot in [None, Some(0), Some(1)] {
        for (number, spec) in tensors().iter().enumerate() {
            let seed = step * 10 + slot.map_or(0, |slot| slot as u64 + 1);
            spec.initial.fill(seed, &spec.name, 0, snapshot.tensor_mut(slot, number));
        }
    }
    let settings = |name: &str| [(name.to_owned(), serde_json::Value::from(step))].into();
    snapshot.description = Description {
        step,
        epoch: 3,
        loss: Some(0.1 + 0.2),
        step_in_epoch: 4,
        seed: u64::MAX,
        model: "lenet".into(),
        config: settings("ä"),
        options: settings("b"),
        written_by: settings("c"),
    };
    snapshot
}

fn write_to(directory: &Path, step: u64) -> std::path::PathBuf {
    let path = directory.join(file_name(step));
    write(&path, &snapshot(step), &mut |_| ()).unwrap();
    path
}

#[test]
fn what_is_written_is_read_and_the_same_state_gives_the_same_bytes() {
    let directory = tempfile::tempdir().unwrap();
    let path = write_to(directory.path(), 5);
    let file = Checkpoint::open(&path).unwrap();
    let mut original = snapshot(5);
    assert_eq!(file.description, original.description);
    for (slot, group) in [(None, "model"), (Some(0), "optimizer/exp_avg"), (Some(1), "optimizer/exp_avg_sq")]
    {
        for (number, spec) in tensors().iter().enumerate() {
            let values = file.read(group, &spec.name, &spec.shape).unwrap();
            assert_eq!(values, original.tensor_mut(slot, number), "{group} {}", spec.name);
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
    write_and_prune(&path, 2, &snapshot(3), &mut |boundary| {
        let renamed = matches!(boundary, Renamed | DirectorySynced | Removed);
        assert_eq!(path.exists(), renamed, "after {boundary:?}");
        told.push(boundary);
    })
    .unwrap();
    told.dedup();
    assert_eq!(told, [Created, Wrote, Synced, Renamed, DirectorySynced, Removed]);
    let steps: Vec<u64> = list(directory.path()).unwrap().into_iter().map(|(step, _)| step).collect();
    assert_eq!(steps, [2, 3]);
}

#[test]
fn a_parameter_that_is_nan_is_not_published() {
    let directory = tempfile::tempdir().unwrap();
    let mut bad = snapshot(7);
    bad.tensor_mut(Some(1), 2)[5] = f32::INFINITY;
    write(&directory.path().join(file_name(6)), &bad, &mut |_| ()).unwrap();
    bad.tensor_mut(None, 2)[5] = f32::NAN;
    let why = write(&directory.path().join(file_name(7)), &bad, &mut |_| ()).unwrap_err().to_string();
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
    write_and_prune(&directory.path().join(file_name(25)), 1, &snapshot(25), &mut |_| ()).unwrap();
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
fn a_writer_that_is_dropped_ends_its_work() {
    let directory = tempfile::tempdir().unwrap();
    let mut writer = Writer::new(directory.path().to_owned(), 3, snapshot(0)).unwrap();
    // it only touches the memory at first, without an outcome
    assert!(writer.wait().is_none() && writer.take().is_some());
    writer.start(snapshot(9)).unwrap();
    drop(writer);
    assert!(Checkpoint::open(&directory.path().join(file_name(9))).is_ok());
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
            write_and_prune(&directory.path().join(file_name(step)), 2, &snapshot(step), &mut |_| ())
                .unwrap();
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
