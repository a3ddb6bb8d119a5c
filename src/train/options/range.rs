//! Checks of the ranges of options.

use crate::{Error, Result};

/// Refuses a `value` of `option` that is not above 0 and finite.
pub(super) fn positive(option: &str, value: f64) -> Result<()> {
    if value > 0.0 && value.is_finite() {
        return Ok(());
    }
    Err(Error::input(option, format!("it is {value}, but must be above 0 and finite")))
}

/// Refuses a `value` of `option` that is negative or not finite.
pub(super) fn not_negative(option: &str, value: f64) -> Result<()> {
    if value >= 0.0 && value.is_finite() {
        return Ok(());
    }
    Err(Error::input(option, format!("it is {value}, but must be at least 0 and finite")))
}

/// Refuses a `value` of `option` above `most`.
pub(super) fn at_most(option: &str, value: usize, most: usize) -> Result<()> {
    if value <= most {
        return Ok(());
    }
    Err(Error::input(option, format!("it is {value}, but must not be above {most}")))
}

/// Refuses a `value` of `option` that is 0.
pub(super) fn at_least_one(option: &str, value: Option<usize>) -> Result<()> {
    if value != Some(0) {
        return Ok(());
    }
    Err(Error::input(option, "it is 0, but must be at least 1"))
}
