//! The division of consecutive items among ranks.

use std::ops::Range;

/// Returns the part of `0..total` that belongs to rank `rank` of `size`. Parts are consecutive, in
/// rank order, and their lengths differ by at most one; the first `total mod size` ranks have the
/// longer ones.
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
