//! The statistics of all samples that training needs before its first step.

use xxhash_rust::xxh3::Xxh3;

use super::scan::{self, Scan, ScanRequest};
use super::source::Files;
use crate::Result;
use crate::comm::Communicator;
use crate::dataset::{Data, Targets, WantedStatistics};
use crate::nn::hash_values;
use crate::train::options::{Standardisation, TrainOptions};

/// The number of different values of `f32` that a deviation should span.
const FEWEST_STEPS: f64 = 8.0;

/// The statistics of the training samples.
pub(super) struct SampleStatistics {
    /// Mean and deviation of each feature or channel, with which inputs are standardised, if they are.
    pub(super) pairs: Option<Vec<[f64; 2]>>,
    /// The checksum by which a later start knows the samples again, if the run has checkpoints.
    pub(super) checksum: Option<String>,
}

impl SampleStatistics {
    /// Finds the statistics of `data`, which is read from `files`, if there are any, and has `fingerprint`.
    /// If a pass over the samples is needed, it also counts the classes of the files. Collective.
    ///
    /// # Errors
    /// A sample cannot be read, or is none to train with: the same error on every rank.
    pub(super) fn find(
        all: &Communicator,
        options: &TrainOptions,
        files: Option<&Files>,
        data: &mut Data,
        fingerprint: u128,
    ) -> Result<SampleStatistics> {
        let standardise = options.data.standardise;
        let by_features = standardise == Standardisation::Features;
        let needs_checksum = options.checkpoints.are_wanted();
        // seed, shape and number identify synthetic samples
        let is_synthetic = options.source() == "synthetic";
        let known = match data.train.tokeniser() {
            // a hash of all tokens
            Some(_) => Some(format!("{fingerprint:032x}")),
            None => is_synthetic.then(|| "synthetic".to_owned()),
        };
        let needs_scan = needs_checksum && known.is_none();
        // what the pass does not read is looked at when it is read for the first time
        let wanted = WantedStatistics { moments: by_features, checksum: needs_scan, finite: false };
        let is_needed = files.is_some() || by_features || needs_scan;
        let scan = is_needed.then(|| scan_all(all, options, files, data, wanted)).transpose()?;
        let found = scan.as_ref().map(|scan| format!("{:012x}{:012x}", scan.checksum[0], scan.checksum[1]));
        let mut checksum = found.or(known).filter(|_| needs_checksum);
        let pairs = match standardise {
            Standardisation::None => None,
            Standardisation::Features => {
                let pairs = scan.and_then(|scan| scan.pairs);
                if let (Some(pairs), true) = (&pairs, all.is_root()) {
                    warn_of_coarse(pairs);
                }
                pairs
            }
            Standardisation::Preset => data.train.preset().map(|preset| {
                if let Some(checksum) = &mut checksum {
                    // samples on another scale count as other data
                    let mut hash = Xxh3::new();
                    hash_values(&mut hash, preset.as_flattened());
                    *checksum += &format!("{:016x}", hash.digest());
                }
                preset.iter().map(|pair| pair.map(f64::from)).collect()
            }),
        };
        Ok(SampleStatistics { pairs, checksum })
    }
}

/// Looks through all samples of `data`, and tells `files` how many classes they have. Collective.
fn scan_all(
    all: &Communicator,
    options: &TrainOptions,
    files: Option<&Files>,
    data: &mut Data,
    wanted: WantedStatistics,
) -> Result<Scan> {
    let scan = ScanRequest::new(options, files, wanted).run(all, data)?;
    if let (Some(files), Targets::Classes(_)) = (files, data.train.targets()) {
        let classes = all.agree(scan::count_classes(scan.largest_label, options))?;
        files.set_classes(classes);
    }
    Ok(scan)
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
