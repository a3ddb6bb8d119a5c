//! The check that all replicas hold the same bits.

use super::watch::{BitFold, num_bits};
use crate::comm::Communicator;
use crate::{Error, Result};

/// Compares `digest`, a hash of this rank's state at step `step`, over the replicas `data`. If they
/// differ, compares the `num_arrays` arrays of the state one after the other: `fold` returns the checksum
/// of one, `name` its name; `ranks` gives the number in the job of each of `data`. Collective
/// over `data`.
///
/// # Errors
/// The state of a rank differs from that of most: the same error on every rank of `data`, which names
/// the rank, the first array that differs and the number of bits; or `fold` failed (this rank alone).
pub fn check(
    data: &Communicator,
    digest: u128,
    step: u64,
    ranks: &dyn Fn(usize) -> usize,
    num_arrays: usize,
    fold: &dyn Fn(usize) -> Result<BitFold>,
    name: &dyn Fn(usize) -> String,
) -> Result<()> {
    let mut halves = vec![0_i64; 2 * data.size()];
    data.all_gather(&[digest as i64, (digest >> 64) as i64], &mut halves)?;
    let digests: Vec<[i64; 2]> = halves.chunks_exact(2).map(|pair| [pair[0], pair[1]]).collect();
    if odd_ones(&digests).is_empty() {
        return Ok(());
    }
    let mut what = String::new();
    let mut odd = odd_ones(&digests);
    for array in 0..num_arrays {
        let mut own = Vec::new();
        fold(array)?.write(&mut own);
        let mut all = vec![0; own.len() * data.size()];
        data.all_gather(&own, &mut all)?;
        let folds: Vec<BitFold> = all.chunks_exact(own.len()).map(BitFold::read).collect();
        let differ = odd_ones(&folds);
        if let Some(&first) = differ.first() {
            let common = (0..folds.len()).find(|rank| !differ.contains(rank)).unwrap_or_default();
            let bits = folds[first].num_different_bits(&folds[common]);
            what = format!(": {} differs in {}", name(array), num_bits(bits));
            odd = differ;
            break;
        }
    }
    let who = describe(&odd, data.size(), ranks);
    let why = format!("{who}{what}; this is a fault of the hardware or of this program, not of the training");
    Err(Error::on_every_rank(format!("comparing the replicas at step {step}"), why))
}

/// Returns the ranks whose values differ from the most common one.
fn odd_ones<T: PartialEq>(values: &[T]) -> Vec<usize> {
    let votes = |value: &T| values.iter().filter(|other| *other == value).count();
    // among equally common values, the first rank's counts as right
    let common = values.iter().rev().max_by_key(|value| votes(value));
    (0..values.len()).filter(|rank| Some(&values[*rank]) != common).collect()
}

/// Describes the ranks `odd` of a group of `size`.
fn describe(odd: &[usize], size: usize, ranks: &dyn Fn(usize) -> usize) -> String {
    let numbers: Vec<String> = odd.iter().map(|rank| ranks(*rank).to_string()).collect();
    match (numbers.as_slice(), size) {
        ([other], 2) => format!("ranks {} and {other} hold different values", ranks(1 - odd[0])),
        ([one], _) => format!("rank {one} holds other values than the rest"),
        (several, _) => format!("ranks {} hold other values than most", several.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::{describe, odd_ones};

    #[test]
    fn the_rank_that_differs_is_named() {
        let words = |values: &[u8]| describe(&odd_ones(values), values.len(), &|rank| rank);
        assert!(odd_ones(&[7]).is_empty() && odd_ones(&[7, 7, 7]).is_empty());
        assert_eq!(words(&[1, 2]), "ranks 0 and 1 hold different values");
        assert_eq!(words(&[2, 1, 1]), "rank 0 holds other values than the rest");
        assert_eq!(words(&[1, 1, 2, 1, 3]), "ranks 2, 4 hold other values than most");
    }
}
