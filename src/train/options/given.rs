//! The options given on the command line, as opposed to those that have their default values.

use clap::parser::ValueSource;
use clap::{ArgMatches, Args, Command, FromArgMatches};

use crate::Error;

/// The names of the options given on the command line. It must be the first field of a struct of
/// options, because every other field removes its own option from the matches.
#[derive(Debug, Clone, Default)]
pub struct Given(Vec<String>);

impl Given {
    /// Returns true if the option with the long name `name` was given.
    pub fn has(&self, name: &str) -> bool {
        self.0.iter().any(|given| given == name)
    }

    /// Refuses the option with the long name `name` if it was given and there is a `reason` why it
    /// has no effect in this run.
    ///
    /// # Errors
    /// The option was given, and there is a reason.
    pub fn refuse(&self, name: &str, reason: Option<&str>) -> crate::Result<()> {
        match reason.filter(|_| self.has(name)) {
            Some(why) => {
                let why = format!("it has no effect in this run: {why}");
                Err(Error::input(format!("--{name}"), why))
            }
            None => Ok(()),
        }
    }
}

impl FromArgMatches for Given {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Given, clap::Error> {
        let is_given = |id: &&str| matches.value_source(id) == Some(ValueSource::CommandLine);
        Ok(Given(
            matches.ids().map(clap::Id::as_str).filter(is_given).map(|id| id.replace('_', "-")).collect(),
        ))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Given::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Args for Given {
    fn augment_args(command: Command) -> Command {
        command
    }

    fn augment_args_for_update(command: Command) -> Command {
        command
    }
}
