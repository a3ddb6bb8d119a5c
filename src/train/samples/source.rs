//! The data sets that `--data` and `--test-data` name.

use std::cell::RefCell;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use crate::dataset::{
    self, Data, Dataset, Hdf5Names, Hdf5Set, SampleBlocks, Subset, Synthetic, Targets, TextSettings, leaves,
};
use crate::nn::Features;
use crate::train::options::{ShapeText, SourceOptions};
use crate::{Error, Result};

/// The need of a program for targets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TargetsNeed {
    /// Samples without targets are refused.
    Required,
    /// Samples may have none.
    Welcome,
    /// Targets are not read.
    Unread,
}

/// The samples that a program asks for.
pub struct SampleRequest<'a> {
    /// The options that name them.
    pub options: &'a SourceOptions,
    /// The source.
    pub source: &'a str,
    /// The cut of a text.
    pub text: TextSettings,
    /// The need for targets.
    pub targets: TargetsNeed,
    /// The shape of synthetic samples if no option gives one.
    pub synthetic: ShapeText,
    /// The seed of synthetic samples.
    pub seed: u64,
}

/// The samples that were opened.
pub(super) struct Opened {
    /// The samples, read from their files directly if they are in files.
    pub(super) data: Data,
    /// The kind of source, for messages.
    pub(super) kind: &'static str,
    /// The user's own files, if the samples are in some.
    pub(super) files: Option<Files>,
}

/// Consecutive samples of files.
#[derive(Clone)]
pub(super) struct FileRange {
    pub(super) files: Rc<RefCell<Hdf5Set>>,
    pub(super) range: Range<usize>,
}

/// The user's own files.
pub(super) struct Files {
    pub(super) train: FileRange,
    pub(super) test: Option<FileRange>,
}

impl FileRange {
    /// Returns these samples, read from the files directly.
    pub(super) fn direct(&self) -> Box<dyn Dataset> {
        Box::new(Subset::new(Rc::clone(&self.files), self.range.clone()))
    }

    /// Returns the leaves of these samples, which ranks look through as a whole.
    pub(super) fn leaves(&self) -> SampleBlocks {
        leaves(&*self.direct())
    }
}

impl Files {
    /// Returns the samples, read from the files directly.
    pub(super) fn direct(&self) -> Data {
        Data { train: self.train.direct(), test: self.test.as_ref().map(FileRange::direct) }
    }

    /// Returns the ranges, that for training first.
    pub(super) fn ranges(&self) -> impl Iterator<Item = &FileRange> {
        std::iter::once(&self.train).chain(&self.test)
    }

    /// Sets the number of classes in all files.
    pub(super) fn set_classes(&self, num_classes: usize) {
        self.ranges().for_each(|part| part.files.borrow_mut().set_classes(num_classes));
    }
}

impl Opened {
    /// Returns a hash of the samples. Not collective.
    pub(super) fn fingerprint(&mut self) -> Result<u128> {
        let mut fingerprint = self.data.train.fingerprint()?;
        if let Some(test) = &mut self.data.test {
            fingerprint = fingerprint.rotate_left(1) ^ test.fingerprint()?;
        }
        Ok(fingerprint)
    }
}

/// Opens the samples of `request`. Not collective.
pub(super) fn open(request: &SampleRequest<'_>) -> Result<Opened> {
    let source = request.source;
    let opened = match source {
        "digits" => Opened { data: dataset::open_digits()?, kind: "digits", files: None },
        "shakespeare" => {
            Opened { data: dataset::open_shakespeare(request.text.clone())?, kind: "a text", files: None }
        }
        "synthetic" => Opened { data: synthetic(request)?, kind: "synthetic", files: None },
        path => open_path(path, request)?,
    };
    let train = &opened.data.train;
    if let Some(test) = &opened.data.test {
        let doing = || format!("opening the test samples of {source}");
        if test.features() != train.features() {
            let [test, train] = [test.features(), train.features()];
            return Err(Error::input(
                doing(),
                format!("they are {test}, but the training samples are {train}"),
            ));
        }
        if test.targets() != train.targets() {
            let [test, train] = [test.targets(), train.targets()];
            let why = format!("their targets are {test}, but those of the training samples are {train}");
            return Err(Error::input(doing(), why));
        }
    }
    Ok(opened)
}

