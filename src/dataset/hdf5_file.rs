//! The user's own HDF5 file: one HDF5 dataset of inputs, one of targets, samples along the first
//! dimension.
//!
//! Only the requested rows are read, consecutive ones at once, so a file may be larger than memory.
//! Rows that have been read are cached if all of them fit in [`Hdf5Options::cache_bytes`].

use std::collections::{HashSet, VecDeque};
use std::path::{Path, PathBuf};

use hdf5::types::{IntSize, TypeDescriptor};
use hdf5::{Hyperslab, SliceOrIndex};
use ndarray::IxDyn;

use super::{Dataset, LARGEST_SIZE, Targets, zeros};
use crate::error::hdf5_hint;
use crate::memory::check_room;
use crate::nn::Features;
use crate::{Error, Result};

/// Bytes of each HDF5 dataset's unpacked chunks that the HDF5 library caches. Its own default, 1
/// MiB, is often less than a single chunk.
const CHUNK_CACHE_BYTES: usize = 64 << 20;

/// The names of the HDF5 datasets to read, and the size of the cache.
#[derive(Debug, Clone)]
pub struct Hdf5Options {
    /// Inputs: `[samples]`, `[samples, features]`, `[samples, height, width]` or `[samples,
    /// channels, height, width]`.
    pub inputs: String,
    /// Targets: integers as class numbers, `[samples]`; or real values, `[samples]` or `[samples,
    /// values]`. `None` if the loss needs none.
    pub targets: Option<String>,
    /// Rows that have been read are cached if the rows of inputs and targets together take at most
    /// this many bytes.
    pub cache_bytes: usize,
}

/// An open HDF5 file.
pub struct Hdf5File {
    path: PathBuf,
    inputs: Column,
    targets: Option<Column>,
    features: Features,
    kind: Targets,
    num_samples: usize,
    wanted: Vec<(usize, usize)>,
}

/// One HDF5 dataset of the file, as rows of `f32`.
struct Column {
    name: String,
    dataset: hdf5::Dataset,
    /// The shape of one row.
    shape: Vec<usize>,
    /// The number of channels of an image, which come first in the file and are moved last.
    channels: usize,
    /// The divisor of stored values: 255 for images of bytes.
    divisor: f32,
    /// The cached rows, and for each row whether it has been read.
    cache: Option<(Vec<f32>, Vec<bool>)>,
}

impl Hdf5File {
    /// Opens the file at `path`. Not collective. The number of classes of integer targets is still
    /// unknown: see [`Hdf5File::set_classes`].
    ///
    /// # Errors
    /// The file is not an HDF5 file, or has no dataset of that name, type and shape; the message
    /// says what it has.
    pub fn open(path: &Path, options: &Hdf5Options) -> Result<Hdf5File> {
        let fail = |why: String| Error::input(format!("reading {}", path.display()), why);
        let file = open_file(path).map_err(fail)?;
        let column = |name: &str| Column::open(&file, name).map_err(fail);
        let mut inputs = column(&options.inputs)?;
        let mut targets = options.targets.as_deref().map(column).transpose()?;
        let features = match *inputs.shape.as_slice() {
            [] => Features::Flat(1),
            [len] => Features::Flat(len),
            [height, width] => Features::Image { height, width, channels: 1 },
            [channels, height, width] => Features::Image { height, width, channels },
            _ => {
                let why = format!(
                    "its rows have {} dimensions, expected at most channels × height × width",
                    inputs.shape.len()
                );
                return Err(fail(format!("{}: {why}", inputs.name)));
            }
        };
        if let Features::Image { channels, .. } = features {
            inputs.channels = channels;
            if inputs.is_bytes().map_err(fail)? {
                inputs.divisor = 255.0;
            }
        }
        for (column, len) in [
            (&inputs, features.len()),
            (targets.as_ref().unwrap_or(&inputs), targets.as_ref().map_or(0, Column::row_len)),
        ] {
            if len > LARGEST_SIZE {
                return Err(fail(format!(
                    "{} has rows of {len} values, and {LARGEST_SIZE} are the limit",
                    column.name
                )));
            }
        }
        let num_samples = inputs.num_rows();
        let kind = match &targets {
            None => Targets::Nothing,
            Some(targets) => {
                if targets.num_rows() != num_samples {
                    let (rows, name) = (targets.num_rows(), &targets.name);
                    return Err(fail(format!(
                        "{} has {num_samples} rows, {name} {rows}; they must have the same number",
                        inputs.name
                    )));
                }
                targets.kind().map_err(fail)?
            }
        };
        if num_samples == 0 || features.len() == 0 {
            return Err(fail(format!(
                "{} has {num_samples} rows of {features}: nothing to learn from",
                inputs.name
            )));
        }
        let row_len = inputs.row_len().saturating_add(targets.as_ref().map_or(0, Column::row_len));
        let bytes = inputs.num_rows().saturating_mul(row_len).saturating_mul(size_of::<f32>());
        if bytes <= options.cache_bytes {
            inputs.keep_rows();
            if let Some(targets) = &mut targets {
                targets.keep_rows();
            }
        }
        Ok(Hdf5File {
            path: path.to_owned(),
            inputs,
            targets,
            features,
            kind,
            num_samples,
            wanted: Vec::new(),
        })
    }

