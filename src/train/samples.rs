//! The samples that the options name, opened on all ranks.

use std::cell::RefCell;
use std::path::Path;
use std::rc::Rc;
use std::time::{Duration, Instant};

use xxhash_rust::xxh3::Xxh3;

use super::options::{DataOptions, MOST_CLASSES, ModelName, Standardisation, TrainOptions, describe};
use crate::comm::{Communicator, Operation, World};
use crate::dataset::{
    self, Batches, Data, Dataset, Hdf5File, Hdf5Options, MomentTree, Order, Sampler, Standardise, Statistics,
    Subset, Synthetic, Targets, num_channels,
};
use crate::nn::{Features, hash_values};
use crate::parallel::shard;
use crate::trace::{self, Name};
use crate::{Error, Result};

/// The most bytes of a file that the ranks of a node cache between them.
const CACHE_BYTES: usize = 4 << 30;

/// A pass over more bytes than this is logged.
const WORTH_SAYING: usize = 100_000_000;

/// The time between two log lines about the progress of a pass.
const BETWEEN_LINES: Duration = Duration::from_secs(10);

/// The samples of a training program.
pub struct Samples {
    /// The training samples, in shuffled batches.
    pub train: Batches,
    /// The test samples, in order.
    pub test: Option<Batches>,
    /// A checksum of the training samples, if the run has checkpoints.
    pub checksum: Option<String>,
}

/// Opens the data that `options` name, on every rank. The ranks share one pass over the samples, if
/// one is needed: over the user's own files to reject NaN and infinity and to count the classes,
/// for means and deviations, and for a checksum if there are checkpoints. Collective.
///
/// # Errors
/// The data is missing, damaged, or does not match the options: the same error on every rank.
pub fn open(world: &World, options: &TrainOptions) -> Result<Samples> {
    let all = world.communicator();
    let opening = trace::work(Name::Read);
    let (mut data, hdf5) = all.agree(open_source(options, world.num_local_ranks()))?;
    let fingerprint = fingerprint(&mut data);
    drop(opening);
    check_same_everywhere(all, options, &data, all.agree(fingerprint)?)?;
    let preset = data.train.preset();
    let mut pairs = preset.as_ref().map(|pairs| pairs.iter().map(|pair| pair.map(f64::from)).collect());
    let by_features = options.data.standardise == Standardisation::Features;
    let needs_checksum = options.checkpoints.are_wanted();
    // seed, shape and number identify synthetic samples
    let is_synthetic = options.data.data == "synthetic";
    let mut checksum = (needs_checksum && is_synthetic).then(|| "synthetic".to_owned());
    if hdf5.is_some() || by_features || needs_checksum && !is_synthetic {
        let found = look_through(all, &mut *data.train, by_features)?;
        let mut largest_label = found.largest_label;
        if let (Some(test), true) = (&mut data.test, hdf5.is_some()) {
            largest_label = largest_label.max(look_through(all, &mut **test, false)?.largest_label);
        }
        if let (Some(file), Targets::Classes(_)) = (&hdf5, data.train.targets()) {
            let classes = all.agree(count_classes(largest_label, options))?;
            file.borrow_mut().set_classes(classes);
        }
        if by_features {
            pairs = found.moments.total().map(|moments| moments.pairs());
        }
        checksum = needs_checksum.then(|| format!("{:012x}{:012x}", found.checksum[0], found.checksum[1]));
    }
    if options.data.standardise == Standardisation::None {
        pairs = None;
    }
    if let (Some(checksum), Some(preset), Standardisation::Preset) =
        (&mut checksum, &preset, options.data.standardise)
    {
        // samples on another scale count as other data
        let mut hash = Xxh3::new();
        hash_values(&mut hash, preset.as_flattened());
        *checksum += &format!("{:016x}", hash.digest());
    }
    let batches = |dataset: Box<dyn Dataset>, batch_size, order| {
        let sampler = Sampler::new(dataset.num_samples(), batch_size, order, options.seed);
        Batches::new(dataset, sampler, pairs.as_deref().map(Standardise::new))
    };
    let test = data.test.map(|test| {
        let all_of_it = test.num_samples();
        batches(test, all_of_it, Order::Sequential)
    });
    Ok(Samples { train: batches(data.train, options.batch_size, Order::Shuffled), test, checksum })
}

/// Returns a hash of the samples of `data`. Not collective.
fn fingerprint(data: &mut Data) -> Result<u128> {
    let mut fingerprint = data.train.fingerprint()?;
    if let Some(test) = &mut data.test {
        fingerprint = fingerprint.rotate_left(1) ^ test.fingerprint()?;
    }
    Ok(fingerprint)
}

