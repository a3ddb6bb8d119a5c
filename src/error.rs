//! Errors, phrased so that the reader can act on them.
//!
//! An error names the action that failed, then the reason, with the numbers and a remedy. It
//! becomes one line on stderr and the exit code of the job: 2 for bad arguments or input, 1 for
//! everything else.

use std::fmt::Display;
use std::io;

use thiserror::Error;

/// The result of every fallible function of the crate.
pub type Result<T> = std::result::Result<T, Error>;

/// The reason why a run cannot continue.
#[derive(Debug, Clone, Error)]
pub enum Error {
    /// The command line or the input data is at fault: exit code 2.
    #[error("{0}")]
    Input(String),
    /// The run itself failed: exit code 1.
    #[error("{0}")]
    Failed(String),
    /// Every rank of the job holds this same error, so rank 0 prints it, perhaps with more advice, and
    /// all exit in good order.
    #[error("{message}")]
    Agreed {
        /// The line to print.
        message: String,
        /// The exit code of the job.
        exit_code: u8,
    },
}

impl Error {
    /// Creates the error of bad arguments or input: `doing` is the action that failed, `why` the
    /// reason.
    pub fn input(doing: impl Display, why: impl Display) -> Error {
        Error::Input(format!("{doing}: {why}"))
    }

    /// Creates the error of a failure that is not the input's fault: `doing` is the action that
    /// failed, `why` the reason.
    pub fn failed(doing: impl Display, why: impl Display) -> Error {
        Error::Failed(format!("{doing}: {why}"))
    }

    /// Creates the error of the system at a path that the user has named: the input's fault if the
    /// path does not exist, is not of the expected kind, is a circle of links, is too long, or is not the
    /// user's to read or write.
    pub(crate) fn at_path(doing: impl Display, why: &io::Error) -> Error {
        /// The value in `errno.h` of Linux.
        const ELOOP: i32 = 40;
        use io::ErrorKind::{InvalidFilename, NotADirectory, NotFound, PermissionDenied};
        match why.kind() {
            NotFound | NotADirectory | InvalidFilename | PermissionDenied => Error::input(doing, why),
            _ if why.raw_os_error() == Some(ELOOP) => Error::input(doing, why),
            _ => Error::failed(doing, why),
        }
    }

    /// Creates the error of a failure that every rank detects from identical numbers at one step.
    pub fn on_every_rank(doing: impl Display, why: impl Display) -> Error {
        Error::Agreed { message: format!("{doing}: {why}"), exit_code: 1 }
    }

    /// Creates the error of bad arguments or input that every rank detects from identical numbers.
    pub fn input_on_every_rank(doing: impl Display, why: impl Display) -> Error {
        Error::Agreed { message: format!("{doing}: {why}"), exit_code: 2 }
    }

    /// Returns true if every rank holds this same error.
    pub fn is_agreed(&self) -> bool {
        matches!(self, Error::Agreed { .. })
    }

    /// Returns the outcome of a collective operation.
    ///
    /// # Errors
    /// The operation failed on this rank alone: the others are in it and wait, so this rank must end the
    /// job.
    pub(crate) fn unless_alone<T>(outcome: Result<T>) -> Result<Result<T>> {
        match outcome {
            Err(error) if !error.is_agreed() => Err(error),
            outcome => Ok(outcome),
        }
    }

    /// Returns the exit code that this error gives the job: 2 for bad arguments or input, else 1.
    pub fn exit_code(&self) -> u8 {
        match self {
            Error::Input(_) => 2,
            Error::Failed(_) => 1,
            Error::Agreed { exit_code, .. } => *exit_code,
        }
    }
}

/// Returns a hint to add to an error of the HDF5 library, if the library does not name the way out
/// itself.
pub(crate) fn hdf5_hint(said: &str) -> &'static str {
    if said.contains("unable to lock") || said.contains("file locking") {
        "; on a file system without locks, set HDF5_USE_FILE_LOCKING=FALSE"
    } else {
        ""
    }
}
