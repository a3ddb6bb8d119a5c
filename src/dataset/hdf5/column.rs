//! One HDF5 dataset of a file, as rows.

use std::ops::Range;
use std::path::Path;

use half::f16;
use hdf5::types::{FloatSize, IntSize, TypeDescriptor};
use hdf5::{Hyperslab, SliceOrIndex};
use ndarray::IxDyn;

use super::direct::{DirectReader, Scratch};
use super::names::missing;
use super::pages::PageBuffer;
use crate::dataset::stored::{ColumnFormat, StoredType, with_type};
use crate::dataset::{LARGEST_SIZE, Targets};
use crate::memory::check_room;
use crate::nn::Features;
use crate::trace::{self, Name};

/// The filters of the HDF Group's registry that users meet, by number.
const FILTERS: [(i32, &str); 9] = [
    (4, "szip"),
    (307, "bzip2"),
    (32_000, "lzf"),
    (32_001, "blosc"),
    (32_004, "lz4"),
    (32_008, "bitshuffle"),
    (32_013, "zfp"),
    (32_015, "zstd"),
    (32_026, "blosc2"),
];

/// The result of work on a column, with the reason of a failure.
type Outcome<T> = Result<T, String>;

/// One HDF5 dataset of a file, as rows.
#[derive(Clone)]
pub(super) struct Column {
    pub(super) name: String,
    dataset: hdf5::Dataset,
    /// The shape of one row.
    pub(super) shape: Vec<usize>,
    /// True if the numbers are truth values, which HDF5 reads as a type of their own.
    pub(super) is_boolean: bool,
    pub(super) format: ColumnFormat,
    pub(super) num_rows: usize,
    direct: Option<DirectReader>,
    /// The number of rows in a chunk, if the dataset is chunked.
    pub(super) chunk_rows: Option<usize>,
}

impl Column {
    /// Opens the dataset `name` of `file`, which is at `path`.
    pub(super) fn open(path: &Path, file: &hdf5::File, name: &str) -> Outcome<Column> {
        let dataset = file.dataset(name).map_err(|error| missing(file, name, &error))?;
        let shape = dataset.shape();
        let Some((&num_rows, row)) = shape.split_first() else {
            return Err(format!("{name} is a single number, expected a row for each sample"));
        };
        let descriptor = dataset.dtype().and_then(|dtype| dtype.to_descriptor());
        let descriptor = descriptor.map_err(|error| {
            format!(
                "{name} has a type that cannot be read ({error}); floats of 16, 32 and 64 bits can, and \
                 integers"
            )
        })?;
        let stored = match descriptor {
            TypeDescriptor::Boolean | TypeDescriptor::Unsigned(IntSize::U1) => StoredType::U8,
            TypeDescriptor::Unsigned(IntSize::U2) => StoredType::U16,
            TypeDescriptor::Unsigned(IntSize::U4) => StoredType::U32,
            TypeDescriptor::Unsigned(IntSize::U8) => StoredType::U64,
            TypeDescriptor::Integer(IntSize::U1) => StoredType::I8,
            TypeDescriptor::Integer(IntSize::U2) => StoredType::I16,
            TypeDescriptor::Integer(IntSize::U4) => StoredType::I32,
            TypeDescriptor::Integer(IntSize::U8) => StoredType::I64,
            TypeDescriptor::Float(FloatSize::U2) => StoredType::F16,
            TypeDescriptor::Float(FloatSize::U4) => StoredType::F32,
            TypeDescriptor::Float(FloatSize::U8) => StoredType::F64,
            other => {
                return Err(format!("{name} holds {other}, expected integers or floating-point numbers"));
            }
        };
        let len = row.iter().fold(1, |len: usize, size| len.saturating_mul(*size));
        if len > LARGEST_SIZE {
            return Err(format!("{name} has rows of {len} values, and {LARGEST_SIZE} are the limit"));
        }
        check_filters(&dataset, name)?;
        let format = ColumnFormat { stored, len, channels: 1, divisor: 1.0 };
        // not in another byte order, with fewer bits, or with another exponent
        macro_rules! is {
            ($type:ty) => {
                dataset.dtype().is_ok_and(|dtype| dtype.is::<$type>())
            };
        }
        let is_native = with_type!(stored, is);
        Ok(Column {
            name: name.to_owned(),
            shape: row.to_vec(),
            is_boolean: matches!(descriptor, TypeDescriptor::Boolean),
            format,
            direct: is_native.then(|| DirectReader::new(path, &dataset, format.bytes())).flatten(),
            num_rows,
            chunk_rows: dataset.chunk().and_then(|chunk| chunk.first().copied()).filter(|rows| *rows > 0),
            dataset,
        })
    }

