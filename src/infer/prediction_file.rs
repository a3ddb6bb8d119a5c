//! The file of predictions.
//!
//! ```text
//! predictions.h5          HDF5; a row of every dataset is a sample, in the order of the samples
//!   /                     attributes: model, parameters_digest (of the network)
//!   /outputs              f32, [samples, outputs]; with --logits [samples, positions, tokens], where each
//!                         position of a sequence has a prediction
//!   /classes              u32, [samples] or [samples, positions]: the likeliest class or token
//!   /losses               f32, [samples] or [samples, positions], if there are targets
//! ```
//!
//! The HDF5 library lays the file out in memory ([`LayoutBuilder`]). The values are written to their places
//! block by block, under a temporary name in the same directory; a file under its final name is whole. It
//! contains no time, so equal predictions are equal bytes.

use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

use super::prediction::{PredictionShape, Predictions};
use crate::checkpoint::{FileLayout, LayoutBuilder, add_text, create_beside, publish};
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
        let (mut layout, offsets) = lay_out(shape, num_samples, attributes).map_err(fail)?;
        let created = create_beside(path).and_then(|mut file| {
            layout.copy_to(file.as_file_mut(), 0)?;
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
) -> hdf5::Result<(FileLayout, [Option<u64>; 3])> {
    let mut layout = LayoutBuilder::new(0)?;
    let root = layout.root().as_group()?;
    for (name, value) in attributes {
        add_text(&root, name, value)?;
    }
    let of_samples = |width: usize| [num_samples, width][..if width == 1 { 1 } else { 2 }].to_vec();
    let (classes, losses) = (shape.num_classes(), shape.num_losses());
    let has = [shape.num_outputs(), classes, losses].map(|width| width > 0);
    if has[0] {
        let of_sample = [shape.num_predictions(), shape.outputs_of_one()];
        let shape = [&[num_samples], &of_sample[usize::from(of_sample[0] == 1)..]].concat();
        layout.place::<f32>(&root, "outputs", &shape)?;
    }
    if has[1] {
        layout.place::<u32>(&root, "classes", &of_samples(classes))?;
    }
    if has[2] {
        layout.place::<f32>(&root, "losses", &of_samples(losses))?;
    }
    drop(root);
    let layout = layout.finish()?;
    let mut starts = layout.values.iter().map(|place| place.start);
    let offsets = has.map(|has| has.then(|| starts.next()).flatten());
    Ok((layout, offsets))
}
