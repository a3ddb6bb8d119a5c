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

/// Returns true for an HDF5 file with tokens. Not collective.
pub(in crate::dataset) fn has_tokens(path: &Path) -> bool {
    let extension = path.extension();
    extension.is_some_and(|extension| extension == "h5" || extension == "hdf5")
        && path.is_file()
        && open_hdf5(path).is_ok_and(|(file, _)| exists(&file, TOKENS))
}

/// Reads the tokens of the file at `path`. Not collective.
///
/// # Errors
/// The dataset has no whole numbers from 0 to 65,535, or neither one nor two dimensions, or is too large.
pub(in crate::dataset) fn read_tokens(path: &Path) -> Result<TokenFile> {
    let fail = |why: String| Error::input(format!("reading {}", path.display()), why);
    let (file, _) = open_hdf5(path).map_err(fail)?;
    let dataset = file.dataset(TOKENS).map_err(|error| fail(error.to_string()))?;
    let shape = dataset.shape();
    let columns = match shape[..] {
        [_] => None,
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
    Ok(TokenFile { tokens: numbers.iter().map(token).collect::<Result<_>>()?, columns })
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
