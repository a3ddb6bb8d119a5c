//! The interval between evaluations.

use std::str::FromStr;

/// The interval between evaluations on the test samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EvaluationInterval {
    /// A number of epochs; 0 for one evaluation at the end only.
    Epochs(u64),
    /// A number of steps.
    Steps(u64),
}

impl FromStr for EvaluationInterval {
    type Err = String;

    fn from_str(text: &str) -> Result<EvaluationInterval, String> {
        let parsed = match text.strip_suffix("steps") {
            Some(number) => number.trim_end().parse().ok().filter(|n| *n > 0).map(EvaluationInterval::Steps),
            None => text.parse().ok().map(EvaluationInterval::Epochs),
        };
        parsed.ok_or_else(|| "expected a number of epochs such as 1, or of steps such as 250steps".to_owned())
    }
}

impl EvaluationInterval {
    /// Returns the number of steps between evaluations; 0 for one at the end only.
    pub fn steps(self, steps_per_epoch: u64) -> u64 {
        match self {
            EvaluationInterval::Epochs(epochs) => epochs.saturating_mul(steps_per_epoch),
            EvaluationInterval::Steps(steps) => steps,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn epochs_and_steps() {
        let steps = |text: &str| text.parse().map(|every: EvaluationInterval| every.steps(60));
        assert_eq!([steps("2"), steps("0"), steps("250steps")], [Ok(120), Ok(0), Ok(250)]);
        for text in ["", "steps", "0steps", "-1", "1.5", "250 epochs"] {
            assert!(steps(text).is_err(), "{text}");
        }
    }
}
