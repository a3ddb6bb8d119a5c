//! From options to samples, on all ranks.

use std::cell::RefCell;
use std::path::Path;
use std::rc::Rc;
use std::str::FromStr;

use clap::Args;
use xxhash_rust::xxh3::Xxh3;

use super::TrainOptions;
use super::model_options::ModelName;
use super::options::StandardiseName;
use crate::comm::{Communicator, Operation, World};
use crate::dataset::{
    self, Batches, Data, Dataset, Hdf5File, Hdf5Options, Order, Sampler, Standardise, Statistics, Subset, Synthetic,
    Targets,
};
use crate::nn::{Features, hash_values};
use crate::parallel::shard;
use crate::{Error, Result};

/// The largest size that synthetic data may have along one dimension.
const LARGEST_SIZE: usize = 1 << 20;

/// The most that the ranks of a node keep of a file between them.
const CACHE_BYTES: usize = 4 << 30;

/// Options about samples.
#[derive(Debug, Clone, Args)]
pub struct DataOptions {
    /// digits (10,000 of them are in the program), synthetic, a directory with the files of MNIST, Fashion-MNIST or CIFAR-10,
    /// or an HDF5 file
    #[arg(long, value_name = "SOURCE", default_value = "digits", help_heading = "Data")]
    pub data: String,

    /// Dataset of the inputs in an HDF5 file: [samples, features], [samples, height, width] or [samples, channels, height,
    /// width]; bytes of images come as 0 to 1
    #[arg(long, value_name = "PATH", default_value = "/x", help_heading = "Data")]
    pub inputs: String,

    /// Dataset of the targets in an HDF5 file: integers as class numbers from 0, or real values
    #[arg(long, value_name = "PATH", default_value = "/y", help_heading = "Data")]
    pub targets: String,

    /// Share of the samples of an HDF5 file, at its end, to test with; from 0 to below 1
    #[arg(long, value_name = "SHARE", default_value_t = 0.0, help_heading = "Data")]
    pub test_fraction: f64,

    /// How inputs are brought to a common scale
    #[arg(long, value_enum, default_value = "preset", help_heading = "Data")]
    pub standardise: StandardiseName,

    /// Samples of synthetic data to train with; a tenth as many are made to test with
    #[arg(long, value_name = "N", default_value_t = 10_000, help_heading = "Data")]
    pub synthetic_samples: usize,

    /// Shape of one synthetic sample: FEATURES or CHANNELSxHEIGHTxWIDTH [default: what the model takes]
    #[arg(long, value_name = "SHAPE", help_heading = "Data")]
    pub synthetic_shape: Option<ShapeText>,

    /// Targets of synthetic data: classes:N or values:N
    #[arg(long, value_name = "KIND", default_value = "classes:10", help_heading = "Data")]
    pub synthetic_targets: TargetsText,
}

/// `784` or `3x32x32`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShapeText(pub Features);

impl FromStr for ShapeText {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<ShapeText, String> {
        let sizes: Option<Vec<usize>> =
            text.split('x').map(|part| part.parse().ok().filter(|size| (1..=LARGEST_SIZE).contains(size))).collect();
        match sizes.as_deref() {
            Some(&[len]) => Ok(ShapeText(Features::Flat(len))),
            Some(&[channels, height, width]) => Ok(ShapeText(Features::Image { height, width, channels })),
            _ => {
                Err("expected a number of features such as 784, or channels, height and width such as 3x32x32".into())
            }
        }
    }
}

/// `classes:10` or `values:3`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TargetsText(pub Targets);

impl FromStr for TargetsText {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<TargetsText, String> {
        let number = |text: &str| text.parse().ok().filter(|number| (1..=LARGEST_SIZE).contains(number));
        let parsed = match text.split_once(':') {
            Some(("classes", n)) => number(n).map(Targets::Classes),
            Some(("values", n)) => number(n).map(Targets::Values),
            _ => None,
        };
        parsed.map(TargetsText).ok_or_else(|| "expected classes:N or values:N, N at least 1".into())
    }
}

