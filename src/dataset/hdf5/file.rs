//! One HDF5 file of samples: a dataset of inputs and one of targets, samples along the first
//! dimension.

use std::fs::Metadata;
use std::io;
use std::ops::Range;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use super::column::Column;
use super::direct::RowBuffer;
use super::names::exists;
use crate::dataset::Targets;
use crate::dataset::blocks::SampleBlocks;
use crate::dataset::files::open_file;
use crate::dataset::stored::{RowFormat, StoredType};
use crate::error::hdf5_hint;
use crate::memory::check_room;
use crate::nn::Features;
use crate::{Error, Result};

/// Bytes of each HDF5 dataset's unpacked chunks that the HDF5 library caches: enough for targets,
/// whose chunks are seldom those of the inputs. Inputs are read chunk by chunk.
const CHUNK_CACHE_BYTES: usize = 4 << 20;

/// The least bytes of a block: enough for a file system to deliver at full speed.
const BLOCK_BYTES: usize = 1 << 20;

/// The names of the HDF5 datasets to read.
#[derive(Debug, Clone)]
pub struct Hdf5Names {
    /// Inputs: `[samples]`, `[samples, features]`, `[samples, height, width]` or `[samples,
    /// channels, height, width]`.
    pub inputs: String,
    /// Targets: integers as class numbers, `[samples]`; or real values, `[samples]` or `[samples,
    /// values]`. `None` if the loss needs none.
    pub targets: Option<String>,
    /// True if samples without targets will do.
    pub may_lack_targets: bool,
}

/// An open HDF5 file.
#[derive(Clone)]
pub(super) struct Hdf5File {
    pub(super) path: PathBuf,
    version: FileVersion,
    inputs: Column,
    targets: Option<Column>,
    pub(super) features: Features,
    /// The kind of targets; the number of classes is still unknown.
    pub(super) kind: Targets,
    pub(super) num_samples: usize,
}

/// The properties by which a changed file is recognised.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileVersion {
    /// The device and the number of the file on it.
    pub place: (u64, u64),
    /// The length in bytes.
    pub len: u64,
    /// The time of the last change, in seconds and nanoseconds.
    pub changed: (i64, i64),
}

impl FileVersion {
    fn of(metadata: &Metadata) -> FileVersion {
        FileVersion {
            place: (metadata.dev(), metadata.ino()),
            len: metadata.len(),
            changed: (metadata.mtime(), metadata.mtime_nsec()),
        }
    }
}

impl Hdf5File {
    /// Opens the file at `path`. Not collective.
    ///
    /// # Errors
    /// The file is not an HDF5 file, or has no dataset of that name, type and shape; the message
    /// says what it has.
    pub(super) fn open(path: &Path, names: &Hdf5Names) -> Result<Hdf5File> {
        let fail = |why: String| Error::input(format!("reading {}", path.display()), why);
        let (file, version) = open_hdf5(path).map_err(fail)?;
        let column = |name: &str| Column::open(path, &file, name).map_err(fail);
        let mut inputs = column(&names.inputs)?;
        let is_there = |name: &&str| !names.may_lack_targets || exists(&file, name);
        let targets = names.targets.as_deref().filter(is_there).map(column).transpose()?;
        let features = inputs.as_inputs().map_err(fail)?;
        let num_samples = inputs.num_rows;
        let kind = match &targets {
            None => Targets::Nothing,
            Some(targets) if targets.num_rows != num_samples => {
                let (rows, name) = (targets.num_rows, &targets.name);
                let why = format!(
                    "{} has {num_samples} rows, {name} {rows}; they must have the same number",
                    inputs.name
                );
                return Err(fail(why));
            }
            Some(targets) => targets.as_targets().map_err(fail)?,
        };
        if num_samples == 0 || features.len() == 0 {
            let why = format!("{} has {num_samples} rows of {features}: nothing to learn from", inputs.name);
            return Err(fail(why));
        }
        // a header can announce any number of rows; a block takes a word, in two lists
        let num_blocks = num_samples.saturating_mul(inputs.format.bytes()) / BLOCK_BYTES;
        check_room(num_blocks.saturating_mul(2 * size_of::<usize>())).map_err(fail)?;
        Ok(Hdf5File { path: path.to_owned(), version, inputs, targets, features, kind, num_samples })
    }

    /// Returns the version of the file that was opened.
    pub(super) fn version(&self) -> FileVersion {
        self.version
    }

    /// Reads inputs past the page cache from now on. Targets are small, and neighbours share a page.
    pub(super) fn bypass_cache(&mut self) {
        self.inputs.bypass_cache();
    }

    /// Returns the format of a row.
    pub(super) fn row_format(&self) -> RowFormat {
        RowFormat { inputs: self.inputs.format, targets: self.targets.as_ref().map(|targets| targets.format) }
    }

    /// Returns blocks of whole chunks of the inputs, of at least a megabyte if there is so much.
    pub(super) fn blocks(&self) -> SampleBlocks {
        let chunk = self.inputs.chunk_rows.unwrap_or(1);
        let chunk_bytes = chunk.saturating_mul(self.row_format().bytes()).max(1);
        let len = chunk.saturating_mul((BLOCK_BYTES / chunk_bytes).max(1));
        SampleBlocks::every(len.clamp(1, self.num_samples), self.num_samples)
    }

