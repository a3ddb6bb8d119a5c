//! Text files that options name.

use std::path::Path;

use crate::comm::Communicator;
use crate::{Error, Result};

/// Returns the text of the file at `path`, which is `what`. Rank 0 reads it for all ranks, so that all
/// have the same. Collective.
///
/// # Errors
/// The file cannot be read: the same error on every rank.
pub(super) fn read_text(all: &Communicator, path: &Path, what: &str) -> Result<String> {
    let read = || {
        let doing = || format!("reading {what} {}", path.display());
        std::fs::read_to_string(path).map_err(|error| Error::input(doing(), error))
    };
    let text = all.agree_with_root(read)?;
    let text = all.broadcast_bytes(text.map(String::into_bytes).unwrap_or_default(), 0)?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}