/// Refuses data that differ between ranks, such as a stale copy on one node: the ranks would train
/// with batches that do not belong together. Collective.
fn check_same_everywhere(
    all: &Communicator,
    options: &TrainOptions,
    data: &Data,
    fingerprint: u128,
) -> Result<()> {
    let source = options.data.data.as_str();
    let kind = match source {
        "digits" | "synthetic" => source,
        path if Path::new(path).is_dir() => "a directory",
        _ => "a file",
    };
    let num_tests = data.test.as_ref().map_or(0, |test| test.num_samples());
    let found = [
        ("--data", kind.to_owned()),
        ("the number of samples to train with", data.train.num_samples().to_string()),
        ("the number of samples to test with", num_tests.to_string()),
        ("the shape of a sample", data.train.features().to_string()),
        ("the kind of the targets", describe(data.train.targets())),
        ("means and deviations of such data", format!("{:?}", data.train.preset())),
        ("a hash of the samples", format!("{fingerprint:032x}")),
    ];
    let doing = format!("opening --data {source} (is it the same on every node?)");
    all.compare(&doing, &found.map(|(name, value)| (name.to_owned(), value)))
}

/// Gathers the statistics of all samples of `dataset`, each rank for its share, with the moments of
/// the inputs if `by_features`. Collective.
fn look_through(all: &Communicator, dataset: &mut dyn Dataset, by_features: bool) -> Result<Statistics> {
    let leaves = shard(Statistics::num_leaves(dataset), all.rank(), all.size());
    let (num_leaves, num_samples) = (leaves.len(), dataset.num_samples());
    let bytes =
        num_samples.saturating_mul((dataset.features().len() + dataset.targets().len()) * size_of::<f32>());
    if bytes > WORTH_SAYING {
        log::info!(
            "looking through {num_samples} samples ({:.1} GB) for their classes and moments, \
             and for NaN and infinity",
            bytes as f64 / 1e9
        );
    }
    let (mut num_seen, mut last_line, mut span) = (0, Instant::now(), Some(trace::work(Name::Read)));
    let mut told = || {
        num_seen += 1;
        // a new span shows the watchdog that the pass makes progress
        span = None;
        span = Some(trace::work(Name::Read));
        if last_line.elapsed() > BETWEEN_LINES {
            last_line = Instant::now();
            log::info!("looked through {} % of them", 100 * num_seen / num_leaves.max(1));
        }
    };
    let found = Statistics::gather(dataset, leaves, by_features, &mut told);
    drop(span);
    let mut found = all.agree(found)?;
    found.merge(all, num_channels(dataset.features()))?;
    Ok(found)
}

/// Returns the number of classes, one more than the largest class number, if that is plausible.
fn count_classes(largest_label: f64, options: &TrainOptions) -> Result<usize> {
    let DataOptions { data, targets, .. } = &options.data;
    let fail = |why: String| Err(Error::input(format!("reading {data}"), why));
    let way_out = "class numbers are 0, 1, 2, … without gaps; to fit values instead, store them as \
                   floating-point numbers";
    if largest_label >= MOST_CLASSES as f64 {
        return fail(format!(
            "{targets} holds {largest_label} as a class number; a network has an output for each number \
             up to the largest, and {MOST_CLASSES} are the limit; {way_out}"
        ));
    }
    if largest_label < 1.0 {
        return fail(format!("{targets} holds one class only, {largest_label}; {way_out}"));
    }
    Ok(largest_label as usize + 1)
}

impl Statistics {
    /// Merges the ranks' statistics; the moments are merged from rank to rank, in the order of the
    /// leaves. Collective.
    fn merge(&mut self, all: &Communicator, channels: usize) -> Result<()> {
        let mut largest = [self.largest_label];
        all.all_reduce(&mut largest, Operation::Max)?;
        self.largest_label = largest[0];
        all.all_reduce(&mut self.checksum, Operation::Sum)?;

        let (rank, last) = (all.rank(), all.size() - 1);
        let mut len = [0_i64];
        let mut tree = MomentTree::default();
        if rank > 0 {
            all.receive(&mut len, rank - 1, 0)?;
            let mut values = vec![0.0; len[0] as usize];
            all.receive(&mut values, rank - 1, 0)?;
            tree = MomentTree::from_values(&values, channels);
        }
        tree.append(std::mem::take(&mut self.moments));
        let mut values = tree.to_values();
        len = [values.len() as i64];
        if rank < last {
            all.send(&len, rank + 1, 0)?;
            all.send(&values, rank + 1, 0)?;
        }
        all.broadcast(&mut len, last)?;
        values.resize(len[0] as usize, 0.0);
        all.broadcast(&mut values, last)?;
        self.moments = MomentTree::from_values(&values, channels);
        Ok(())
    }
}

