//! The file of predictions.
//!
//! ```text
//! predictions.h5          HDF5; a row of every dataset is a sample, in the order of the samples
//!   /                     attributes: model, parameters_digest (of the network)
//!   /outputs              f32, [samples, outputs]; not of a sequence with a prediction for each position
//!   /classes              u32, [samples] or [samples, positions]: the likeliest class or token
//!   /losses               f32, [samples] or [samples, positions], if there are targets
//! ```
//!
//! The HDF5 library lays the file out in memory, without the values, so that it never encounters a full
//! disk. The values are written to their places block by block, under a temporary name in the same
//! directory; a file under its final name is whole. It contains no time, so equal predictions are equal
//! bytes.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use hdf5::file::LibraryVersion;
use hdf5::plist::dataset_create::{AllocTime, FillTime};
use hdf5::types::VarLenUnicode;
use tempfile::NamedTempFile;

use super::prediction::{PredictionShape, Predictions};
use crate::checkpoint::{create_beside, publish};
use crate::{Error, Result};

/// A file that is being written.
pub struct PredictionFile {
    path: PathBuf,
    file: NamedTempFile,
    /// The place of the values of outputs, classes and losses in the file.
    offsets: [Option<u64>; 3],
    shape: PredictionShape,
}

impl PredictionFile {
    /// Creates a file of `num_samples` predictions, with `attributes`. Not collective.
    ///
    /// # Errors
    /// The file cannot be created.
    pub fn create(
        path: &Path,
        shape: PredictionShape,
        num_samples: usize,
        attributes: &[(&str, &str)],
    ) -> Result<PredictionFile> {
        let fail = |error: hdf5::Error| {
            Error::failed(format!("laying out {}", path.display()), format!("HDF5: {error}"))
        };
        let (skeleton, offsets) = lay_out(shape, num_samples, attributes).map_err(fail)?;
        let created = create_beside(path).and_then(|mut file| {
            let widths = [shape.num_outputs(), shape.num_classes(), shape.num_losses()];
            let values = offsets.iter().zip(widths).filter_map(|(offset, width)| {
                offset.map(|start| (start, (num_samples * width * size_of::<f32>()) as u64))
            });
            copy_between(skeleton, values.collect(), file.as_file_mut())?;
            Ok(file)
        });
        let way_out = "give --output a file in a directory that exists and can be written";
        let with_way_out = |error: io::Error| io::Error::new(error.kind(), format!("{error}; {way_out}"));
        let file = created.map_err(|error| Error::at_path(doing(path), &with_way_out(error)))?;
        Ok(PredictionFile { path: path.to_owned(), file, offsets, shape })
    }

    /// Writes predictions of the samples from `first` on. Not collective.
    ///
    /// # Errors
    /// The system reports an error, such as a full disk.
    pub(super) fn write(&mut self, first: usize, predictions: &Predictions) -> Result<()> {
        let Predictions { outputs, classes, losses, .. } = predictions;
        let classes: Vec<u32> = classes.iter().map(|class| *class as u32).collect();
        let arrays: [&[u8]; 3] =
            [bytemuck::cast_slice(outputs), bytemuck::cast_slice(&classes), bytemuck::cast_slice(losses)];
        let widths = [self.shape.num_outputs(), self.shape.num_classes(), self.shape.num_losses()];
        for ((offset, width), bytes) in self.offsets.iter().zip(widths).zip(arrays) {
            let Some(offset) = offset else { continue };
            let place = offset + (first * width * size_of::<f32>()) as u64;
            let written = self.file.as_file().write_all_at(bytes, place);
            written.map_err(|error| Error::failed(doing(&self.path), error))?;
        }
        Ok(())
    }

    /// Makes the file durable under its name. Not collective.
    ///
    /// # Errors
    /// The system reports an error.
    pub(super) fn finish(self) -> Result<()> {
        publish(self.file, &self.path, &mut |_| ()).map_err(|error| Error::failed(doing(&self.path), error))
    }
}

fn doing(path: &Path) -> String {
    format!("writing the predictions to {}", path.display())
}

/// Lays out the file in memory, without values. Returns it with the places of outputs, classes and losses.
fn lay_out(
    shape: PredictionShape,
    num_samples: usize,
    attributes: &[(&str, &str)],
) -> hdf5::Result<(File, [Option<u64>; 3])> {
    let system = |error: io::Error| hdf5::Error::Internal(error.to_string());
    // HDF5 opens files by name only; the name is removed as soon as the file is open
    let in_memory = NamedTempFile::new_in("/dev/shm").or_else(|_| NamedTempFile::new()).map_err(system)?;
    let file = hdf5::FileBuilder::new()
        .with_fcpl(|create| create.obj_track_times(false))
        .with_fapl(|access| access.libver_bounds(LibraryVersion::Earliest, LibraryVersion::V110))
        .create(in_memory.path())?;
    let (in_memory, path) = in_memory.into_parts();
    path.close().map_err(system)?;
    for (name, value) in attributes {
        let value: VarLenUnicode =
            value.parse().map_err(|_| hdf5::Error::Internal(format!("{name} holds a zero byte")))?;
        file.new_attr::<VarLenUnicode>().create(*name)?.write_scalar(&value)?;
    }
    let of_samples = |width: usize| [num_samples, width][..if width == 1 { 1 } else { 2 }].to_vec();
    let outputs = (shape.num_outputs() > 0).then(|| vec![num_samples, shape.num_outputs()]);
    let outputs = outputs.map(|sizes| place::<f32>(&file, "outputs", sizes)).transpose()?;
    let classes = Some(shape.num_classes()).filter(|width| *width > 0);
    let classes = classes.map(|width| place::<u32>(&file, "classes", of_samples(width))).transpose()?;
    let losses = Some(shape.num_losses()).filter(|width| *width > 0);
    let losses = losses.map(|width| place::<f32>(&file, "losses", of_samples(width))).transpose()?;
    file.close()?;
    Ok((in_memory, [outputs, classes, losses]))
}

/// Creates a dataset and returns the place of its values.
fn place<T: hdf5::H5Type>(file: &hdf5::File, name: &str, sizes: Vec<usize>) -> hdf5::Result<u64> {
    let dataset = file
        .new_dataset::<T>()
        .with_dcpl(|create| {
            create.alloc_time(Some(AllocTime::Early)).fill_time(FillTime::Never).obj_track_times(false)
        })
        .shape(sizes)
        .create(name)?;
    dataset.offset().ok_or_else(|| hdf5::Error::Internal(format!("{name} has no place in the file")))
}

/// Copies everything but `values`, pairs of a start and a length, from `skeleton` to `file`.
fn copy_between(mut skeleton: File, mut values: Vec<(u64, u64)>, file: &mut File) -> io::Result<()> {
    let len = skeleton.metadata()?.len();
    values.sort_unstable();
    values.push((len, 0));
    let mut at = 0;
    for (start, values_len) in values {
        skeleton.seek(SeekFrom::Start(at))?;
        let mut between = vec![0; (start - at) as usize];
        skeleton.read_exact(&mut between)?;
        file.seek(SeekFrom::Start(at))?;
        file.write_all(&between)?;
        at = start + values_len;
    }
    file.set_len(len)
}
