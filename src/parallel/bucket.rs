//! The division of gradients into buckets.

use std::ops::Range;

/// Cuts tensors of `lengths` elements, in logical order, into buckets of at most `most` elements,
/// or of one tensor if that is longer. The buckets are filled from the last tensor on, as the
/// backward pass completes them, so the first bucket may be smaller; they are returned in logical
/// order. Follows Li et al., "PyTorch Distributed", VLDB 2020, §3.2.
pub fn buckets(lengths: &[usize], most: usize) -> Vec<Range<usize>> {
    let mut buckets = Vec::new();
    let (mut end, mut sum) = (lengths.len(), 0);
    for tensor in (0..lengths.len()).rev() {
        if tensor + 1 < end && sum + lengths[tensor] > most {
            buckets.push(tensor + 1..end);
            (end, sum) = (tensor + 1, 0);
        }
        sum += lengths[tensor];
    }
    if end > 0 {
        buckets.push(0..end);
    }
    buckets.reverse();
    buckets
}

#[cfg(test)]
mod tests {
    use super::buckets;

    #[test]
    fn buckets_cover_everything_once_and_are_full_but_for_the_first() {
        // all lists of up to six lengths of 0 to 3, under all limits
        for code in 0..4_usize.pow(6) {
            for num in 0..=6 {
                let lengths: Vec<usize> = (0..num).map(|i| code / 4_usize.pow(i) % 4).collect();
                for most in 0..10 {
                    check(&lengths, most);
                }
            }
        }
    }

    fn check(lengths: &[usize], most: usize) {
        let found = buckets(lengths, most);
        let mut end = 0;
        for (index, bucket) in found.iter().enumerate() {
            assert_eq!(bucket.start, end);
            assert!(!bucket.is_empty());
            let sum: usize = lengths[bucket.clone()].iter().sum();
            assert!(sum <= most || bucket.len() == 1, "{lengths:?} {most}: {found:?}");
            let fits_more = index > 0 && sum + lengths[bucket.start - 1] <= most;
            assert!(!fits_more, "{lengths:?} {most}: {found:?}");
            end = bucket.end;
        }
        assert_eq!(end, lengths.len());
    }

    #[test]
    fn a_limit_of_one_gives_a_bucket_a_tensor() {
        assert_eq!(buckets(&[5, 1, 7], 1), [0..1, 1..2, 2..3]);
        assert_eq!(buckets(&[5, 1, 7], 8), [0..1, 1..3]);
        assert_eq!(buckets(&[5, 1, 7], 100), vec![0..3; 1]);
    }
}
