//! Broadcasts by a binomial tree, for short buffers, and by a chain of ranks, for long ones.

use super::plan::Round;

/// Returns the rounds of a binomial tree: in round k, the ranks that have the values send them to
/// the ranks 2ᵏ further, counted from the root.
pub(super) fn binomial(rank: usize, size: usize, root: usize) -> Vec<Round> {
    let number = (rank + size - root) % size;
    let rank_of = |number: usize| (number + root) % size;
    let mut rounds = Vec::new();
    if number > 0 {
        rounds.push(Round::receive_from(rank_of(number - (1 << number.ilog2())), 0..1));
    }
    let first = if number == 0 { 0 } else { number.ilog2() + 1 };
    // to the nearest first: they have the most to pass on
    let sends: Vec<usize> =
        (first..).map(|bit| number + (1 << bit)).take_while(|&child| child < size).collect();
    if !sends.is_empty() {
        let round =
            sends.into_iter().fold(Round::default(), |round, child| round.and_send(rank_of(child), 0..1));
        rounds.push(round);
    }
    rounds
}

/// Returns the rounds of a chain: each rank sends the values to the next, beginning with the root.
pub(super) fn chain(rank: usize, size: usize, root: usize) -> Vec<Round> {
    let number = (rank + size - root) % size;
    let mut rounds = Vec::new();
    if number > 0 {
        rounds.push(Round::receive_from((rank + size - 1) % size, 0..1));
    }
    if number + 1 < size {
        rounds.push(Round::default().and_send((rank + 1) % size, 0..1));
    }
    rounds
}
