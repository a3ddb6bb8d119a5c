//! All-reduces by recursive doubling and halving: rounds between partners at distances that double
//! or halve, as many as the logarithm of the number of ranks.

use std::ops::Range;

use super::plan::Round;

/// Maps a number below the power of two to its rank.
type RankOf<'a> = &'a dyn Fn(usize) -> usize;

/// Returns the largest power of two up to `size`.
pub(super) fn power_of_two(size: usize) -> usize {
    1 << size.ilog2()
}

/// Extends `rounds`, which need a power of two, to an all-reduce of `parts` on any number of ranks.
/// The first ranks pair up: the even one sends its values to the odd one before the rounds, and
/// receives the sum from it after them.
pub(super) fn with_power_of_two(
    rank: usize,
    size: usize,
    parts: Range<usize>,
    rounds: fn(usize, usize, RankOf<'_>) -> Vec<Round>,
) -> Vec<Round> {
    let power = power_of_two(size);
    let pairs = size - power;
    let rank_of = move |number: usize| if number < pairs { 2 * number + 1 } else { number + pairs };
    if rank >= 2 * pairs {
        return rounds(rank - pairs, power, &rank_of);
    }
    if rank.is_multiple_of(2) {
        let gives = Round::default().and_send(rank + 1, parts.clone());
        return vec![gives, Round::receive_from(rank + 1, parts)];
    }
    let mut all = vec![Round::combine_from(rank - 1, parts.clone())];
    all.extend(rounds(rank / 2, power, &rank_of));
    all.push(Round::default().and_send(rank - 1, parts));
    all
}

/// Exchanges whole buffers with partners at distance 1, 2, 4, …, as number `number` of `power`, a
/// power of two.
pub(super) fn doubling(number: usize, power: usize, rank_of: RankOf<'_>) -> Vec<Round> {
    let exchange = |bit: u32| {
        let partner = rank_of(number ^ 1 << bit);
        Round::combine_from(partner, 0..1).and_send(partner, 0..1)
    };
    (0..power.ilog2()).map(exchange).collect()
}

/// Exchanges halves, quarters, … of the `power` parts with partners at distance `power`/2,
/// `power`/4, …, until every rank has the sum of one part; then the sums travel back by the same
/// steps.
pub(super) fn halving(number: usize, power: usize, rank_of: RankOf<'_>) -> Vec<Round> {
    let levels = || (0..power.ilog2()).rev().map(|bit| 1 << bit);
    // at each distance: the partner, the half that this rank keeps, the half that the partner keeps
    let halves = |distance: usize| {
        let start = number / distance * distance;
        let partners = (number ^ distance) / distance * distance;
        (rank_of(number ^ distance), start..start + distance, partners..partners + distance)
    };
    let reduce = |(partner, own, others): (usize, Range<usize>, Range<usize>)| {
        Round::combine_from(partner, own).and_send(partner, others)
    };
    let gather = |(partner, own, others): (usize, Range<usize>, Range<usize>)| {
        Round::receive_from(partner, others).and_send(partner, own)
    };
    levels().map(halves).map(reduce).chain(levels().rev().map(halves).map(gather)).collect()
}
