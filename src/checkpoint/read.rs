//! Reading checkpoints.

use std::path::{Path, PathBuf};

use hdf5::types::VarLenUnicode;
use hdf5::{Group, Location, LocationType};
use xxhash_rust::xxh3::Xxh3;

use super::seal::{self, Origin};
use super::skeleton::{NETWORK, STANDARDISE};
use super::{Description, Settings, group_name};
use crate::error::hdf5_hint;
use crate::nn::hash_values;
use crate::{Error, Result};

/// A tensor of a file.
#[derive(Debug, Clone, PartialEq)]
pub struct Tensor {
    /// The group: `model`, or `optimizer/SLOT`.
    pub group: String,
    /// The tensor's name in the model.
    pub name: String,
    /// The shape of the tensor.
    pub shape: Vec<usize>,
}

/// An open file that has been found sound.
pub struct Checkpoint {
    /// The path of the file.
    pub path: PathBuf,
    /// The attributes of the file.
    pub description: Description,
    /// The hash of all parameters' bits in logical order, in hexadecimal; empty in a foreign file.
    pub parameters_digest: String,
    /// The tensors of the file, group by group; within a group in the order of their names.
    pub tensors: Vec<Tensor>,
    file: hdf5::File,
    is_sealed: bool,
}

impl Checkpoint {
    /// Returns the parameters, without the optimizer's slots.
    pub fn parameters(&self) -> impl Iterator<Item = &Tensor> {
        let group = group_name(None);
        self.tensors.iter().filter(move |tensor| tensor.group == group)
    }

    /// Opens `path` after comparing every byte with the seal. Not collective.
    ///
    /// # Errors
    /// The file cannot be read, is damaged, or was not written by Phalanx.
    pub fn open(path: &Path) -> Result<Checkpoint> {
        match seal::check(path)? {
            Origin::Sealed => read(path, true),
            Origin::Foreign => Err(Error::input(
                format!("reading the checkpoint {}", path.display()),
                "it is an HDF5 file that Phalanx has not written; --init takes weights from such a file",
            )),
        }
    }

    /// Opens any HDF5 file that holds tensors under `/model`; a foreign file has no checksums to
    /// verify. Not collective.
    ///
    /// # Errors
    /// The file cannot be read or is damaged.
    pub fn open_weights(path: &Path) -> Result<Checkpoint> {
        let is_sealed = seal::check(path)? == Origin::Sealed;
        read(path, is_sealed)
    }

    /// Returns true if the file is sealed, so that a change of any byte would have been detected.
    pub fn is_sealed(&self) -> bool {
        self.is_sealed
    }

    /// Returns true if the file has any tensor in `group`.
    pub fn has_group(&self, group: &str) -> bool {
        self.tensors.iter().any(|tensor| tensor.group == group)
    }

    /// Reads the values of a tensor and verifies them against the tensor's own checksum. Not
    /// collective.
    ///
    /// # Errors
    /// The tensor does not exist, does not have `shape`, is damaged, or the HDF5 library cannot
    /// read it.
    pub fn read(&self, group: &str, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        let fail =
            |why: String| Error::input(format!("reading /{group}/{name} of {}", self.path.display()), why);
        let found = self.tensors.iter().find(|tensor| tensor.group == group && tensor.name == name);
        let found = found.ok_or_else(|| fail("there is no such tensor".into()))?;
        if found.shape != shape {
            return Err(fail(format!("its shape is {:?}, and the model's is {shape:?}", found.shape)));
        }
        let library = |error| library(&self.path, self.is_sealed, &error);
        let dataset = self.file.dataset(&format!("{group}/{name}")).map_err(library)?;
        let values = dataset.read_raw::<f32>().map_err(library)?;
        if self.is_sealed {
            let mut hash = Xxh3::new();
            hash_values(&mut hash, &values);
            let (wanted, found) = (text(&dataset, "xxh3_128").map_err(library)?, hash.digest128());
            if wanted != format!("{found:032x}") {
                return Err(fail(format!(
                    "it is damaged: its checksum is {found:032x}, and should be {wanted}"
                )));
            }
        }
        Ok(values)
    }
}

