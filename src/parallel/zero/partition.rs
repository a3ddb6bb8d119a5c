//! The division of segments among replicas.

use std::ops::Range;

/// The part of every segment that this replica owns.
#[derive(Debug, Clone)]
pub struct Partition {
    owned: Vec<Range<usize>>,
}

/// The elements of a tensor that a replica owns.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorPart {
    /// Range of the elements in the owned part of the segment.
    pub kept: Range<usize>,
    /// Range of the elements in the tensor.
    pub block: Range<usize>,
}

impl Partition {
    /// Divides segments of `lengths`, multiples of `num_replicas`, and returns the parts of
    /// `replica`.
    pub fn new(lengths: &[usize], replica: usize, num_replicas: usize) -> Partition {
        let part = |len: &usize| {
            let part = len / num_replicas;
            replica * part..(replica + 1) * part
        };
        Partition { owned: lengths.iter().map(part).collect() }
    }

    /// Returns the range of `segment` that this replica owns.
    pub fn owned(&self, segment: usize) -> Range<usize> {
        self.owned[segment].clone()
    }

    /// Returns the lengths of the owned parts.
    pub fn lengths(&self) -> Vec<usize> {
        self.owned.iter().map(ExactSizeIterator::len).collect()
    }

    /// Returns the owned elements of the tensor at `place` in `segment`; empty ranges if there are
    /// none.
    pub fn of_tensor(&self, segment: usize, place: &Range<usize>) -> TensorPart {
        let owned = &self.owned[segment];
        let (start, end) = (place.start.max(owned.start), place.end.min(owned.end));
        if start >= end {
            return TensorPart { kept: 0..0, block: 0..0 };
        }
        TensorPart {
            kept: start - owned.start..end - owned.start,
            block: start - place.start..end - place.start,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_tensor_make_it_up_in_rank_order() {
        for num_replicas in 1..6 {
            for place in [0..7, 3..60, 10..10, 59..60] {
                let (mut end, mut kept) = (0, 0);
                for replica in 0..num_replicas {
                    let partition = Partition::new(&[60], replica, num_replicas);
                    let part = partition.of_tensor(0, &place);
                    assert_eq!(part.kept.len(), part.block.len());
                    if !part.block.is_empty() {
                        assert_eq!(part.block.start, end);
                        assert_eq!(
                            partition.owned(0).start + part.kept.start,
                            place.start + part.block.start
                        );
                        end = part.block.end;
                    }
                    kept += part.kept.len();
                }
                assert_eq!((kept, end), (place.len(), place.len()));
            }
        }
    }
}