    /// Sets the number of classes of integer targets: one more than the largest, which a pass over
    /// them found.
    pub fn set_classes(&mut self, num_classes: usize) {
        if let Targets::Classes(classes) = &mut self.kind {
            *classes = num_classes;
        }
    }
}

impl Dataset for Hdf5File {
    fn source(&self) -> String {
        self.path.display().to_string()
    }

    fn num_samples(&self) -> usize {
        self.num_samples
    }

    fn features(&self) -> Features {
        self.features
    }

    fn targets(&self) -> Targets {
        self.kind
    }

    fn read(&mut self, samples: &[usize], inputs: &mut [f32], targets: &mut [f32]) -> Result<()> {
        let doing = || format!("reading {}", self.path.display());
        if !inputs.is_empty() {
            self.inputs.read(samples, &mut self.wanted, inputs).map_err(|why| Error::input(doing(), why))?;
        }
        let Some(column) = self.targets.as_mut().filter(|_| !targets.is_empty()) else {
            return Ok(());
        };
        column.read(samples, &mut self.wanted, targets).map_err(|why| Error::input(doing(), why))?;
        if let Targets::Classes(classes) = self.kind {
            let bad = |label: f32| label < 0.0 || (classes > 0 && label as usize >= classes);
            if let Some(at) = targets.iter().position(|label| bad(*label)) {
                let why = format!(
                    "{} is {} at row {}, class numbers start at 0",
                    column.name, targets[at], samples[at]
                );
                return Err(Error::input(doing(), why));
            }
        }
        Ok(())
    }
}

/// Opens the HDF5 file at `path`, or returns the reason why it cannot be opened.
fn open_file(path: &Path) -> std::result::Result<hdf5::File, String> {
    // the system's reasons are clearer than HDF5's
    let length = super::open_file(path)?.metadata().map_err(|error| error.to_string())?.len();
    if length == 0 {
        return Err("the file is empty".into());
    }
    let opened = hdf5::File::with_options()
        .with_fapl(|access| access.chunk_cache(10_007, CHUNK_CACHE_BYTES, 0.75))
        .open(path);
    opened.map_err(|error| {
        let lock = hdf5_hint(&error.to_string());
        let hint = if !lock.is_empty() {
            lock
        } else if path.to_string_lossy().contains("-ubyte") {
            "; for MNIST, give the directory of the files"
        } else {
            ""
        };
        format!("it is not an HDF5 file, or is damaged: {error}{hint}")
    })
}

impl Column {
    fn open(file: &hdf5::File, name: &str) -> std::result::Result<Column, String> {
        let dataset = file.dataset(name).map_err(|error| missing(file, name, &error))?;
        let shape = dataset.shape();
        let Some((_, row)) = shape.split_first() else {
            return Err(format!("{name} is a single number, expected a row for each sample"));
        };
        let row = row.to_vec();
        let column =
            Column { name: name.to_owned(), shape: row, channels: 1, divisor: 1.0, cache: None, dataset };
        match column.descriptor()? {
            TypeDescriptor::Integer(_)
            | TypeDescriptor::Unsigned(_)
            | TypeDescriptor::Float(_)
            | TypeDescriptor::Boolean => {}
            other => {
                return Err(format!("{name} holds {other}, expected integers or floating-point numbers"));
            }
        }
        Ok(column)
    }

    /// Caches the rows that are read from now on, if there is memory for all of them.
    fn keep_rows(&mut self) {
        let mut present = Vec::new();
        if let (Ok(rows), Ok(())) =
            (zeros(self.num_rows() * self.row_len()), present.try_reserve_exact(self.num_rows()))
        {
            present.resize(self.num_rows(), false);
            self.cache = Some((rows, present));
        }
    }

    fn descriptor(&self) -> std::result::Result<TypeDescriptor, String> {
        let descriptor = self.dataset.dtype().and_then(|dtype| dtype.to_descriptor());
        descriptor.map_err(|error| {
            format!(
                "{} has a type that cannot be read ({error}); floats of 16, 32 and 64 bits can, and integers",
                self.name
            )
        })
    }

    fn is_bytes(&self) -> std::result::Result<bool, String> {
        Ok(matches!(self.descriptor()?, TypeDescriptor::Unsigned(IntSize::U1)))
    }

    fn num_rows(&self) -> usize {
        self.dataset.shape().first().copied().unwrap_or_default()
    }

    fn row_len(&self) -> usize {
        self.shape.iter().fold(1, |len: usize, size| len.saturating_mul(*size))
    }

