//! What was given on the command line, as opposed to what is there by default.

use clap::parser::ValueSource;
use clap::{ArgMatches, Args, Command, FromArgMatches};

/// The options that were given on the command line, defaults left out. To be the first field of a struct of options, for a field
/// takes its option out of what was matched.
#[derive(Debug, Clone, Default)]
pub struct Given(Vec<String>);

impl Given {
    /// True if the option of this long name was given.
    pub fn has(&self, name: &str) -> bool {
        self.0.iter().any(|given| given == name)
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
