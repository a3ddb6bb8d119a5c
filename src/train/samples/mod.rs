//! The samples that the options name, opened on all ranks.
//!
//! `source.rs` opens what `--data` and `--test-data` name; `storage.rs` chooses where the samples of
//! files are kept, and reads them; `scan.rs` looks through all samples once for their classes and
//! moments, and keeps what it finds for later starts. Programs that read each sample once, in order, need
//! neither.

mod node_memory;
mod progress;
mod scan;
mod source;
mod storage;

use std::time::Duration;

use xxhash_rust::xxh3::Xxh3;

use super::options::{SamplePart, Shuffle, Standardisation, TrainOptions};
use crate::comm::{Communicator, Grid, Operation, World};
use crate::dataset::{Batches, Data, Dataset, Order, Sampler, Standardise, Targets, WantedStatistics};
use crate::nn::{Features, hash_values};
use crate::trace::{self, Name};
use crate::{Error, Result};
use scan::{Scan, ScanRequest};
use source::{FileRange, Files, Opened};
pub use source::{SampleRequest, TargetsNeed};
use storage::Storage;

/// The share of waiting for samples above which there is a warning.
const MOST_WAITING: f64 = 0.05;

/// The seconds of training below which waiting is not worth a warning.
const WORTH_WARNING: f64 = 1.0;

/// The number of different values of `f32` that a deviation should span.
const FEWEST_STEPS: f64 = 8.0;

/// The samples of a training program.
pub struct Samples {
    /// The training samples, in shuffled batches.
    pub train: Batches,
    /// The test samples, in order.
    pub test: Option<Batches>,
    /// A checksum of the training samples, if the run has checkpoints.
    pub checksum: Option<String>,
    /// The bytes of samples that this rank's node keeps for all of its ranks, on the first of them.
    pub shared_bytes: usize,
}

/// Opens the data that `options` name, on every rank, to be taken in the order of `shuffle`. The ranks share
/// one pass over the samples, if one is needed: over the user's own files to reject NaN and infinity and to
/// count the classes, for means and deviations, and for a checksum if there are checkpoints. Collective.
///
/// # Errors
/// The data is missing, damaged, or does not match the options: the same error on every rank.
pub fn open(
    world: &World,
    grid: &Grid,
    options: &TrainOptions,
    shuffle: Shuffle,
    reads_targets: bool,
) -> Result<Samples> {
    let all = world.communicator();
    let opening = trace::work(Name::Read);
    let mut opened = all.agree(
        source::open(&request(options, reads_targets))
            .and_then(|opened| check_standardisation(options, opened)),
    )?;
    let fingerprint = opened.fingerprint();
    drop(opening);
    let fingerprint = all.agree(fingerprint)?;
    check_same_everywhere(all, options.source(), &opened, fingerprint)?;
    let Opened { data, files, .. } = opened;
    let choose = |files| Storage::choose(world, grid, options, shuffle, files);
    let storage = files.as_ref().map(choose).transpose()?;
    let Storage { mut data, order, shared_bytes } = storage.unwrap_or_else(|| Storage::of(data, shuffle));

    let preset = data.train.preset();
    let mut pairs = preset.as_ref().map(|pairs| pairs.iter().map(|pair| pair.map(f64::from)).collect());
    let by_features = options.data.standardise == Standardisation::Features;
    let needs_checksum = options.checkpoints.are_wanted();
    // seed, shape and number identify synthetic samples
    let is_synthetic = options.source() == "synthetic";
    let known = match data.train.tokeniser() {
        // a hash of all tokens
        Some(_) => Some(format!("{fingerprint:032x}")),
        None => is_synthetic.then(|| "synthetic".to_owned()),
    };
    let needs_scan = needs_checksum && known.is_none();
    let mut checksum = known.filter(|_| needs_checksum);
    if files.is_some() || by_features || needs_scan {
        // what the pass does not read is looked at when it is read for the first time
        let wanted = WantedStatistics { moments: by_features, checksum: needs_scan, finite: false };
        let request = ScanRequest::new(options, files.as_ref(), wanted);
        let Scan { largest_label, checksum: found, pairs: own_pairs } = request.run(all, &mut data)?;
        if let (Some(files), Targets::Classes(_)) = (&files, data.train.targets()) {
            let classes = all.agree(scan::count_classes(largest_label, options))?;
            files.set_classes(classes);
        }
        pairs = if by_features { own_pairs } else { pairs };
        if let (true, Some(pairs), true) = (by_features, &pairs, world.is_root()) {
            warn_of_coarse(pairs);
        }
        checksum = needs_checksum.then(|| format!("{:012x}{:012x}", found[0], found[1]));
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
    Ok(Samples { train: batches(data.train, options.batch_size, order), test, checksum, shared_bytes })
}

/// Warns if values of a feature were rounded to `f32` so coarsely that little is left to learn from; `pairs`
/// has means and deviations, of 1 where values never change.
fn warn_of_coarse(pairs: &[[f64; 2]]) {
    let step = |mean: f64| {
        let mean = mean.abs() as f32;
        f64::from(mean.next_up() - mean)
    };
    let is_coarse = |[mean, deviation]: &[f64; 2]| *deviation < FEWEST_STEPS * step(*mean);
    if let Some(at) = pairs.iter().position(is_coarse) {
        let [mean, deviation] = pairs[at];
        let spread = match deviation {
            1.0 => "in all samples".to_owned(),
            deviation => format!("with a deviation of {deviation:.1e}"),
        };
        log::warn!(
            "inputs are rounded to float32 before they are standardised: feature or channel {at} (counted \
             from 0) is {mean:.3e} {spread}, but numbers are {:.1e} apart there; subtract an offset when the \
             file is written, or leave the feature out if it never changes",
            step(mean)
        );
    }
}

/// Returns the samples that training with `options` needs.
fn request(options: &TrainOptions, reads_targets: bool) -> SampleRequest<'_> {
    SampleRequest {
        options: &options.data.source,
        source: options.source(),
        text: options.data.text(),
        targets: if reads_targets { TargetsNeed::Required } else { TargetsNeed::Unread },
        synthetic: options.synthetic_shape(),
        seed: options.seed,
    }
}

