//! Enums as values of options, each value with one name on the command line, in files and in
//! messages.

use clap::ValueEnum;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};

/// Returns the name of `value` on the command line, which is also its name in checkpoints.
pub fn name_of(value: &impl ValueEnum) -> String {
    value.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}

/// A value of an enum, or nothing for `auto`, which leaves the choice to the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OrAuto<T>(pub Option<T>);

/// Returns a parser for `auto`, explained by `help`, and the values of `T`.
pub(super) fn or_auto<T: ValueEnum + Send + Sync + 'static>(
    help: &'static str,
) -> impl TypedValueParser<Value = OrAuto<T>> {
    let auto = PossibleValue::new("auto").help(help);
    let values = T::value_variants().iter().filter_map(T::to_possible_value);
    PossibleValuesParser::new(std::iter::once(auto).chain(values))
        .map(|name| OrAuto(T::from_str(&name, false).ok()))
}
