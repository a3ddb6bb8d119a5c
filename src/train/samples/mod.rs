//! The samples that the options name, opened on all ranks.
//!
//! `source.rs` opens what `--data` and `--test-data` name; `storage.rs` chooses where the samples of
//! files are kept, and reads them; `statistics.rs` finds means, deviations and a checksum, for which
//! `scan.rs` looks through all samples once, and keeps what it finds for later starts. Programs that read
//! each sample once, in order, need only the first.

mod node_memory;
mod progress;
mod scan;
mod source;
mod statistics;
mod storage;

use std::time::Duration;

use super::options::{SamplePart, Shuffle, Standardisation, TrainOptions};
use crate::comm::{Communicator, Grid, Operation, World};
use crate::dataset::{Batches, Data, Dataset, Order, Sampler, Standardise};
use crate::nn::Features;
use crate::trace::{self, Name};
use crate::{Error, Result};
use source::{FileRange, Files, Opened};
pub use source::{SampleRequest, TargetsNeed};
use statistics::SampleStatistics;
use storage::Storage;

/// The share of waiting for samples above which there is a warning.
const MOST_WAITING: f64 = 0.05;

/// The seconds of training below which waiting is not worth a warning.
const WORTH_WARNING: f64 = 1.0;

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

/// Opens the data that `options` name, on every rank, to be taken in the order of `shuffle`. If needed, the
/// ranks share one pass over the samples: to count the classes in the user's own files and to refuse test
/// samples from them with NaN or infinity, for means and deviations, and for a checksum if there are
/// checkpoints. Collective.
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
    let statistics = SampleStatistics::find(all, options, files.as_ref(), &mut data, fingerprint)?;
    let SampleStatistics { pairs, checksum } = statistics;

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
             memory if they are not there already, and more ranks on a node decompress faster",
            100.0 * share[0]
        );
    }
    Ok((seconds > 0.0).then_some(share[0]))
}