/// Refuses means and deviations of tokens.
fn check_standardisation(options: &TrainOptions, opened: Opened) -> Result<Opened> {
    let features = opened.data.train.features();
    match features {
        Features::Tokens { .. } if options.data.standardise == Standardisation::Features => {
            let why = format!("features is for values, but a sample is {features}");
            Err(Error::input("--standardise", why))
        }
        _ => Ok(opened),
    }
}

/// Opens the samples of `request`, on every rank, for a program that reads each once, in order: sets of
/// consecutive samples of `part`. The number of classes in files is not known. Collective.
///
/// # Errors
/// The data is missing, damaged, or has no such part: the same error on every rank.
pub fn open_part(
    world: &World,
    request: &SampleRequest<'_>,
    part: SamplePart,
) -> Result<Vec<Box<dyn Dataset>>> {
    let (all, _span) = (world.communicator(), trace::work(Name::Read));
    let mut opened = all.agree(source::open(request))?;
    let fingerprint = all.agree(opened.fingerprint())?;
    check_same_everywhere(all, request.source, &opened, fingerprint)?;
    let Data { train, test } = opened.data;
    let sets = match (part, test) {
        (SamplePart::All, test) => std::iter::once(train).chain(test).collect(),
        (SamplePart::Train, _) => vec![train],
        (SamplePart::Test, Some(test)) => vec![test],
        (SamplePart::Test, None) => {
            let why = format!(
                "--data {} has no samples to test with; --test-fraction or --test-data gives some",
                request.source
            );
            return all.agree(Err(Error::input("--part test", why)));
        }
    };
    Ok(sets)
}

/// Refuses data that differ between ranks, such as a stale copy on one node: the ranks would train
/// with batches that do not belong together. Collective.
fn check_same_everywhere(all: &Communicator, source: &str, opened: &Opened, fingerprint: u128) -> Result<()> {
    let Opened { data, kind, files } = opened;
    // nodes that store the same numbers otherwise would order them otherwise
    let storage = |part: &FileRange| {
        let files = part.files.borrow();
        format!("{:?}, blocks {:016x}", files.row_format(), files.blocks().hash())
    };
    let storage: Vec<String> = files.iter().flat_map(Files::ranges).map(storage).collect();
    let num_tests = data.test.as_ref().map_or(0, |test| test.num_samples());
    let found = [
        ("--data", (*kind).to_owned()),
        ("the number of samples to train with", data.train.num_samples().to_string()),
        ("the number of samples to test with", num_tests.to_string()),
        ("the shape of a sample", data.train.features().to_string()),
        ("the kind of the targets", data.train.targets().to_string()),
        ("means and deviations of such data", format!("{:?}", data.train.preset())),
        ("the types and chunks of the files", storage.join("; ")),
        ("a hash of the samples", format!("{fingerprint:032x}")),
    ];
    let doing = format!("opening --data {source} (is it the same on every node?)");
    all.compare(&doing, &found.map(|(name, value)| (name.to_owned(), value)))
}

/// Returns the largest share of `seconds`, the time of all steps, for which a rank has `waited` for
/// samples, if there were steps, and warns if it is large. Collective.
pub fn share_of_waiting(world: &World, waited: Duration, seconds: f64) -> Result<Option<f64>> {
    let mut share = [waited.as_secs_f64() / seconds.max(1e-9)];
    world.communicator().all_reduce(&mut share, Operation::Max)?;
    if share[0] > MOST_WAITING && seconds > WORTH_WARNING && world.is_root() {
        log::warn!(
            "{:.0} % of the time of the steps was waiting for samples; --data-store on keeps them in \
             memory if they are not there already, and more ranks on a node unpack faster",
            100.0 * share[0]
        );
    }
    Ok((seconds > 0.0).then_some(share[0]))
}
