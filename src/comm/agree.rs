//! An error on one rank becomes an error on all, before anyone waits for a rank that has left.

use super::{Communicator, Operation};
use crate::{Error, Result};

/// What the code of a rank without an error is.
const FINE: i32 = i32::MAX;

impl Communicator {
    /// Gives `outcome` back if it is `Ok` on every rank; else every rank gets the error of the lowest rank that has one,
    /// as [`Error::Agreed`], with the other ranks that failed named in the message. Collective; for set-up, before
    /// training, where each rank does something that can fail for it alone.
    ///
    /// # Errors
    /// Some rank passed an error.
    pub fn agree<T>(&self, outcome: Result<T>) -> Result<T> {
        self.agree_and_name(outcome, true)
    }

    /// The same for what only rank 0 does, on behalf of all: other ranks pass what they like, and the message does not name rank
    /// 0. Collective.
    ///
    /// # Errors
    /// Rank 0 passed an error.
    pub fn agree_with_root<T>(&self, outcome: Result<Option<T>>) -> Result<Option<T>> {
        self.agree_and_name(if self.is_root() { outcome } else { Ok(None) }, false)
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

/// `on rank 3`, `on ranks 1, 2`, `on 17 of 64 ranks, the first 0`.
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
    use super::name_ranks;

    #[test]
    fn names_the_ranks_that_failed() {
        assert_eq!(name_ranks(&[0, 0, 1]), "on rank 2 only");
        assert_eq!(name_ranks(&[1, 0, 1]), "on ranks 0, 2");
        assert_eq!(name_ranks(&[1; 20]), "on 20 of 20 ranks, the first 0");
    }
}
