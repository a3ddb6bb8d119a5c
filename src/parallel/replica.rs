//! The check that all replicas hold the same bits.

use crate::comm::Communicator;
use crate::{Error, Result};

/// Compares `digest`, a hash of this rank's parameters at step `step`, over the ranks. Collective.
///
/// # Errors
/// The digest of a rank differs from that of most: the same error on every rank, which names it.
pub fn check(data: &Communicator, digest: u128, step: u64) -> Result<()> {
    let mut halves = vec![0_i64; 2 * data.size()];
    data.all_gather(&[digest as i64, (digest >> 64) as i64], &mut halves)?;
    let digests: Vec<[i64; 2]> = halves.chunks_exact(2).map(|pair| [pair[0], pair[1]]).collect();
    match odd_ones(&digests) {
        None => Ok(()),
        Some(who) => {
            let why =
                format!("{who}; this is a fault of the hardware or of this program, not of the training");
            Err(Error::on_every_rank(format!("comparing the replicas at step {step}"), why))
        }
    }
}

/// Describes the ranks that differ from the majority, if there are any.
fn odd_ones(digests: &[[i64; 2]]) -> Option<String> {
    let votes = |digest: &[i64; 2]| digests.iter().filter(|other| *other == digest).count();
    // among equally common digests, the first rank's counts as right
    let common = digests.iter().rev().max_by_key(|digest| votes(digest))?;
    let odd: Vec<String> =
        (0..digests.len()).filter(|rank| digests[*rank] != *common).map(|rank| rank.to_string()).collect();
    match (odd.as_slice(), digests.len()) {
        ([], _) => None,
        ([other], 2) => Some(format!("ranks 0 and {other} hold different parameters")),
        ([one], _) => Some(format!("rank {one} holds other parameters than the rest")),
        (several, _) => Some(format!("ranks {} hold other parameters than most", several.join(", "))),
    }
}

#[cfg(test)]
mod tests {
    use super::odd_ones;

    #[test]
    fn the_rank_that_differs_is_named() {
        let (a, b, c) = ([1, 2], [1, 3], [2, 2]);
        assert_eq!(odd_ones(&[a]), None);
        assert_eq!(odd_ones(&[a, a, a]), None);
        assert_eq!(odd_ones(&[a, b]).unwrap(), "ranks 0 and 1 hold different parameters");
        assert_eq!(odd_ones(&[b, a, a]).unwrap(), "rank 0 holds other parameters than the rest");
        assert_eq!(odd_ones(&[a, a, b, a, c]).unwrap(), "ranks 2, 4 hold other parameters than most");
    }
}
