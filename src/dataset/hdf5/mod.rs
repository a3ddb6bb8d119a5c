//! The user's own samples in HDF5 files, of which several in order are one set.
//!
//! A sample is a row of the dataset of inputs and one of the dataset of targets. Rows are read in
//! the file's own type. `column.rs` reads one HDF5 dataset, by the library or, where it can,
//! `direct.rs` from the bytes of `pages.rs`; `file.rs` reads both datasets of a file; `names.rs` lists
//! what a file has, for messages. Tokens are read at once, by `tokens.rs`.

mod column;
mod direct;
mod file;
mod names;
mod pages;
mod tokens;

use std::ops::Range;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::blocks::SampleBlocks;
use super::stored::RowFormat;
use super::{Dataset, Targets};
use crate::nn::Features;
use crate::{Error, Result};
pub use direct::RowBuffer;
use file::Hdf5File;
pub use file::{FileVersion, Hdf5Names};
pub(super) use tokens::{StoredTokens, read_tokens};
pub use tokens::{has_token_rows, token_files};

/// One or several HDF5 files of samples, one after the other.
pub struct Hdf5Set {
    source: String,
    files: Vec<Hdf5File>,
    blocks: SampleBlocks,
    /// The first sample of each file, and then the number of samples.
    starts: Vec<usize>,
    kind: Targets,
    format: RowFormat,
    /// Memory for rows that are read directly.
    buffer: RowBuffer,
    /// The time for which rows were read directly.
    waited: Duration,
}

impl Hdf5Set {
    /// Opens the files at `paths`, at least one, which `source` names. Not collective. The number of
    /// classes of integer targets is still unknown: see [`Hdf5Set::set_classes`].
    ///
    /// # Errors
    /// A path is not an HDF5 file, or has no dataset of that name, type and shape, or the shapes or
    /// the types of two files differ; the message says what the files have.
    pub fn open(source: &str, paths: &[PathBuf], names: &Hdf5Names) -> Result<Hdf5Set> {
        let mut files: Vec<Hdf5File> = Vec::with_capacity(paths.len());
        let (mut blocks, mut starts) = (SampleBlocks::every(1, 0), vec![0]);
        for path in paths {
            let file = Hdf5File::open(path, names)?;
            if let Some(first) = files.first() {
                check_same_shape(first, &file)?;
            }
            blocks.append(&file.blocks());
            starts.push(blocks.num_samples());
            files.push(file);
        }
        let Some(first) = files.first() else {
            return Err(Error::input(format!("opening {source}"), "no file has such a name"));
        };
        let (kind, format) = (first.kind, first.row_format());
        let source = match files.len() {
            1 => source.to_owned(),
            num => format!("{source} ({num} files)"),
        };
        Ok(Hdf5Set {
            source,
            files,
            blocks,
            starts,
            kind,
            format,
            buffer: RowBuffer::default(),
            waited: Duration::ZERO,
        })
    }

    /// Reads inputs past the system's page cache from now on, where that is possible.
    pub fn bypass_cache(&mut self) {
        self.files.iter_mut().for_each(Hdf5File::bypass_cache);
    }

    /// Returns the bytes of all files.
    pub fn file_bytes(&self) -> u64 {
        self.files.iter().map(|file| file.version().len).sum()
    }

    /// Returns a reader of the same open files, for another thread.
    pub fn reader(&self) -> Hdf5Set {
        let Hdf5Set { source, files, blocks, starts, kind, format, .. } = self;
        Hdf5Set {
            source: source.clone(),
            files: files.clone(),
            blocks: blocks.clone(),
            starts: starts.clone(),
            kind: *kind,
            format: *format,
            buffer: RowBuffer::default(),
            waited: Duration::ZERO,
        }
    }

    /// Sets the number of classes of integer targets: one more than the largest, which a pass over
    /// them found.
    pub fn set_classes(&mut self, num_classes: usize) {
        if let Targets::Classes(classes) = &mut self.kind {
            *classes = num_classes;
        }
    }

    /// Returns the format of a row.
    pub fn row_format(&self) -> RowFormat {
        self.format
    }

    /// Returns the version of every file that was opened, with its path.
    pub fn versions(&self) -> impl Iterator<Item = (String, FileVersion)> {
        self.files.iter().map(|file| (file.path.display().to_string(), file.version()))
    }

