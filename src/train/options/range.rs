//! Checks of the ranges of options.

use std::fmt::Display;

use crate::{Error, Result};

/// Refuses a `value` of `option` that is not above 0 and finite.
pub(super) fn positive(option: &str, value: f64) -> Result<()> {
    check(value > 0.0 && value.is_finite(), option, value, "must be above 0 and finite")
}

/// Refuses a `value` of `option` that is not above 0 and finite as an `f32`, in which a training step has it.
pub(super) fn positive_in_steps(option: &str, value: f64) -> Result<()> {
    let is_right = (f32::MIN_POSITIVE..=f32::MAX).contains(&(value as f32));
    check(is_right, option, value, "must be above 0 and finite in 32 bits")
}

/// Refuses a `value` of `option` that is negative or not finite.
pub(super) fn not_negative(option: &str, value: f64) -> Result<()> {
    check(value >= 0.0 && value.is_finite(), option, value, "must be at least 0 and finite")
}

/// Refuses a `value` of `option` above `most`.
pub(super) fn at_most(option: &str, value: usize, most: usize) -> Result<()> {
    check(value <= most, option, value, format!("must not be above {most}"))
}

/// Refuses a `value` of `option` that is 0.
pub(super) fn at_least_one(option: &str, value: Option<usize>) -> Result<()> {
    check(value != Some(0), option, 0, "must be at least 1")
}

fn check(is_right: bool, option: &str, value: impl Display, demand: impl Display) -> Result<()> {
    if is_right { Ok(()) } else { Err(Error::input(option, format!("it is {value}, but {demand}"))) }
}