/// What a training program draws from.
pub struct Samples {
    /// For training, in batches.
    pub train: Batches,
    /// For testing, in order.
    pub test: Option<Batches>,
    /// What tells the training samples from others, if the run has checkpoints.
    pub checksum: Option<String>,
}

/// Opens the data that `options` name, on every rank, with errors agreed on. Collective; the ranks share the work of looking
/// through samples once: the user's own for values that are not numbers and for the number of classes, any for means and
/// deviations, and for a checksum if there are checkpoints.
///
/// # Errors
/// The data is missing, damaged, or not what the options say; the same error on every rank.
pub fn open(world: &World, options: &TrainOptions) -> Result<Samples> {
    let all = world.communicator();
    let (mut data, hdf5) = all.agree(open_source(options, world.num_local_ranks()))?;
    check_same_everywhere(all, &data, hdf5.is_some())?;
    let rank_share = |dataset: &dyn Dataset| shard(dataset.num_samples(), all.rank(), all.size());
    let mut moments = data.train.preset();
    let by_features = options.data.standardise == StandardiseName::Features;
    let needs_checksum = options.checkpoints.are_wanted();
    // what is made on the fly is told by seed, shape and number
    let is_synthetic = options.data.data == "synthetic";
    let mut checksum = (needs_checksum && is_synthetic).then(|| "synthetic".to_owned());
    if hdf5.is_some() || by_features || needs_checksum && !is_synthetic {
        let share = rank_share(&*data.train);
        let mut found = all.agree(Statistics::gather(&mut *data.train, share))?;
        found.merge(all)?;
        let mut largest_label = found.largest_label;
        if let (Some(test), true) = (&mut data.test, hdf5.is_some()) {
            let share = rank_share(&**test);
            let mut tested = all.agree(Statistics::gather(&mut **test, share))?;
            tested.merge(all)?;
            largest_label = largest_label.max(tested.largest_label);
        }
        if let (Some(file), Targets::Classes(_)) = (&hdf5, data.train.targets()) {
            let num_samples = file.borrow().num_samples();
            let classes = all.agree(count_classes(largest_label, num_samples, options))?;
            file.borrow_mut().set_classes(classes);
        }
        moments = if by_features { Some(found.moments()) } else { moments };
        checksum = needs_checksum.then(|| format!("{:012x}{:012x}", found.checksum[0], found.checksum[1]));
    }
    if options.data.standardise == StandardiseName::None {
        moments = None;
    }
    if let (Some(checksum), Some(moments), false) = (&mut checksum, &moments, by_features) {
        // the same samples on another scale are other data; what was found in them depends on the ranks in its last bits
        let mut hash = Xxh3::new();
        hash_values(&mut hash, moments.as_flattened());
        *checksum += &format!("{:016x}", hash.digest());
    }
    let batches = |dataset: Box<dyn Dataset>, batch_size, order| {
        let sampler = Sampler::new(dataset.num_samples(), batch_size, order, options.seed);
        Batches::new(dataset, sampler, moments.clone().map(Standardise::new))
    };
    let test = data.test.map(|test| {
        let all_of_it = test.num_samples();
        batches(test, all_of_it, Order::Sequential)
    });
    Ok(Samples { train: batches(data.train, options.batch_size, Order::Shuffled), test, checksum })
}

/// Refuses data that differ between ranks, as a stale copy on one node does: training would go on with batches that do not
/// belong together. Collective.
fn check_same_everywhere(all: &Communicator, data: &Data, is_hdf5: bool) -> Result<()> {
    let features = |dataset: &dyn Dataset| match dataset.features() {
        Features::Flat(len) => [0, len, 0, 0],
        Features::Image { height, width, channels } => [1, height, width, channels],
    };
    let targets = match data.train.targets() {
        Targets::Classes(classes) => [0, classes],
        Targets::Values(values) => [1, values],
        Targets::Nothing => [2, 0],
    };
    let num_samples = data.train.num_samples();
    let num_tests = data.test.as_ref().map_or(0, |test| test.num_samples());
    let head = [usize::from(is_hdf5), num_samples, num_tests];
    let own: Vec<i64> = [&head[..], &features(&*data.train), &targets].concat().iter().map(|&n| n as i64).collect();
    let (mut least, mut most) = (own.clone(), own);
    all.all_reduce(&mut least, Operation::Min)?;
    all.all_reduce(&mut most, Operation::Max)?;
    if least == most {
        return Ok(());
    }
    let found = match (least[1], most[1]) {
        (least, most) if least != most => format!("between {least} and {most} samples"),
        _ => "samples of different shapes".to_owned(),
    };
    let why = format!("the ranks see {found}; is it the same file on every node?");
    all.agree(Err(Error::input(format!("opening --data {}", data.train.source()), why)))
}