    /// Reads the rows in `rows` and passes the bytes of the inputs and of the targets of each to
    /// `keep`, in their order. Not collective.
    ///
    /// # Errors
    /// A file cannot be read any more or has changed, or a value is NaN, infinite, beyond the range of
    /// `f32` or a negative class number.
    pub fn read_rows(
        &self,
        rows: Range<usize>,
        buffer: &mut RowBuffer,
        keep: impl FnMut(usize, &[u8], &[u8]),
    ) -> Result<()> {
        self.read_columns(rows, true, buffer, keep)
    }

    /// As [`Hdf5Set::read_rows`]; without inputs, those are empty and not read.
    fn read_columns(
        &self,
        rows: Range<usize>,
        with_inputs: bool,
        buffer: &mut RowBuffer,
        mut keep: impl FnMut(usize, &[u8], &[u8]),
    ) -> Result<()> {
        let len = if with_inputs { self.format.inputs.bytes() } else { 0 };
        let targets_len = self.format.targets.map_or(0, |targets| targets.bytes());
        let mut start = rows.start;
        while start < rows.end {
            let file = self.starts.partition_point(|first| *first <= start) - 1;
            let end = rows.end.min(self.starts[file + 1]);
            let within = start - self.starts[file]..end - self.starts[file];
            self.files[file].read(&within, with_inputs, buffer)?;
            for row in 0..end - start {
                let inputs = &buffer.inputs[row * len..][..len];
                keep(start + row, inputs, &buffer.targets[row * targets_len..][..targets_len]);
            }
            start = end;
        }
        Ok(())
    }
}

/// Refuses `other` if its rows differ from those of `first`.
fn check_same_shape(first: &Hdf5File, other: &Hdf5File) -> Result<()> {
    if first.features == other.features
        && first.kind == other.kind
        && first.row_format() == other.row_format()
    {
        return Ok(());
    }
    let words = |file: &Hdf5File| {
        let RowFormat { inputs, targets } = file.row_format();
        let targets = targets
            .map_or(String::new(), |targets| format!(" and targets of {} {}", targets.len, targets.stored));
        format!("inputs of {} {}{targets}", file.features, inputs.stored)
    };
    let why = format!(
        "it has {}, but {} has {}; all files of a set must have the same",
        words(other),
        first.path.display(),
        words(first)
    );
    Err(Error::input(format!("reading {}", other.path.display()), why))
}

impl Dataset for Hdf5Set {
    fn source(&self) -> String {
        self.source.clone()
    }

    fn num_samples(&self) -> usize {
        self.blocks.num_samples()
    }

    fn features(&self) -> Features {
        self.files[0].features
    }

    fn targets(&self) -> Targets {
        self.kind
    }

    fn blocks(&self) -> SampleBlocks {
        self.blocks.clone()
    }

    fn waited(&self) -> Duration {
        self.waited
    }

    fn read(&mut self, samples: &[usize], inputs: &mut [f32], targets: &mut [f32]) -> Result<()> {
        let began = Instant::now();
        let (format, len, targets_len) = (self.format, self.features().len(), self.kind.len());
        let with_inputs = !inputs.is_empty();
        // each row once, consecutive ones together
        let mut wanted: Vec<(usize, usize)> = samples.iter().copied().zip(0..).collect();
        wanted.sort_unstable();
        let mut buffer = std::mem::take(&mut self.buffer);
        for run in wanted.chunk_by(|a, b| b.0 - a.0 <= 1) {
            let (first, last) = (run[0].0, run[run.len() - 1].0);
            let mut places = run.iter().peekable();
            let rows = first..last + 1;
            self.read_columns(rows, with_inputs, &mut buffer, |row, input_bytes, target_bytes| {
                while let Some((_, place)) = places.next_if(|(wanted, _)| *wanted == row) {
                    if with_inputs {
                        format.inputs.decode(input_bytes, &mut inputs[place * len..][..len]);
                    }
                    if let (Some(format), false) = (&format.targets, targets.is_empty()) {
                        format.decode(target_bytes, &mut targets[place * targets_len..][..targets_len]);
                    }
                }
            })?;
        }
        self.buffer = buffer;
        self.waited += began.elapsed();
        Ok(())
    }
}
