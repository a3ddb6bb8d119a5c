//! Tokens in HDF5 files: a dataset `tokens` of whole numbers, one sequence or a row for each sample.

use std::path::Path;

use super::file::open_hdf5;
use super::names::exists;
use crate::dataset::LARGEST_FILE;
use crate::{Error, Result};

/// The dataset of tokens.
const TOKENS: &str = "tokens";

/// The tokens of a file.
pub(in crate::dataset) struct TokenFile {
    /// The tokens in order.
    pub(in crate::dataset) tokens: Vec<u16>,
    /// The number of tokens of a row, if samples are rows.
    pub(in crate::dataset) columns: Option<usize>,
}

/// Opens the file at `path`, if it is an HDF5 file with tokens.
fn open_tokens(path: &Path) -> Option<hdf5::File> {
    let extension = path.extension();
    let is_hdf5 = extension.is_some_and(|extension| extension == "h5" || extension == "hdf5");
    let (file, _) = (is_hdf5 && path.is_file()).then(|| open_hdf5(path).ok()).flatten()?;
    exists(&file, TOKENS).then_some(file)
}

/// Returns true for an HDF5 file with tokens. Not collective.
pub(in crate::dataset) fn has_tokens(path: &Path) -> bool {
    open_tokens(path).is_some()
}

/// Reads the tokens of the file at `path`; `None` if it is no HDF5 file with tokens. Not collective.
///
/// # Errors
/// The dataset has no whole numbers from 0 to 65,535, or neither one nor two dimensions, or rows of less
/// than two tokens, or is too large.
pub(in crate::dataset) fn read_tokens(path: &Path) -> Result<Option<TokenFile>> {
    let fail = |why: String| Error::input(format!("reading {}", path.display()), why);
    let Some(file) = open_tokens(path) else { return Ok(None) };
    let dataset = file.dataset(TOKENS).map_err(|error| fail(error.to_string()))?;
    let shape = dataset.shape();
    let columns = match shape[..] {
        [_] => None,
        [_, columns @ (0 | 1)] => {
            return Err(fail(format!("a row has {columns} tokens, and the least is 2")));
        }
        [_, columns] => Some(columns),
        _ => return Err(fail(format!("tokens has the shape {shape:?}, but must be [N] or [samples, N]"))),
    };
    let len = shape.iter().fold(1_usize, |len, size| len.saturating_mul(*size));
    if len > LARGEST_FILE / 2 {
        return Err(fail(format!("it has {len} tokens, and {} are the limit", LARGEST_FILE / 2)));
    }
    let is_whole = dataset.dtype().is_ok_and(|kind| kind.is::<u8>() || kind.is::<i8>() || is_wider(&kind));
    if !is_whole {
        return Err(fail("tokens must be whole numbers".into()));
    }
    let numbers: Vec<i64> = dataset.read_raw().map_err(|error| fail(error.to_string()))?;
    let token = |number: &i64| {
        u16::try_from(*number)
            .map_err(|_| fail(format!("it has the token {number}, but they are 0 to 65535")))
    };
    Ok(Some(TokenFile { tokens: numbers.iter().map(token).collect::<Result<_>>()?, columns }))
}

/// Returns true for the types of whole numbers of more than 8 bits.
fn is_wider(kind: &hdf5::Datatype) -> bool {
    kind.is::<u16>()
        || kind.is::<i16>()
        || kind.is::<u32>()
        || kind.is::<i32>()
        || kind.is::<i64>()
        || kind.is::<u64>()
}