/// Turns an error of the HDF5 library into ours. A sealed file has been verified byte by byte, so
/// it is not at fault.
fn library(path: &Path, is_sealed: bool, error: &hdf5::Error) -> Error {
    let hint = hdf5_hint(&error.to_string());
    let (doing, why) = (format!("reading {}", path.display()), format!("HDF5: {error}{hint}"));
    if is_sealed { Error::failed(doing, why) } else { Error::input(doing, why) }
}

fn read(path: &Path, is_sealed: bool) -> Result<Checkpoint> {
    let fail = |error| library(path, is_sealed, &error);
    let file = hdf5::File::open(path).map_err(fail)?;
    let mut tensors = Vec::new();
    let root = file.as_group().map_err(fail)?;
    if !root.link_exists("model") {
        let why = "it has no group /model, where the weights would be";
        return Err(Error::input(format!("reading {}", path.display()), why));
    }
    for (group, path) in groups(&root).map_err(fail)? {
        // by name: the library searches the whole file for the name of a dataset that was opened otherwise
        for name in group.member_names().map_err(fail)? {
            if group.loc_type_by_name(&name).map_err(fail)? == LocationType::Dataset {
                let shape = group.dataset(&name).map_err(fail)?.shape();
                tensors.push(Tensor { group: path.clone(), name, shape });
            }
        }
    }
    let (mut description, mut parameters_digest) = (Description::default(), String::new());
    if is_sealed {
        description = describe(&file).map_err(fail)?;
        parameters_digest = text(&file, "parameters_digest").map_err(fail)?;
    }
    Ok(Checkpoint { path: path.to_owned(), description, parameters_digest, tensors, file, is_sealed })
}

/// Returns `model` and every `optimizer/SLOT`.
fn groups(root: &Group) -> hdf5::Result<Vec<(Group, String)>> {
    let mut found = vec![(root.group("model")?, group_name(None))];
    if let Ok(optimizer) = root.group("optimizer") {
        for slot in optimizer.member_names()? {
            found.push((optimizer.group(&slot)?, group_name(Some(&slot))));
        }
    }
    Ok(found)
}

fn describe(file: &hdf5::File) -> hdf5::Result<Description> {
    let number = |name: &str| file.attr(name)?.read_scalar::<u64>();
    let settings = |name: &str| -> hdf5::Result<Settings> {
        serde_json::from_str(&text(file, name)?)
            .map_err(|error| hdf5::Error::Internal(format!("{name}: {error}")))
    };
    Ok(Description {
        step: number("step")?,
        epoch: number("epoch")?,
        step_in_epoch: number("step_in_epoch")?,
        // the first versions of the format did not have it
        loss: file.attr("loss").and_then(|loss| loss.read_scalar()).ok(),
        seed: number("seed")?,
        model: text(file, "model")?,
        config: settings("config")?,
        options: settings("options")?,
        written_by: settings("written_by")?,
        network: if file.link_exists(NETWORK) { Some(network(file)?) } else { None },
        standardise: if file.link_exists(STANDARDISE) { Some(standardise(file)?) } else { None },
    })
}

fn network(file: &hdf5::File) -> hdf5::Result<String> {
    let text = String::from_utf8(file.dataset(NETWORK)?.read_raw::<u8>()?);
    text.map_err(|error| hdf5::Error::Internal(format!("{NETWORK}: {error}")))
}

fn standardise(file: &hdf5::File) -> hdf5::Result<Vec<[f32; 3]>> {
    Ok(file.dataset(STANDARDISE)?.read_raw::<f32>()?.as_chunks::<3>().0.to_vec())
}

fn text(location: &Location, name: &str) -> hdf5::Result<String> {
    Ok(location.attr(name)?.read_scalar::<VarLenUnicode>()?.as_str().to_owned())
}
