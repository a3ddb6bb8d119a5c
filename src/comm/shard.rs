//! Which part of `total` things belongs to one of `size` ranks.

use std::ops::Range;

/// The part of `0..total` that is rank `rank`'s: consecutive, in rank order, and no longer than another's by more than one.
/// The first `total mod size` ranks have the longer ones.
pub fn shard(total: usize, rank: usize, size: usize) -> Range<usize> {
    let (part, longer) = (total / size, total % size);
    let start = rank * part + rank.min(longer);
    start..start + part + usize::from(rank < longer)
}

#[cfg(test)]
mod tests {
    use super::shard;

    #[test]
    fn shards_cover_everything_once_and_evenly() {
        for size in 1..20 {
            for total in 0..200 {
                let shards: Vec<_> = (0..size).map(|rank| shard(total, rank, size)).collect();
                let mut end = 0;
                for shard in &shards {
                    assert_eq!(shard.start, end);
                    end = shard.end;
                    assert!(shard.len() == total / size || shard.len() == total / size + 1);
                }
                assert_eq!(end, total);
            }
        }
    }
}
