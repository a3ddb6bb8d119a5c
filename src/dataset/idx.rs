//! The IDX files of MNIST and Fashion-MNIST, plain or gzipped.
//!
//! A file is a magic number (0, 0, the type 8 for bytes, the number of dimensions), the dimensions
//! as big-endian 32-bit numbers, then the bytes.

use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};

use flate2::bufread::MultiGzDecoder;

use super::files::{LARGEST_FILE, open_file};
use super::{ByteImages, Data};
use crate::nn::Features;
use crate::{Error, Result};

/// Returns true if `directory` holds the training images of MNIST or Fashion-MNIST.
pub fn is_idx(directory: &Path) -> bool {
    find(directory, "train-images-idx3-ubyte").is_some()
}

/// Opens the IDX files in `directory`. Not collective; each rank reads all of them.
///
/// # Errors
/// A file is missing, cut short or of another format than its name says, or images and labels do
/// not fit each other.
pub fn open(directory: &Path) -> Result<Data> {
    let subset = |prefix: &str| -> Result<ByteImages> {
        let images = require(directory, &format!("{prefix}-images-idx3-ubyte"))?;
        let labels = require(directory, &format!("{prefix}-labels-idx1-ubyte"))?;
        let preset = preset(directory);
        let (sizes, pixels) = read(&images, 3)?;
        let label_source = labels.display().to_string();
        let (_, labels) = read(&labels, 1)?;
        let features = Features::Image { height: sizes[1], width: sizes[2], channels: 1 };
        let source = images.display().to_string();
        ByteImages { source, label_source, features, pixels, labels, num_classes: 10, preset: vec![preset] }
            .checked()
    };
    Ok(Data { train: Box::new(subset("train")?), test: Some(Box::new(subset("t10k")?)) })
}

/// Returns the published mean and deviation of the set in `directory`. MNIST and Fashion-MNIST have
/// the same file names and shapes, so only the directory's name tells them apart.
fn preset(directory: &Path) -> [f32; 2] {
    let directory = directory.canonicalize().unwrap_or_else(|_| directory.to_owned());
    let name = directory.file_name().map(|name| name.to_string_lossy().to_lowercase()).unwrap_or_default();
    if name.contains("fashion") { [0.2860, 0.3530] } else { [0.1307, 0.3081] }
}

fn find(directory: &Path, name: &str) -> Option<PathBuf> {
    // some mirrors unpack with a dot where the original has a hyphen
    let dotted = name.replacen("-idx", ".idx", 1);
    [name, &dotted]
        .iter()
        .flat_map(|name| [format!("{name}.gz"), name.to_string()])
        .map(|name| directory.join(name))
        .find(|path| path.exists())
}

fn require(directory: &Path, name: &str) -> Result<PathBuf> {
    find(directory, name).ok_or_else(|| {
        let why = format!("there is no {name}.gz or {name} in it; data/fetch gets the published files");
        Error::input(format!("reading {}", directory.display()), why)
    })
}

/// Reads the dimensions and bytes of the file at `path`, which must have `num_dimensions`
/// dimensions.
fn read(path: &Path, num_dimensions: usize) -> Result<(Vec<usize>, Vec<u8>)> {
    let fail = |why: String| Error::input(format!("reading {}", path.display()), why);
    let file = BufReader::new(open_file(path).map_err(fail)?);
    let is_packed = path.extension().is_some_and(|extension| extension == "gz");
    if is_packed { parse(MultiGzDecoder::new(file), num_dimensions) } else { parse(file, num_dimensions) }
        .map_err(fail)
}

/// Reads the header and then exactly as many bytes as it announces: the contents of a packed file
/// are not held before their size is known to fit.
fn parse(mut file: impl Read, num_dimensions: usize) -> std::result::Result<(Vec<usize>, Vec<u8>), String> {
    let mut bytes = Vec::new();
    let mut next = |len: usize, bytes: &mut Vec<u8>| {
        bytes.clear();
        bytes.try_reserve_exact(len).map_err(|error| format!("allocating {len} bytes: {error}"))?;
        let outcome = file.by_ref().take(len as u64).read_to_end(bytes);
        outcome
            .map_err(|error| format!("{error} after {} bytes; the file is damaged or cut short", bytes.len()))
    };
    let header = 4 + 4 * num_dimensions;
    next(header, &mut bytes)?;
    let magic = [0, 0, 8, num_dimensions as u8];
    if bytes.is_empty() {
        return Err("the file is empty".into());
    }
    if bytes.len() < 4 || bytes[..4] != magic {
        let found = &bytes[..bytes.len().min(4)];
        return Err(format!(
            "it begins with {found:?}, an IDX file of bytes in {num_dimensions} dimensions with {magic:?}"
        ));
    }
    if bytes.len() < header {
        return Err(format!("it ends after {} bytes, within its header of {header}", bytes.len()));
    }
    let sizes: Vec<usize> = bytes[4..]
        .chunks_exact(4)
        .map(|word| u32::from_be_bytes([word[0], word[1], word[2], word[3]]) as usize)
        .collect();
    let shape = sizes.iter().map(usize::to_string).collect::<Vec<_>>().join(" × ");
    let expected = sizes.iter().try_fold(1_usize, |product, &size| product.checked_mul(size));
    let Some(expected) = expected.filter(|expected| *expected <= LARGEST_FILE) else {
        return Err(format!("its header announces {shape} bytes, and {LARGEST_FILE} are the limit"));
    };
    next(expected, &mut bytes)?;
    if bytes.len() < expected {
        return Err(format!("its header announces {shape} bytes, but {} follow", bytes.len()));
    }
    // reading past the last byte also compares the checksum of a packed file
    let mut rest = Vec::new();
    if next(1, &mut rest)? > 0 {
        return Err(format!("its header announces {shape} bytes, but more follow"));
    }
    Ok((sizes, bytes))
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn what_is_not_such_a_file_is_refused() {
        let good = [0, 0, 8, 1, 0, 0, 0, 2, 7, 9];
        assert_eq!(parse(&good[..], 1).unwrap(), (vec![2], vec![7, 9]));
        let error = |bytes: &[u8], dimensions| parse(bytes, dimensions).unwrap_err();
        assert!(error(&[], 1).contains("empty"));
        assert!(error(&good, 3).contains("[0, 0, 8, 3]"));
        assert!(error(&good[..6], 1).contains("within its header"));
        assert!(error(&good[..9], 1).contains("announces 2 bytes, but 1 follow"));
        assert!(error(&[&good[..], &[1]].concat(), 1).contains("announces 2 bytes, but more follow"));
        assert!(
            error(&[0, 0, 8, 3, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255], 3)
                .contains("are the limit")
        );
    }
}
