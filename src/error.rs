//! What can go wrong, said so that the reader can act on it.
//!
//! An error says what was being done to what, then why it failed, with the numbers and the way out. It becomes
//! one line on stderr and the exit code of the job: 2 for bad arguments or input, 1 for everything else.

use std::fmt::Display;

use thiserror::Error;

/// The result of everything here that can fail.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a run cannot go on.
#[derive(Debug, Clone, Error)]
pub enum Error {
    /// The command line or the input data is at fault: exit code 2.
    #[error("{0}")]
    Input(String),
    /// The run itself failed: exit code 1.
    #[error("{0}")]
    Failed(String),
    /// Every rank of the job holds this same error, so one of them prints it and all leave in good order.
    #[error("{message}")]
    Agreed {
        /// The line to print.
        message: String,
        /// The exit code of the job.
        exit_code: u8,
    },
}

impl Error {
    /// Bad arguments or input: `doing` what to what, and `why` it failed.
    pub fn input(doing: impl Display, why: impl Display) -> Error {
        Error::Input(format!("{doing}: {why}"))
    }

    /// A failure that is not the input's fault: `doing` what to what, and `why` it failed.
    pub fn failed(doing: impl Display, why: impl Display) -> Error {
        Error::Failed(format!("{doing}: {why}"))
    }

    /// A failure that every rank sees from the same numbers at the same step.
    pub fn on_every_rank(doing: impl Display, why: impl Display) -> Error {
        Error::Agreed { message: format!("{doing}: {why}"), exit_code: 1 }
    }

    /// The exit code that this error gives the job: 2 for bad arguments or input, else 1.
    pub fn exit_code(&self) -> u8 {
        match self {
            Error::Input(_) => 2,
            Error::Failed(_) => 1,
            Error::Agreed { exit_code, .. } => *exit_code,
        }
    }
}

/// The way out of what the HDF5 library says, if there is one that it does not name.
pub(crate) fn hdf5_hint(said: &str) -> &'static str {
    if said.contains("unable to lock") || said.contains("file locking") {
        "; on a file system without locks, set HDF5_USE_FILE_LOCKING=FALSE"
    } else {
        ""
    }
}
