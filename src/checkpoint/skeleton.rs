//! The HDF5 file without its values, laid out by the HDF5 library in memory, so that the library
//! never encounters a full disk.

use std::fs::File;
use std::io;

use hdf5::file::LibraryVersion;
use hdf5::plist::dataset_create::{AllocTime, FillTime};
use hdf5::types::VarLenUnicode;
use hdf5::{Group, Location};
use tempfile::NamedTempFile;

use super::contents::{Contents, TensorEntry};
use super::seal;
use crate::{Error, Result};

/// The name of the dataset with the standardisation of the inputs.
pub(super) const STANDARDISE: &str = "standardise";

/// The checksums in a file: XXH3 with 128 bits of values as little-endian bytes.
#[derive(Debug, Clone)]
pub(super) struct Checksums {
    /// That of every tensor.
    pub(super) tensors: Vec<u128>,
    /// That of all parameters in a row.
    pub(super) parameters: u128,
}

/// A file in memory whose HDF5 datasets are not filled in.
pub(super) struct Skeleton {
    pub(super) file: File,
    /// For each tensor of the contents, the offset of its values in the file.
    pub(super) offsets: Vec<u64>,
    /// The length of the whole file.
    pub(super) len: u64,
}

/// Lays out the file for `contents`, whose tensors and parameters have these `checksums`, which do
/// not change the layout. Not collective.
///
/// # Errors
/// The HDF5 library failed.
pub(super) fn skeleton(contents: &Contents, checksums: &Checksums) -> Result<Skeleton> {
    build(contents, checksums)
        .map_err(|error| Error::failed("laying out a checkpoint", format!("HDF5: {error}")))
}

fn build(contents: &Contents, checksums: &Checksums) -> hdf5::Result<Skeleton> {
    let system = |error: io::Error| hdf5::Error::Internal(error.to_string());
    // HDF5 opens files by name only; the name is removed as soon as the file is open
    let in_memory = NamedTempFile::new_in("/dev/shm").or_else(|_| NamedTempFile::new()).map_err(system)?;
    let options = hdf5::FileBuilder::new()
        .with_fcpl(|create| create.userblock(seal::LEN as u64).obj_track_times(false))
        .with_fapl(|access| access.libver_bounds(LibraryVersion::Earliest, LibraryVersion::V110))
        .clone();
    let file = options.create(in_memory.path())?;
    let (in_memory, path) = in_memory.into_parts();
    path.close().map_err(system)?;
    describe(&file, contents, checksums.parameters)?;
    let mut offsets = Vec::new();
    let mut group: Option<(&str, Group)> = None;
    for (entry, checksum) in contents.entries().iter().zip(&checksums.tensors) {
        let TensorEntry { group: path, name, shape } = entry;
        if group.as_ref().is_none_or(|(open, _)| open != path) {
            group = Some((path, create_group(&file, path)?));
        }
        let Some((_, group)) = &group else { continue };
        let dataset = group
            .new_dataset::<f32>()
            .with_dcpl(|create| {
                create.alloc_time(Some(AllocTime::Early)).fill_time(FillTime::Never).obj_track_times(false)
            })
            .shape(shape.as_slice())
            .create(name.as_str())?;
        text(&dataset, "xxh3_128", &format!("{checksum:032x}"))?;
        let offset = dataset.offset();
        offsets.push(
            offset
                .ok_or_else(|| hdf5::Error::Internal(format!("{path}/{name} has no offset in the file")))?,
        );
    }
    drop(group);
    file.close()?;
    let len = in_memory.metadata().map_err(system)?.len();
    Ok(Skeleton { file: in_memory, offsets, len })
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
        let dataset = file
            .new_dataset::<f32>()
            .with_dcpl(|create| create.obj_track_times(false))
            .shape([numbers.len(), 3])
            .create(STANDARDISE)?;
        dataset.write_raw(numbers.as_flattened())?;
    }
    text(file, "model", &description.model)?;
    text(file, "parameters_digest", &format!("{digest:032x}"))?;
    let json = [
        ("config", &description.config),
        ("options", &description.options),
        ("written_by", &description.written_by),
    ];
    for (name, settings) in json {
        let json =
            serde_json::to_string(settings).map_err(|error| hdf5::Error::Internal(error.to_string()))?;
        text(file, name, &json)?;
    }
    Ok(())
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

fn text(location: &Location, name: &str, value: &str) -> hdf5::Result<()> {
    let value: VarLenUnicode =
        value.parse().map_err(|_| hdf5::Error::Internal(format!("{name} holds a zero byte")))?;
    location.new_attr::<VarLenUnicode>().create(name)?.write_scalar(&value)
}
