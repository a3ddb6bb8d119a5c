//! Agreement between ranks: `agree` turns an error on one rank into an error on all, before any
//! rank waits for one that has left; `compare` refuses settings that differ between ranks.

use xxhash_rust::xxh3::xxh3_128;

use super::{Communicator, Operation};
use crate::{Error, Result};

/// The code of a rank without an error.
const FINE: i32 = i32::MAX;

impl Communicator {
    /// Returns `outcome` if it is `Ok` on every rank. Otherwise returns [`Error::Agreed`] on every
    /// rank: the error of the lowest rank that failed, with the other failed ranks named in the
    /// message. Collective; meant for set-up, where a step can fail on one rank alone.
    ///
    /// # Errors
    /// A rank passed an error.
    pub fn agree<T>(&self, outcome: Result<T>) -> Result<T> {
        self.agree_and_name(outcome, true)
    }

    /// Runs `work` on rank 0 and returns its result there and `None` elsewhere. An error of `work`
    /// is returned on every rank, in a message that does not name rank 0. Collective.
    ///
    /// # Errors
    /// `work` failed.
    pub fn agree_with_root<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<Option<T>> {
        self.agree_and_name(self.is_root().then(work).transpose(), false)
    }

    /// Returns true if `holds` is true on every rank. Collective.
    ///
    /// # Errors
    /// None but those of an all-reduce.
    pub fn all_ranks(&self, holds: bool) -> Result<bool> {
        let mut holds = [u8::from(holds)];
        self.all_reduce(&mut holds, Operation::Min)?;
        Ok(holds == [1])
    }

    /// Returns true if `holds` is true on a rank at least. Collective.
    ///
    /// # Errors
    /// None but those of an all-reduce.
    pub fn any_rank(&self, holds: bool) -> Result<bool> {
        Ok(!self.all_ranks(!holds)?)
    }

    /// Compares `settings`, pairs of a name and a value, between the ranks. Collective; costs one
    /// `MPI_Allreduce` of 32 bytes if they are equal.
    ///
    /// # Errors
    /// The settings differ: the same error on every rank, with up to four names, each with its value on
    /// rank 0 and that on the lowest rank that differs.
    pub fn compare(&self, doing: &str, settings: &[(String, String)]) -> Result<()> {
        let mut text = String::new();
        settings.iter().for_each(|(name, value)| text += &format!("{name}\0{value}\0"));
        let digest = xxh3_128(text.as_bytes());
        let halves = [digest as i64, (digest >> 64) as i64];
        // the minimum of the complements is the complement of the maximum
        let mut least = [halves[0], halves[1], !halves[0], !halves[1]];
        self.all_reduce(&mut least, Operation::Min)?;
        if least[0] == !least[2] && least[1] == !least[3] {
            return Ok(());
        }
        let of_root = self.broadcast_bytes(text.into_bytes(), 0)?;
        let of_root = String::from_utf8_lossy(&of_root).into_owned();
        let words: Vec<&str> = of_root.split('\0').collect();
        let of_root: Vec<(&str, &str)> = words.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect();
        let own: Vec<(&str, &str)> =
            settings.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        let outcome = match differences(&of_root, &own, self.rank()) {
            found if found.is_empty() => Ok(()),
            found => {
                Err(Error::input(doing, format!("{}; all ranks must be given the same", found.join("; "))))
            }
        };
        self.agree_and_name(outcome, false)
    }

    fn agree_and_name<T>(&self, outcome: Result<T>, names_ranks: bool) -> Result<T> {
        let failing = i32::try_from(self.rank()).unwrap_or(FINE - 1);
        let mut lowest = [if outcome.is_ok() { FINE } else { failing }];
        self.all_reduce(&mut lowest, Operation::Min)?;
        if lowest[0] == FINE {
            return outcome;
        }
        let root = lowest[0] as usize;

        let mut failed = vec![0_u8; self.size()];
        self.all_gather(&[u8::from(outcome.is_err())], &mut failed)?;
        let error = outcome.err();
        let (mut text, mut exit_code) = (Vec::new(), [0]);
        if let (Some(error), true) = (&error, self.rank() == root) {
            (text, exit_code) = (error.to_string().into_bytes(), [error.exit_code()]);
        }
        self.broadcast(&mut exit_code, root)?;
        let text = self.broadcast_bytes(text, root)?;

        let mut message = String::from_utf8_lossy(&text).into_owned();
        let num_failed = failed.iter().filter(|&&flag| flag == 1).count();
        if num_failed < self.size() && names_ranks {
            message += &format!(" ({})", name_ranks(&failed));
        }
        Err(Error::Agreed { message, exit_code: exit_code[0] })
    }
}

/// Describes the settings that differ between rank 0 and `rank`, four at most.
fn differences(of_root: &[(&str, &str)], own: &[(&str, &str)], rank: usize) -> Vec<String> {
    let value = |settings: &[(&str, &str)], name: &str| -> Option<String> {
        settings.iter().find(|(other, _)| *other == name).map(|(_, value)| (*value).to_owned())
    };
    let words = |value: Option<String>| match value {
        None => "unset".to_owned(),
        Some(text) if text.is_empty() => "empty".to_owned(),
        Some(text) => text,
    };
    let added = own.iter().filter(|(name, _)| of_root.iter().all(|(other, _)| other != name));
    let names = of_root.iter().chain(added).map(|(name, _)| *name);
    let differing = names.filter(|name| value(of_root, name) != value(own, name)).take(4);
    differing
        .map(|name| {
            let [before, now] = [of_root, own].map(|settings| words(value(settings, name)));
            format!("{name} is {before} on rank 0 and {now} on rank {rank}")
        })
        .collect()
}

/// Describes the ranks that failed: `on rank 3 only`, `on ranks 1, 2`, `on 17 of 64 ranks, the
/// first 0`.
fn name_ranks(failed: &[u8]) -> String {
    let ranks: Vec<String> =
        failed.iter().enumerate().filter(|(_, flag)| **flag == 1).map(|(rank, _)| rank.to_string()).collect();
    match ranks.as_slice() {
        [one] => format!("on rank {one} only"),
        few if few.len() <= 8 => format!("on ranks {}", few.join(", ")),
        many => format!("on {} of {} ranks, the first {}", many.len(), failed.len(), many[0]),
    }
}

#[cfg(test)]
mod tests {
    use super::{differences, name_ranks};

    #[test]
    fn what_differs_is_named_with_both_values() {
        let found =
            differences(&[("a", "1"), ("b", "x"), ("c", "")], &[("a", "2"), ("b", "x"), ("d", "4")], 3);
        let expected = [
            "a is 1 on rank 0 and 2 on rank 3",
            "c is empty on rank 0 and unset on rank 3",
            "d is unset on rank 0 and 4 on rank 3",
        ];
        assert_eq!(found, expected);
        assert!(differences(&[("a", "1")], &[("a", "1")], 1).is_empty());
    }

    #[test]
    fn names_the_ranks_that_failed() {
        assert_eq!(name_ranks(&[0, 0, 1]), "on rank 2 only");
        assert_eq!(name_ranks(&[1, 0, 1]), "on ranks 0, 2");
        assert_eq!(name_ranks(&[1; 20]), "on 20 of 20 ranks, the first 0");
    }
}
