//! The layout of a checkpoint: an HDF5 file without its values.

use hdf5::{Group, H5Type};

use super::contents::{Contents, TensorEntry};
use super::file_layout::{FileLayout, LayoutBuilder, add_text};
use super::seal;
use crate::{Error, Result};

/// The name of the dataset with the standardisation of the inputs.
pub(super) const STANDARDISE: &str = "standardise";

/// The name of the dataset with the text of the network, which may be too long for an attribute.
pub(super) const NETWORK: &str = "network";

/// The checksums in a file: XXH3 with 128 bits of values as little-endian bytes.
#[derive(Debug, Clone)]
pub(super) struct Checksums {
    /// That of every tensor.
    pub(super) tensors: Vec<u128>,
    /// That of all parameters in a row.
    pub(super) parameters: u128,
}

/// Lays out the file for `contents`, whose tensors and parameters have these `checksums`, which do
/// not change the places of values: those of the tensors, in order. Not collective.
///
/// # Errors
/// The HDF5 library failed.
pub(super) fn skeleton(contents: &Contents, checksums: &Checksums) -> Result<FileLayout> {
    build(contents, checksums)
        .map_err(|error| Error::failed("laying out a checkpoint", format!("HDF5: {error}")))
}

fn build(contents: &Contents, checksums: &Checksums) -> hdf5::Result<FileLayout> {
    let mut layout = LayoutBuilder::new(seal::LEN)?;
    describe(layout.root(), contents, checksums.parameters)?;
    let mut group: Option<(&str, Group)> = None;
    for (entry, checksum) in contents.entries().iter().zip(&checksums.tensors) {
        let TensorEntry { group: path, name, shape } = entry;
        if group.as_ref().is_none_or(|(open, _)| open != path) {
            group = Some((path, create_group(layout.root(), path)?));
        }
        let Some((_, group)) = &group else { continue };
        let dataset = layout.place::<f32>(group, name, shape)?;
        add_text(&dataset, "xxh3_128", &format!("{checksum:032x}"))?;
    }
    drop(group);
    layout.finish()
}

fn describe(file: &hdf5::File, contents: &Contents, digest: u128) -> hdf5::Result<()> {
    let description = &contents.description;
    let numbers = [
        ("step", description.step),
        ("epoch", description.epoch),
        ("step_in_epoch", description.step_in_epoch),
        ("seed", description.seed),
    ];
    for (name, number) in numbers {
        file.new_attr::<u64>().create(name)?.write_scalar(&number)?;
    }
    if let Some(loss) = description.loss {
        file.new_attr::<f64>().create("loss")?.write_scalar(&loss)?;
    }
    if let Some(numbers) = &description.standardise {
        put(file, STANDARDISE, &[numbers.len(), 3], numbers.as_flattened())?;
    }
    if let Some(text) = &description.network {
        put(file, NETWORK, &[text.len()], text.as_bytes())?;
    }
    add_text(file, "model", &description.model)?;
    add_text(file, "parameters_digest", &format!("{digest:032x}"))?;
    let json = [
        ("config", &description.config),
        ("options", &description.options),
        ("written_by", &description.written_by),
    ];
    for (name, settings) in json {
        let json =
            serde_json::to_string(settings).map_err(|error| hdf5::Error::Internal(error.to_string()))?;
        add_text(file, name, &json)?;
    }
    Ok(())
}

/// Creates a short dataset of the root.
fn put<T: H5Type>(file: &hdf5::File, name: &str, shape: &[usize], values: &[T]) -> hdf5::Result<()> {
    let dataset = file.new_dataset::<T>().with_dcpl(|create| create.obj_track_times(false)).shape(shape);
    dataset.create(name)?.write_raw(values)
}

/// Opens the group `a/b`, creating groups that are missing.
fn create_group(file: &hdf5::File, path: &str) -> hdf5::Result<Group> {
    let mut group = file.as_group()?;
    for part in path.split('/') {
        group = match group.group(part) {
            Ok(found) => found,
            Err(_) => group.create_group(part)?,
        };
    }
    Ok(group)
}
