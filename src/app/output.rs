//! Lines on stdout and stderr.

use std::io::{ErrorKind, Write};
use std::ops::ControlFlow;

use crate::{Error, Result};

/// Prints a line on stderr in one write, so that the lines of several ranks do not mix.
pub(super) fn say(line: &str) {
    // if stderr is gone, there is nobody left to tell
    let _ = std::io::stderr().write_all(format!("{line}\n").as_bytes());
}

/// Prints bytes on stdout at once, and returns whether to print more: a reader that has gone away wants none,
/// which is not an error; a full disk is. Not collective.
///
/// # Errors
/// The bytes cannot be written.
pub fn print_bytes(bytes: &[u8]) -> Result<ControlFlow<()>> {
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(bytes).and_then(|()| stdout.flush()) {
        Ok(()) => Ok(ControlFlow::Continue(())),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(ControlFlow::Break(())),
        Err(error) => Err(Error::failed("writing to stdout", error)),
    }
}

/// Prints a line on stdout. A reader that has gone away is not an error; a full disk is. Not
/// collective.
///
/// # Errors
/// The line cannot be written.
pub fn print_line(line: &str) -> Result<()> {
    print_bytes(format!("{line}\n").as_bytes()).map(|_| ())
}