fn open_path(name: &str, request: &SampleRequest<'_>) -> Result<Opened> {
    let path = Path::new(name);
    let fail = |why: String| Error::input(format!("opening --data {name}"), why);
    if let Some(data) = dataset::open_text(name, request.text.clone())? {
        return Ok(Opened { data, kind: "a text", files: None });
    }
    if !path.is_dir() {
        let what =
            "digits, shakespeare, synthetic, a directory, a text, an HDF5 file or a pattern of such files";
        return hdf5(&paths("--data", name, what)?, request);
    }
    let data = if dataset::is_cifar(path) {
        dataset::open_cifar(path)?
    } else if dataset::is_idx(path) {
        dataset::open_idx(path)?
    } else {
        return Err(fail(
            "the directory has neither train-images-idx3-ubyte.gz (MNIST, Fashion-MNIST) nor \
             data_batch_1.bin (CIFAR-10), which data/fetch gets, nor HDF5 files with tokens"
                .into(),
        ));
    };
    Ok(Opened { data, kind: "a directory", files: None })
}

/// Returns the file called `name`, or the files that match it as a pattern, in the order of their
/// names.
fn paths(option: &str, name: &str, expected: &str) -> Result<Vec<PathBuf>> {
    let fail = |why: String| Error::input(format!("opening {option} {name}"), why);
    let with_expected =
        |why: String| if dataset::is_pattern(name) { why } else { format!("{why}; expected {expected}") };
    dataset::matching_paths(name).map_err(|why| fail(with_expected(why)))
}

fn hdf5(paths: &[PathBuf], request: &SampleRequest<'_>) -> Result<Opened> {
    let SourceOptions { inputs, targets, test_fraction, test_data, .. } = request.options;
    let test_fraction = test_fraction.unwrap_or(0.0);
    let targets = (request.targets != TargetsNeed::Unread).then(|| targets.clone());
    let may_lack_targets = request.targets == TargetsNeed::Welcome;
    let names = Hdf5Names { inputs: inputs.clone(), targets, may_lack_targets };
    let open = |name: &str, paths: &[PathBuf]| {
        Hdf5Set::open(name, paths, &names).map(|files| Rc::new(RefCell::new(files)))
    };
    let files = open(request.source, paths)?;
    let num_samples = files.borrow().num_samples();
    let num_test = (num_samples as f64 * test_fraction).round() as usize;
    let num_train = num_samples - num_test;
    if num_train == 0 {
        let why = format!("a share of {test_fraction} of {num_samples} samples leaves none for training");
        return Err(Error::input("--test-fraction", why));
    }
    if num_test == 0 && test_fraction > 0.0 {
        let why = format!("a share of {test_fraction} of {num_samples} samples rounds to no test samples");
        return Err(Error::input("--test-fraction", why));
    }
    let test = match test_data {
        Some(name) => {
            let files = open(name, &self::paths("--test-data", name, "an HDF5 file or a pattern")?)?;
            let range = 0..files.borrow().num_samples();
            Some(FileRange { files, range })
        }
        None => (num_test > 0).then(|| FileRange { files: Rc::clone(&files), range: num_train..num_samples }),
    };
    let files = Files { train: FileRange { files, range: 0..num_train }, test };
    let data = files.direct();
    Ok(Opened { data, kind: "files", files: Some(files) })
}

fn synthetic(request: &SampleRequest<'_>) -> Result<Data> {
    let SourceOptions { synthetic_samples, synthetic_shape, synthetic_targets, .. } = request.options;
    if *synthetic_samples == 0 {
        return Err(Error::input("--synthetic-samples", "it is 0, but must be at least 1"));
    }
    let num_classes = match synthetic_targets.0 {
        Targets::Classes(num) => num,
        _ => 0,
    };
    let features = match synthetic_shape.unwrap_or(request.synthetic) {
        ShapeText::Values(shape) => shape,
        ShapeText::Tokens(len) => Features::Tokens { len, vocabulary: num_classes },
    };
    let targets = match features {
        Features::Tokens { vocabulary: 0, .. } => {
            let why = "tokens are classes, such as classes:65, but these are real values";
            return Err(Error::input("--synthetic-targets", why));
        }
        Features::Tokens { len, vocabulary } => Targets::Tokens { len, vocabulary },
        _ if request.targets != TargetsNeed::Unread => synthetic_targets.0,
        _ => Targets::Nothing,
    };
    let num_test = synthetic_samples.div_ceil(10);
    let part = |first, len| Synthetic::open(features, targets, first, len, request.seed);
    let test = part(*synthetic_samples, num_test)?;
    Ok(Data { train: part(0, *synthetic_samples)?, test: Some(test) })
}
