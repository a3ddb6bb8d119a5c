//! The pass over all samples before training, and its result, which is kept in the directory of
//! checkpoints so that a restart does not repeat it.

use std::fs;
use std::io::Write as _;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::json;

use super::progress::ReadingProgress;
use super::source::Files;
use super::storage::WORTH_SAYING;
use crate::checkpoint::{create_beside, create_durably, publish};
use crate::comm::{Communicator, Operation, shard};
use crate::dataset::{Data, Dataset, MomentTree, Statistics, WantedStatistics, leaves, num_channels};
use crate::trace::Name;
use crate::train::options::{MOST_CLASSES, SourceOptions, TrainOptions};
use crate::{Error, Result};

/// The name of the file with the result, in the directory of checkpoints.
const FILE_NAME: &str = "data-scan.json";

/// The result of a pass over all samples.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Scan {
    /// The largest class number of the samples to train and to test with.
    pub(super) largest_label: f64,
    /// The checksum of the training samples.
    pub(super) checksum: [i64; 2],
    /// Mean and deviation of each channel or feature of the training samples, if they were wanted.
    pub(super) pairs: Option<Vec<[f64; 2]>>,
}

/// A [`Scan`] as a file has it: numbers in their bits, so that they come back as they were.
#[derive(Serialize, Deserialize)]
struct ScanFile {
    /// The files and the samples in them that the scan was made of.
    of: String,
    largest_label: u64,
    checksum: [i64; 2],
    pairs: Option<Vec<[u64; 2]>>,
}

/// The pass that a run needs.
pub(super) struct ScanRequest {
    wanted: WantedStatistics,
    /// True if the test samples are looked through too.
    with_test: bool,
    /// The files and the samples in them, if they are in files that a later start may find unchanged.
    of: Option<String>,
    /// The file in which the result is kept.
    path: Option<PathBuf>,
}

impl ScanRequest {
    /// Describes the pass of a run over samples, which are those of `files` if there are any.
    pub(super) fn new(
        options: &TrainOptions,
        files: Option<&Files>,
        wanted: WantedStatistics,
    ) -> ScanRequest {
        let SourceOptions { inputs, targets, .. } = &options.data.source;
        let of = files.map(|files| {
            let parts = files.ranges().map(|part| {
                let versions = part.files.borrow();
                let versions = versions.versions().map(|(path, version)| {
                    json!([path, version.place.1, version.len, version.changed.0, version.changed.1])
                });
                json!([versions.collect::<Vec<_>>(), part.range.start, part.range.end])
            });
            let has_targets = files.train.files.borrow().row_format().targets.is_some();
            let WantedStatistics { moments, checksum, finite } = wanted;
            let wanted = [moments, checksum, finite];
            json!([inputs, targets, has_targets, wanted, parts.collect::<Vec<_>>()]).to_string()
        });
        let path = options.checkpoints.checkpoint_dir.as_ref().map(|folder| folder.join(FILE_NAME));
        ScanRequest { wanted, with_test: files.is_some(), of, path }
    }

    /// Returns the result of an earlier start if it is of the same samples, or looks through all
    /// samples of `data`. Collective.
    ///
    /// # Errors
    /// A sample cannot be read: the same error on every rank.
    pub(super) fn run(&self, all: &Communicator, data: &mut Data) -> Result<Scan> {
        let kept = if all.is_root() { self.read().unwrap_or_default() } else { Vec::new() };
        let kept = self.decode(&all.broadcast_bytes(kept, 0)?);
        // nodes may have files of their own, which one of them may have changed
        let is_known = all.all_ranks(kept.is_some())?;
        if let Some(scan) = kept.filter(|_| is_known) {
            log::info!("the samples have not changed since an earlier start looked through them");
            return Ok(scan);
        }
        let found = gather_statistics(all, &mut *data.train, self.wanted)?;
        let mut scan = Scan { largest_label: found.largest_label, checksum: found.checksum, pairs: None };
        if self.wanted.moments {
            scan.pairs = found.moments.total().map(|moments| moments.pairs());
        }
        if let Some(test) = data.test.as_mut().filter(|_| self.with_test) {
            // the training samples are looked at when they are read, these perhaps only at the end
            let wanted = WantedStatistics { finite: true, ..WantedStatistics::default() };
            let found = gather_statistics(all, &mut **test, wanted)?;
            scan.largest_label = scan.largest_label.max(found.largest_label);
        }
        if let Err(error) = self.write(&scan, all.is_root()) {
            log::debug!("keeping the result of the pass over the samples: {error}");
        }
        Ok(scan)
    }

    fn read(&self) -> Option<Vec<u8>> {
        self.of.as_ref()?;
        fs::read(self.path.as_ref()?).ok()
    }

    fn decode(&self, bytes: &[u8]) -> Option<Scan> {
        let file: ScanFile = serde_json::from_slice(bytes).ok()?;
        (Some(&file.of) == self.of.as_ref()).then(|| Scan {
            largest_label: f64::from_bits(file.largest_label),
            checksum: file.checksum,
            pairs: file.pairs.map(|pairs| pairs.iter().map(|pair| pair.map(f64::from_bits)).collect()),
        })
    }

    fn write(&self, scan: &Scan, is_root: bool) -> std::io::Result<()> {
        let (Some(of), Some(path), true) = (&self.of, &self.path, is_root) else { return Ok(()) };
        let Some(folder) = path.parent() else { return Ok(()) };
        create_durably(folder)?;
        let bits = |pairs: &Vec<[f64; 2]>| pairs.iter().map(|pair| pair.map(f64::to_bits)).collect();
        let file = ScanFile {
            of: of.clone(),
            largest_label: scan.largest_label.to_bits(),
            checksum: scan.checksum,
            pairs: scan.pairs.as_ref().map(bits),
        };
        let mut whole = create_beside(path)?;
        whole.write_all(&serde_json::to_vec(&file)?)?;
        publish(whole, path, &mut |_| ())
    }
}

/// Gathers the statistics of all samples of `dataset`, each rank for its share. Collective.
fn gather_statistics(
    all: &Communicator,
    dataset: &mut dyn Dataset,
    wanted: WantedStatistics,
) -> Result<Statistics> {
    let leaves = shard(leaves(dataset).num_blocks(), all.rank(), all.size());
    let (num_leaves, num_samples) = (leaves.len(), dataset.num_samples());
    let bytes =
        num_samples.saturating_mul((dataset.features().len() + dataset.targets().len()) * size_of::<f32>());
    if bytes > WORTH_SAYING && wanted.reads_inputs() {
        log::info!(
            "looking through {num_samples} samples ({:.1} GB) for their classes and moments, \
             and for NaN and infinity",
            bytes as f64 / 1e9
        );
    }
    let mut progress = ReadingProgress::new(Name::Read);
    let mut after_leaf =
        || progress.count(num_leaves, |percent| format!("looked through {percent} % of them"));
    let found = Statistics::gather(dataset, leaves, wanted, &mut after_leaf);
    drop(progress);
    let mut found = all.agree(found)?;
    found.merge(all, num_channels(dataset.features()))?;
    Ok(found)
}

/// Returns the number of classes, one more than the largest class number, if that is plausible.
pub(super) fn count_classes(largest_label: f64, options: &TrainOptions) -> Result<usize> {
    let (data, targets) = (options.source(), &options.data.source.targets);
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