type SharedFile = Rc<RefCell<Hdf5File>>;

/// Returns the training and test sets, and the HDF5 file behind them if there is one. Not
/// collective.
fn open_source(options: &TrainOptions, num_local_ranks: usize) -> Result<(Data, Option<SharedFile>)> {
    let (data, file) = match options.data.data.as_str() {
        "digits" => dataset::open_digits().map(|data| (data, None)),
        "synthetic" => synthetic(options).map(|data| (data, None)),
        path => open_path(Path::new(path), options, num_local_ranks),
    }?;
    if let Some(test) = data.test.as_ref().filter(|test| test.features() != data.train.features()) {
        let why = format!("{} to train with, but {} to test with", data.train.features(), test.features());
        return Err(Error::input(format!("opening --data {}", options.data.data), why));
    }
    Ok((data, file))
}

fn open_path(
    path: &Path,
    options: &TrainOptions,
    num_local_ranks: usize,
) -> Result<(Data, Option<SharedFile>)> {
    let fail = |why: String| Error::input(format!("opening --data {}", path.display()), why);
    let metadata = std::fs::metadata(path)
        .map_err(|error| fail(format!("{error}; expected digits, synthetic, a directory or an HDF5 file")))?;
    if !metadata.is_dir() {
        return hdf5(path, options, num_local_ranks);
    }
    if dataset::is_cifar(path) {
        Ok((dataset::open_cifar(path)?, None))
    } else if dataset::is_idx(path) {
        Ok((dataset::open_idx(path)?, None))
    } else {
        let known = "train-images-idx3-ubyte.gz (MNIST, Fashion-MNIST) nor data_batch_1.bin (CIFAR-10)";
        Err(fail(format!("the directory has neither {known}; data/fetch gets them")))
    }
}

fn hdf5(path: &Path, options: &TrainOptions, num_local_ranks: usize) -> Result<(Data, Option<SharedFile>)> {
    let DataOptions { inputs, targets, test_fraction, .. } = &options.data;
    if !(0.0..1.0).contains(test_fraction) {
        return Err(Error::input(
            "--test-fraction",
            format!("it is {test_fraction}, but must be from 0 to below 1"),
        ));
    }
    // the loss of deep-mlp reads no targets, so the file need not have any
    let targets = (options.model.name() != ModelName::DeepMlp).then(|| targets.clone());
    let file = Hdf5File::open(
        path,
        &Hdf5Options { inputs: inputs.clone(), targets, cache_bytes: CACHE_BYTES / num_local_ranks },
    )?;
    let num_samples = file.num_samples();
    let num_test = (num_samples as f64 * test_fraction).round() as usize;
    let num_train = num_samples - num_test;
    if num_train == 0 {
        let why = format!("{test_fraction} of {num_samples} samples leaves none to train with");
        return Err(Error::input("--test-fraction", why));
    }
    let file = Rc::new(RefCell::new(file));
    let part = |range| -> Box<dyn Dataset> { Box::new(Subset::new(Rc::clone(&file), range)) };
    let test = (num_test > 0).then(|| part(num_train..num_samples));
    Ok((Data { train: part(0..num_train), test }, Some(file)))
}

fn synthetic(options: &TrainOptions) -> Result<Data> {
    let DataOptions { synthetic_samples, synthetic_shape, synthetic_targets, .. } = &options.data;
    if *synthetic_samples == 0 {
        return Err(Error::input("--synthetic-samples", "it is 0, but must be at least 1"));
    }
    let image = |size, channels| Features::Image { height: size, width: size, channels };
    let features = match (synthetic_shape, options.model.name()) {
        (Some(shape), _) => shape.0,
        (None, ModelName::Mlp) => Features::Flat(784),
        (None, ModelName::DeepMlp) => Features::Flat(options.model.width.unwrap_or(1024)),
        (None, ModelName::Lenet) => image(28, 1),
        (None, ModelName::Cifar) => image(32, 3),
    };
    let targets =
        if options.model.name() == ModelName::DeepMlp { Targets::Nothing } else { synthetic_targets.0 };
    let num_test = synthetic_samples.div_ceil(10);
    let part = |first, len| Synthetic::open(features, targets, first, len, options.seed);
    let test = part(*synthetic_samples, num_test)?;
    Ok(Data { train: part(0, *synthetic_samples)?, test: Some(test) })
}
