//! Text files that options name.

use std::fmt::Display;
use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use crate::comm::Communicator;
use crate::{Error, Result};

/// The most bytes of a file: more than a schedule has of as many passes as can be generated.
const MOST_BYTES: u64 = 64 << 20;

/// Returns the text of the file at `path`, which is `what`. Rank 0 reads it for all ranks, so that all
/// have the same. Collective.
///
/// # Errors
/// The file cannot be read, is too long, or is no text: the same error on every rank.
pub(super) fn read_text(all: &Communicator, path: &Path, what: &str) -> Result<String> {
    let read = || {
        let fail = |why: &dyn Display| Error::input(format!("reading {what} {}", path.display()), why);
        let file = File::open(path).map_err(|error| fail(&error))?;
        let mut bytes = Vec::new();
        file.take(MOST_BYTES + 1).read_to_end(&mut bytes).map_err(|error| fail(&error))?;
        if bytes.len() as u64 > MOST_BYTES {
            return Err(fail(&format!("it has more than {MOST_BYTES} bytes, the limit of a text")));
        }
        String::from_utf8(bytes).map_err(|error| fail(&error))
    };
    let text = all.agree_with_root(read)?;
    let text = all.broadcast_bytes(text.map(String::into_bytes).unwrap_or_default(), 0)?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}
