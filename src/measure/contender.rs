//! [`Contender`]: a way to do an operation, which is measured alternately with others.

use super::{Meanwhile, Subject};
use crate::Result;
use crate::comm::{Algorithm, Choice, Communicator};

/// A way to do the operation.
pub(super) struct Contender<'a> {
    /// The name in results; the first contender is named by its algorithm.
    pub name: &'static str,
    /// The algorithm, if not the one that was measured to be fast.
    pub choice: Option<Choice>,
    /// The operation on its buffers.
    pub subject: Box<dyn Subject + 'a>,
}

impl<'a> Contender<'a> {
    /// Returns a contender, if its form of the operation exists. Collective.
    ///
    /// # Errors
    /// There is no memory for the buffers on some rank.
    pub fn new<S: Subject + 'a>(
        all: &Communicator,
        name: &'static str,
        choice: Option<Choice>,
        subject: Result<Option<S>>,
    ) -> Result<Option<Contender<'a>>> {
        Ok(all.agree(subject)?.map(|subject| Contender { name, choice, subject: Box::new(subject) }))
    }

    /// Runs the operation once: see [`Subject::run`]. Collective.
    ///
    /// # Errors
    /// There is no memory for messages.
    pub fn run(&mut self, meanwhile: Meanwhile<'_>) -> Result<Algorithm> {
        self.subject.run(self.choice, meanwhile)
    }
}