    /// Reads the bytes of `rows` to `buffer`, those of the inputs only if `with_inputs`.
    ///
    /// # Errors
    /// The file cannot be read any more or has changed, or a value is NaN, infinite, beyond the range of
    /// `f32` or a negative class number.
    pub(super) fn read(&self, rows: &Range<usize>, with_inputs: bool, buffer: &mut RowBuffer) -> Result<()> {
        let fail = |why: String| Error::input(format!("reading {}", self.path.display()), why);
        self.check_version().map_err(fail)?;
        let RowBuffer { inputs, targets, scratch: [scratch, other] } = buffer;
        if with_inputs {
            self.inputs.read(rows, inputs, scratch).map_err(fail)?;
            check_finite(&self.inputs, rows, inputs).map_err(fail)?;
        }
        targets.set(&[]);
        if let Some(column) = &self.targets {
            column.read(rows, targets, other).map_err(fail)?;
            check_finite(column, rows, targets).map_err(fail)?;
            if matches!(self.kind, Targets::Classes(_)) {
                check_labels(column, rows, targets).map_err(fail)?;
            }
        }
        Ok(())
    }

    /// Refuses a file that has changed since it was opened. One that was removed can still be read.
    fn check_version(&self) -> std::result::Result<(), String> {
        let now = match std::fs::metadata(&self.path) {
            Ok(metadata) => FileVersion::of(&metadata),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(error.to_string()),
        };
        if now == self.version {
            return Ok(());
        }
        let what = if now.place != self.version.place {
            "another file has taken its place".to_owned()
        } else if now.len != self.version.len {
            format!("it had {} bytes and has {}", self.version.len, now.len)
        } else {
            "it has as many bytes as before, and was written to".to_owned()
        };
        Err(format!("it has changed since it was opened ({what}); start again, with the file at rest"))
    }
}

/// Opens the HDF5 file at `path`, or returns the reason why it cannot be opened.
pub(super) fn open_hdf5(path: &Path) -> std::result::Result<(hdf5::File, FileVersion), String> {
    // the system's reasons are clearer than HDF5's
    let metadata = open_file(path)?.metadata().map_err(|error| error.to_string())?;
    if metadata.len() == 0 {
        return Err("the file is empty".into());
    }
    let opened = hdf5::File::with_options()
        .with_fapl(|access| access.chunk_cache(10_007, CHUNK_CACHE_BYTES, 0.75))
        .open(path);
    let file = opened.map_err(|error| {
        let lock = hdf5_hint(&error.to_string());
        let hint = if !lock.is_empty() {
            lock
        } else if path.to_string_lossy().contains("-ubyte") {
            "; for MNIST, give the directory of the files"
        } else {
            "; the name of a text ends in .txt, that of a file with tokens of 16 bits in .bin"
        };
        format!("it is not an HDF5 file, or is damaged: {error}{hint}")
    })?;
    Ok((file, FileVersion::of(&metadata)))
}

/// Refuses NaN, infinities and numbers beyond the range of `f32` in the rows of a column.
fn check_finite(column: &Column, rows: &Range<usize>, bytes: &[u8]) -> std::result::Result<(), String> {
    let format = &column.format;
    if !format.stored.is_real() {
        return Ok(());
    }
    let mut values = vec![0.0; format.len];
    for (row, bytes) in rows.clone().zip(bytes.chunks_exact(format.bytes())) {
        format.decode(bytes, &mut values);
        // without a branch for each value
        if values.iter().fold(true, |all, value| all & value.is_finite()) {
            continue;
        }
        let at = values.iter().position(|value| !value.is_finite()).unwrap_or_default();
        if format.stored == StoredType::F64 {
            // channels come first in the file
            let place = at % format.channels * (format.len / format.channels) + at / format.channels;
            let stored: f64 =
                bytemuck::pod_read_unaligned(&bytes[place * size_of::<f64>()..][..size_of::<f64>()]);
            if stored.is_finite() {
                return Err(format!(
                    "{} holds {stored:e} at row {row}, element {at}, which exceeds the range of 32 bits, \
                     ±{:e}; scale the numbers",
                    column.name,
                    f32::MAX
                ));
            }
        }
        return Err(format!(
            "{} holds {} at row {row}, element {at}; every number must be finite",
            column.name, values[at]
        ));
    }
    Ok(())
}

/// Refuses negative class numbers in the rows of a column.
fn check_labels(column: &Column, rows: &Range<usize>, bytes: &[u8]) -> std::result::Result<(), String> {
    let mut label = [0.0];
    for (row, bytes) in rows.clone().zip(bytes.chunks_exact(column.format.bytes())) {
        column.format.decode(bytes, &mut label);
        if label[0] < 0.0 {
            return Err(format!("{} is {} at row {row}, class numbers start at 0", column.name, label[0]));
        }
    }
    Ok(())
}