    /// Returns the kind of a column of targets.
    fn kind(&self) -> std::result::Result<Targets, String> {
        let real = matches!(self.descriptor()?, TypeDescriptor::Float(_));
        match (self.shape.as_slice(), real) {
            ([] | [1], false) => Ok(Targets::Classes(0)),
            ([], true) => Ok(Targets::Values(1)),
            ([len], true) if *len > 0 => Ok(Targets::Values(*len)),
            (shape, _) => Err(format!(
                "{} has rows of shape {shape:?}, expected one class number (integers) or a list of real \
                 values",
                self.name
            )),
        }
    }

    /// Writes `rows` to `values`, in their order; `wanted` is scratch.
    fn read(
        &mut self,
        rows: &[usize],
        wanted: &mut Vec<(usize, usize)>,
        values: &mut [f32],
    ) -> std::result::Result<(), String> {
        let len = self.row_len();
        wanted.clear();
        for (position, &row) in rows.iter().enumerate() {
            match &self.cache {
                Some((cached, present)) if present[row] => {
                    values[position * len..][..len].copy_from_slice(&cached[row * len..][..len]);
                }
                _ => wanted.push((row, position)),
            }
        }
        wanted.sort_unstable();
        for run in wanted.chunk_by(|a, b| b.0 - a.0 <= 1) {
            let (first, last) = (run[0].0, run[run.len() - 1].0);
            let block = self.read_rows(first, last + 1 - first)?;
            for &(row, position) in run {
                let value = &mut values[position * len..][..len];
                self.arrange(&block[(row - first) * len..][..len], value);
                if let Some(at) = value.iter().position(|value| !value.is_finite()) {
                    let found = value[at];
                    return Err(format!(
                        "{} holds {found} at row {row}, element {at}; every number must be finite",
                        self.name
                    ));
                }
                if let Some((cached, present)) = &mut self.cache {
                    cached[row * len..][..len].copy_from_slice(value);
                    present[row] = true;
                }
            }
        }
        Ok(())
    }

    fn read_rows(&self, start: usize, count: usize) -> std::result::Result<Vec<f32>, String> {
        let fail = |why: String| format!("{}, rows {start} to {}: {why}", self.name, start + count - 1);
        let bytes = count.saturating_mul(self.row_len()).saturating_mul(size_of::<f32>());
        check_room(bytes).map_err(fail)?;
        let all = |(start, count)| SliceOrIndex::SliceCount { start, step: 1, count, block: 1 };
        let ranges = std::iter::once((start, count)).chain(self.shape.iter().map(|&size| (0, size)));
        let selection = Hyperslab::from(ranges.map(all).collect::<Vec<_>>());
        let block = self.dataset.read_slice::<f32, _, IxDyn>(selection);
        let block = block.map_err(|error| fail(error.to_string()))?;
        Ok(block.into_raw_vec_and_offset().0)
    }

    /// Writes one row as models read it: channels last, divided by the divisor.
    fn arrange(&self, row: &[f32], value: &mut [f32]) {
        let positions = row.len() / self.channels.max(1);
        for (channel, plane) in row.chunks_exact(positions.max(1)).enumerate() {
            let places = value[channel.min(self.channels - 1)..].iter_mut().step_by(self.channels);
            places.zip(plane).for_each(|(value, stored)| *value = stored / self.divisor);
        }
    }
}

/// Returns the reason why the dataset `name` cannot be used: it is something else, cannot be
/// opened, or does not exist.
fn missing(file: &hdf5::File, name: &str, error: &hdf5::Error) -> String {
    let parts: Vec<&str> = name.split('/').filter(|part| !part.is_empty()).collect();
    // a path exists as far as all its parts do
    let exists = !parts.is_empty() && (1..=parts.len()).all(|end| file.link_exists(&parts[..end].join("/")));
    if exists && file.group(name).is_err() {
        return format!("{name} exists, but cannot be opened: {error}");
    }
    let found = list(file);
    let found = if found.is_empty() { "none".to_owned() } else { found.join(", ") };
    let what = if exists { format!("{name} is a group") } else { format!("it has no dataset {name}") };
    format!("{what}; its datasets: {found}")
}

/// Lists the paths of the datasets of a file, twenty at most, those of outer groups first. Groups
/// may contain each other in a circle, so each is visited once.
fn list(file: &hdf5::File) -> Vec<String> {
    const MOST: usize = 20;
    const MOST_GROUPS: usize = 10_000;
    let (mut found, mut seen) = (Vec::new(), HashSet::new());
    let mut pending: VecDeque<(hdf5::Group, String)> =
        file.as_group().map(|root| (root, String::new())).into_iter().collect();
    while let Some((group, prefix)) = pending.pop_front() {
        for name in group.member_names().unwrap_or_default() {
            let path = format!("{prefix}/{name}");
            if found.len() == MOST {
                return found;
            } else if group.dataset(&name).is_ok() {
                found.push(path);
            } else if seen.len() < MOST_GROUPS
                && let Ok(inner) = group.group(&name)
                && let Ok(place) = inner.loc_info()
                && seen.insert((place.fileno, format!("{:?}", place.token)))
            {
                pending.push_back((inner, path));
            }
        }
    }
    found
}
