//! The attributes of a checkpoint: its position in the run and the run's settings.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Named settings of a run, in alphabetic order.
pub type Settings = BTreeMap<String, Value>;

/// The name of the setting with the shape of a sample.
pub const INPUTS_SETTING: &str = "inputs";
/// The name of the setting with the tokens of a text.
pub const TOKENS_SETTING: &str = "tokens";
/// The name of the setting with the way in which inputs are standardised.
pub const STANDARDISE_SETTING: &str = "--standardise";

/// The position and the settings of a run. Attributes of the file's root, and two datasets.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Description {
    /// Steps done.
    pub step: u64,
    /// Whole epochs done.
    pub epoch: u64,
    /// Steps done in the current epoch.
    pub step_in_epoch: u64,
    /// The mean loss over the batch of the last step, if it is known.
    pub loss: Option<f64>,
    /// Seed of initial weights, order and synthetic data.
    pub seed: u64,
    /// The name of the network.
    pub model: String,
    /// The settings that must not change when the run continues.
    pub config: Settings,
    /// The settings that may change.
    pub options: Settings,
    /// Program, ranks and versions that wrote the file.
    pub written_by: Settings,
    /// The network as text, if that is not too long.
    pub network: Option<String>,
    /// The standardisation of the inputs, three numbers for each channel or feature, none if they are
    /// used as they are: see [`Standardise::numbers`](crate::dataset::Standardise::numbers). Unknown in
    /// files of earlier versions.
    pub standardise: Option<Vec<[f32; 3]>>,
}

/// A setting in which two runs differ.
#[derive(Debug, Clone, PartialEq)]
pub struct Difference {
    /// The name of the setting.
    pub name: String,
    /// The value in the checkpoint, if it has one.
    pub before: Option<Value>,
    /// The value in this run, if it has one.
    pub now: Option<Value>,
}

impl Difference {
    /// Returns all settings that differ.
    pub fn between(before: &Settings, now: &Settings) -> Vec<Difference> {
        let mut names: Vec<&String> = before.keys().chain(now.keys()).collect();
        names.sort();
        names.dedup();
        let differ = names.into_iter().filter(|name| before.get(*name) != now.get(*name));
        let difference = |name: &String| Difference {
            name: name.clone(),
            before: before.get(name).cloned(),
            now: now.get(name).cloned(),
        };
        differ.map(difference).collect()
    }
}

impl std::fmt::Display for Difference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let words = |value: &Option<Value>| match value {
            None => "unset".to_owned(),
            // line breaks and the like would tear the message apart
            Some(Value::String(text)) => text.escape_debug().to_string(),
            Some(other) => other.to_string(),
        };
        write!(f, "{} was {}, is {}", self.name, words(&self.before), words(&self.now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_are_named_with_both_sides() {
        let settings = |pairs: &[(&str, Value)]| -> Settings {
            pairs.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect()
        };
        let before = settings(&[("a", 1.into()), ("b", "x".into()), ("c", true.into())]);
        let now = settings(&[("a", 1.into()), ("b", "y".into()), ("d", 2.into())]);
        let found: Vec<String> = Difference::between(&before, &now).iter().map(ToString::to_string).collect();
        assert_eq!(found, ["b was x, is y", "c was true, is unset", "d was unset, is 2"]);
        assert!(Difference::between(&before, &before).is_empty());
    }
}
