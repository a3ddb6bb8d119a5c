//! The binary files of CIFAR-10: records of a label byte and 3 × 32 × 32 bytes, one colour plane
//! after the other.

use std::io::Read;
use std::path::{Path, PathBuf};

use super::files::{LARGEST_FILE, open_file};
use super::{ByteImages, Data};
use crate::nn::Features;
use crate::{Error, Result};

const SIZE: usize = 32;
const PLANE: usize = SIZE * SIZE;
const RECORD: usize = 1 + 3 * PLANE;

/// Returns true if CIFAR-10 is in `directory`, either directly or in the folder that the published
/// archive unpacks to.
pub fn is_cifar(directory: &Path) -> bool {
    root(directory).is_some()
}

/// Opens the CIFAR-10 files in `directory`. Not collective; each rank reads all of them.
///
/// # Errors
/// A file is missing, is cut short, or holds a label above 9.
pub fn open(directory: &Path) -> Result<Data> {
    let root = root(directory).unwrap_or_else(|| directory.to_owned());
    let train: Vec<PathBuf> = (1..=5).map(|batch| root.join(format!("data_batch_{batch}.bin"))).collect();
    Ok(Data { train: Box::new(read(&train)?), test: Some(Box::new(read(&[root.join("test_batch.bin")])?)) })
}

fn root(directory: &Path) -> Option<PathBuf> {
    let candidates = [directory.to_owned(), directory.join("cifar-10-batches-bin")];
    candidates.into_iter().find(|directory| directory.join("data_batch_1.bin").exists())
}

fn read(paths: &[PathBuf]) -> Result<ByteImages> {
    let (mut pixels, mut labels) = (Vec::new(), Vec::new());
    for path in paths {
        let fail = |why: String| Error::input(format!("reading {}", path.display()), why);
        let mut bytes = Vec::new();
        let mut file = open_file(path).map_err(fail)?.take(LARGEST_FILE as u64 + 1);
        file.read_to_end(&mut bytes).map_err(|error| fail(error.to_string()))?;
        if bytes.len() > LARGEST_FILE {
            return Err(fail(format!("it has more than {LARGEST_FILE} bytes, which are the limit")));
        }
        if bytes.is_empty() || bytes.len() % RECORD != 0 {
            return Err(fail(format!("{} bytes are not a whole number of records of {RECORD}", bytes.len())));
        }
        for (at, record) in bytes.chunks_exact(RECORD).enumerate() {
            if record[0] > 9 {
                return Err(fail(format!("label {at} is {}, expected 0 to 9", record[0])));
            }
            labels.push(record[0]);
            let planes = &record[1..];
            pixels.extend((0..PLANE).flat_map(|at| [planes[at], planes[PLANE + at], planes[2 * PLANE + at]]));
        }
    }
    let features = Features::Image { height: SIZE, width: SIZE, channels: 3 };
    let source = paths[0].display().to_string();
    ByteImages {
        label_source: source.clone(),
        source,
        features,
        pixels,
        labels,
        num_classes: 10,
        preset: vec![[0.5, 0.5]],
    }
    .checked()
}