    /// Returns the shape of the inputs in this column, and sets how they are converted.
    pub(super) fn as_inputs(&mut self) -> Outcome<Features> {
        let features = match *self.shape.as_slice() {
            [] => Features::Flat(1),
            [len] => Features::Flat(len),
            [height, width] => Features::Image { height, width, channels: 1 },
            [channels, height, width] => Features::Image { height, width, channels },
            _ => {
                return Err(format!(
                    "{}: its rows have {} dimensions, expected at most channels × height × width",
                    self.name,
                    self.shape.len()
                ));
            }
        };
        if let Features::Image { channels, .. } = features {
            self.format.channels = channels;
            if self.format.stored == StoredType::U8 && !self.is_boolean {
                self.format.divisor = 255.0;
            }
        }
        Ok(features)
    }

    /// Returns the kind of the targets in this column; the number of classes is still unknown.
    pub(super) fn as_targets(&self) -> Outcome<Targets> {
        let real = self.format.stored.is_real();
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

    /// Reads past the page cache from now on, where that is possible.
    pub(super) fn bypass_cache(&mut self) {
        self.direct.iter_mut().for_each(DirectReader::bypass_cache);
    }

    /// Reads `rows` to `bytes`, row after row.
    pub(super) fn read(
        &self,
        rows: &Range<usize>,
        bytes: &mut PageBuffer,
        scratch: &mut Scratch,
    ) -> Outcome<()> {
        let last = rows.end.saturating_sub(1);
        let fail = |why: String| format!("{}, rows {} to {last}: {why}", self.name, rows.start);
        let len = rows.len().saturating_mul(self.format.bytes());
        check_room(len).map_err(fail)?;
        if let Some(direct) = &self.direct {
            // what cannot be read so is for the library to read, or to refuse
            if direct.read(rows, bytes, scratch).is_ok() {
                return Ok(());
            }
        }
        let _span = trace::work(Name::Load);
        macro_rules! read {
            ($type:ty) => {
                bytes.set(bytemuck::cast_slice(&self.read_as::<$type>(rows).map_err(fail)?))
            };
        }
        if self.is_boolean {
            let values: Vec<u8> =
                self.read_as::<bool>(rows).map_err(fail)?.into_iter().map(u8::from).collect();
            bytes.set(&values);
        } else {
            with_type!(self.format.stored, read);
        }
        Ok(())
    }

    fn read_as<T: hdf5::H5Type>(&self, rows: &Range<usize>) -> Outcome<Vec<T>> {
        let all = |(start, count)| SliceOrIndex::SliceCount { start, step: 1, count, block: 1 };
        let ranges =
            std::iter::once((rows.start, rows.len())).chain(self.shape.iter().map(|&size| (0, size)));
        let selection = Hyperslab::from(ranges.map(all).collect::<Vec<_>>());
        let values = self.dataset.read_slice::<T, _, IxDyn>(selection).map_err(|error| error.to_string())?;
        Ok(values.into_raw_vec_and_offset().0)
    }
}

/// Refuses a dataset that is stored with a filter that the HDF5 library does not have.
fn check_filters(dataset: &hdf5::Dataset, name: &str) -> Outcome<()> {
    for filter in dataset.filters() {
        if filter.is_available() {
            continue;
        }
        let id = filter.id();
        let known = FILTERS.iter().find(|(number, _)| *number == id);
        let filter = known.map_or(format!("filter {id}"), |(_, known)| format!("{known} (filter {id})"));
        let place = std::env::var("HDF5_PLUGIN_PATH")
            .map_or("which is not set".to_owned(), |path| format!("which is {path}"));
        return Err(format!(
            "{name} is stored with {filter}, which this HDF5 library does not have; install its plugin and \
             name the folder of it in HDF5_PLUGIN_PATH, {place}"
        ));
    }
    Ok(())
}