/// One more than the largest class number, if that is plausible.
fn count_classes(largest_label: f64, num_samples: usize, options: &TrainOptions) -> Result<usize> {
    let DataOptions { data, targets, .. } = &options.data;
    let fail = |why: String| Err(Error::input(format!("reading {data}"), why));
    let way_out =
        "class numbers are 0, 1, 2, … without gaps; to fit values instead, store them as floating-point numbers";
    if largest_label >= num_samples as f64 {
        return fail(format!(
            "{targets} holds {largest_label} as a class number, with {num_samples} samples; {way_out}"
        ));
    }
    if largest_label < 1.0 {
        return fail(format!("{targets} holds one class only, {largest_label}; {way_out}"));
    }
    Ok(largest_label as usize + 1)
}

impl Statistics {
    /// Adds up the ranks' parts. Collective.
    fn merge(&mut self, all: &Communicator) -> Result<()> {
        let mut sums = [&[self.count], self.sums.as_slice(), self.squares.as_slice()].concat();
        all.all_reduce(&mut sums, Operation::Sum)?;
        let channels = self.sums.len();
        self.count = sums[0];
        self.sums.copy_from_slice(&sums[1..=channels]);
        self.squares.copy_from_slice(&sums[1 + channels..]);
        let mut largest = [self.largest_label];
        all.all_reduce(&mut largest, Operation::Max)?;
        self.largest_label = largest[0];
        all.all_reduce(&mut self.checksum, Operation::Sum)?;
        Ok(())
    }
}

type SharedFile = Rc<RefCell<Hdf5File>>;

/// The training and test sets, and the HDF5 file behind them if there is one. Not collective.
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

fn open_path(path: &Path, options: &TrainOptions, num_local_ranks: usize) -> Result<(Data, Option<SharedFile>)> {
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
        return Err(Error::input("--test-fraction", format!("it is {test_fraction}, but must be from 0 to below 1")));
    }
    // the loss of deep-mlp looks at no targets, so the file need not have any
    let targets = (options.model() != ModelName::DeepMlp).then(|| targets.clone());
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
    let features = match (synthetic_shape, options.model()) {
        (Some(shape), _) => shape.0,
        (None, ModelName::Mlp) => Features::Flat(784),
        (None, ModelName::DeepMlp) => Features::Flat(options.width.unwrap_or(1024)),
        (None, ModelName::Lenet) => image(28, 1),
        (None, ModelName::Cifar) => image(32, 3),
    };
    let targets = if options.model() == ModelName::DeepMlp { Targets::Nothing } else { synthetic_targets.0 };
    let num_test = synthetic_samples.div_ceil(10);
    let part = |first, len| Synthetic::open(features, targets, first, len, options.seed);
    let test = part(*synthetic_samples, num_test)?;
    Ok(Data { train: part(0, *synthetic_samples)?, test: Some(test) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_and_targets_in_words() {
        assert_eq!("784".parse::<ShapeText>().unwrap().0, Features::Flat(784));
        let image = Features::Image { height: 32, width: 16, channels: 3 };
        assert_eq!("3x32x16".parse::<ShapeText>().unwrap().0, image);
        assert!("3x32".parse::<ShapeText>().is_err() && "0".parse::<ShapeText>().is_err());
        assert_eq!("values:3".parse::<TargetsText>().unwrap().0, Targets::Values(3));
        assert!("classes:0".parse::<TargetsText>().is_err() && "10".parse::<TargetsText>().is_err());
    }
}
