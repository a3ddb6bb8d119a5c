//! Samples of files reach every rank as they are in the file, wherever they are kept: on one node or
//! several, all of them or a window, from the first step or from the middle of an epoch.

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use phalanx::comm::{Communicator, Operation, World};
use phalanx::dataset::{BlockOrder, Dataset, Hdf5Names, Hdf5Set, Order, SampleBlocks, Sampler};
use phalanx::parallel::batch::{BatchDivision, Summation};
use phalanx::store::{StoreRanks, StoredSet, WindowSet};

const FEATURES: usize = 3;
/// The samples of the first file and of the second.
const SAMPLES: [usize; 2] = [211, 90];
/// The samples that are trained with: the rest is left alone.
const USED: std::ops::Range<usize> = 7..290;

/// Returns the value of a feature of a sample.
fn value(sample: usize, feature: usize) -> f32 {
    (sample * FEATURES + feature) as f32
}

/// Writes two files whose chunks do not divide them, on rank 0 of `all`, and opens them everywhere. Their
/// samples begin with number `first`. The folder is removed with the value that rank 0 gets.
fn files(all: &Communicator, first: usize) -> (Hdf5Set, Option<tempfile::TempDir>) {
    let folder = all.is_root().then(|| tempfile::tempdir().unwrap());
    let path = folder.as_ref().map_or(Vec::new(), |folder| folder.path().to_str().unwrap().into());
    let path = PathBuf::from(String::from_utf8(all.broadcast_bytes(path, 0).unwrap()).unwrap());
    let paths = ["a.h5", "b.h5"].map(|name| path.join(name));
    if all.is_root() {
        write(&paths[0], first, SAMPLES[0]);
        write(&paths[1], first + SAMPLES[0], SAMPLES[1]);
    }
    all.barrier();
    let names = Hdf5Names { inputs: "x".into(), targets: Some("y".into()), may_lack_targets: false };
    (Hdf5Set::open("two files", &paths, &names).unwrap(), folder)
}

fn write(path: &Path, first: usize, num: usize) {
    let file = hdf5::File::create(path).unwrap();
    let x = ndarray::Array2::from_shape_fn((num, FEATURES), |(row, feature)| value(first + row, feature));
    let y = ndarray::Array1::from_shape_fn(num, |row| (first + row) as f64);
    file.new_dataset_builder().with_data(&x).chunk((13, FEATURES)).deflate(1).create("x").unwrap();
    file.new_dataset_builder().with_data(&y).create("y").unwrap();
}

/// Arrangements of the ranks: this rank's node, its replica and the number of replicas.
fn arrangements(all: &Communicator) -> Vec<(usize, (usize, usize))> {
    let (rank, size) = (all.rank(), all.size());
    let mut found = vec![(0, (rank, size)), (rank, (rank, size)), (rank % 2, (rank, size))];
    if size.is_multiple_of(2) {
        // two ranks of a replica, on one node and on two
        found.extend([rank / 2, rank % 2].map(|node| (node, (rank / 2, size / 2))));
    }
    found
}

/// Takes steps `first` to `last` and checks every sample that this rank, of replica `replica`, reads; counts
/// the samples of epoch 1 over all replicas.
fn take_steps(
    all: &Communicator,
    division: BatchDivision,
    replica: usize,
    set: &mut dyn Dataset,
    sampler: &Sampler,
    steps: std::ops::Range<u64>,
) {
    let mut counts = vec![0_i64; set.num_samples()];
    let mut samples = Vec::new();
    for step in steps.clone() {
        let rows = |len: usize, replica: usize| division.rows(len, replica);
        set.begin_step(sampler, &rows, step, Some(step + 1).filter(|next| *next < steps.end)).unwrap();
        let mut own = Vec::new();
        for rows in division.rows(sampler.batch_len(step), replica) {
            sampler.samples(step, rows, &mut samples);
            own.append(&mut samples);
        }
        let samples = &own;
        let (mut inputs, mut targets) = (vec![f32::NAN; own.len() * FEATURES], vec![f32::NAN; own.len()]);
        set.read(samples, &mut inputs, &mut targets).unwrap();
        for (at, sample) in samples.iter().enumerate() {
            let number = USED.start + sample;
            let row = &inputs[at * FEATURES..][..FEATURES];
            let expected = [0, 1, 2].map(|feature| value(number, feature));
            assert_eq!((row, targets[at]), (&expected[..], number as f32), "step {step}, sample {sample}");
            counts[*sample] += i64::from(sampler.locate(step).0 == 1);
        }
    }
    set.finish();
    all.all_reduce(&mut counts, Operation::Sum).unwrap();
    let times = (all.size() / division.num_replicas()) as i64;
    assert!(counts.iter().all(|count| *count == times), "{counts:?}");
}

pub fn kept_samples(world: &World) {
    let all = world.communicator();
    let ((own, _folder), (mut others, _other_folder)) = (files(all, 0), files(all, 1000));
    let files = Rc::new(RefCell::new(own));
    // small blocks, as the files are small
    let blocks = SampleBlocks::every(9, USED.len());
    for (node, replica) in arrangements(all) {
        let node = all.split(node, all.rank()).unwrap();
        let data = all.split(all.rank() % (all.size() / replica.1), replica.0).unwrap();
        let ranks = StoreRanks::new(all.duplicate(), node, &data).unwrap();
        let (replica, num_replicas) = replica;
        assert_eq!(ranks.replicas[all.rank()], replica);
        let canonical = Summation::Canonical { num_leaves: 16 };
        // rows of whole leaves, and rows that do not follow one another
        let divisions = [
            BatchDivision::new(canonical, num_replicas, 1, false),
            BatchDivision::new(Summation::ByLayout, num_replicas, 3, true),
        ];
        for (batch, division) in [16, 100].into_iter().zip(divisions) {
            let sampler = |order| Sampler::new(USED.len(), batch, order, 5);
            let epoch = USED.len().div_ceil(batch) as u64;
            let mut stored = StoredSet::load(&ranks, &files, USED, blocks.clone(), &mut |_| ()).unwrap();
            let block_order = BlockOrder::new(blocks.clone(), 3, 5);
            // a sample that is not in memory would come from the other files; a window may lack some
            std::mem::swap(&mut *files.borrow_mut(), &mut others);
            for order in [Order::Shuffled, Order::Blocks(block_order)] {
                take_steps(all, division, replica, &mut stored, &sampler(order), epoch / 2..2 * epoch + 2);
            }
            std::mem::swap(&mut *files.borrow_mut(), &mut others);
            // with blocks of 200 samples there are two, fewer than nodes
            for (len, window) in [(9, 1), (9, 3), (9, 100), (200, 1)] {
                let order = BlockOrder::new(SampleBlocks::every(len, USED.len()), window, 5);
                for (first, is_cached) in [(0, true), (epoch - 1, false)] {
                    let order_here = order.clone();
                    let set = WindowSet::open(&ranks, &files, USED, order_here, batch, is_cached);
                    let mut set = set.unwrap();
                    let sampler = sampler(Order::Blocks(order.clone()));
                    take_steps(all, division, replica, &mut set, &sampler, first..2 * epoch + 2);
                }
            }
        }
    }
}
