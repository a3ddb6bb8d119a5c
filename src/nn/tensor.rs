//! A tensor of a model: its specification, and the shard of it that a rank holds.

use std::ops::Range;

use super::Initial;

/// The specification of one tensor of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct TensorSpec {
    /// PyTorch's name, such as `fc1.weight`.
    pub name: String,
    /// The shape, outermost dimension first.
    pub shape: Vec<usize>,
    /// The distribution of the elements before training.
    pub initial: Initial,
}

impl TensorSpec {
    /// Returns the number of elements.
    pub fn num_elements(&self) -> usize {
        product(&self.shape)
    }
}

/// Returns the product of `sizes`, or `usize::MAX` if it is larger.
pub(super) fn product(sizes: &[usize]) -> usize {
    sizes.iter().fold(1, |product: usize, size| product.saturating_mul(*size))
}

/// The shard of a tensor that one rank holds: a block of the tensor seen as a matrix of its first
/// dimension by all others. The blocks that are no copies cover the tensor exactly once, so a sum over
/// them counts every element once. The rows of a block lie in memory in the order in which they are
/// listed, which need not be that of the tensor.
#[derive(Debug, Clone, PartialEq)]
pub struct TensorShard {
    /// The whole tensor.
    pub spec: TensorSpec,
    /// The rows of the block: indices of the first dimension, in the order of the memory.
    pub rows: Vec<Range<usize>>,
    /// The columns of the block: indices of the elements under one row.
    pub columns: Range<usize>,
    /// True for a copy of a block that another rank holds too, where it counts. Copies have the same
    /// bits, because the ranks compute the same gradients.
    pub is_copy: bool,
}

impl TensorShard {
    /// Returns the shard that is all of the tensor.
    pub fn whole(spec: &TensorSpec) -> TensorShard {
        let (rows, columns) = (spec.shape[0], spec.shape[1..].iter().product());
        TensorShard { spec: spec.clone(), rows: vec![0..rows; 1], columns: 0..columns, is_copy: false }
    }

    /// Returns the number of elements in the block.
    pub fn num_elements(&self) -> usize {
        self.rows.iter().map(ExactSizeIterator::len).sum::<usize>() * self.columns.len()
    }

    /// Returns the contiguous ranges of the whole tensor that make up the block, in the order of the
    /// memory: one per row, or one for several whole rows.
    pub fn ranges(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let width: usize = self.spec.shape[1..].iter().product();
        let columns = self.columns.clone();
        self.rows.clone().into_iter().flat_map(move |rows| {
            let columns = columns.clone();
            let (num, len) =
                if columns.len() == width { (1, rows.len() * width) } else { (rows.len(), columns.len()) };
            (0..num).map(move |row| {
                let start = (rows.start + row) * width + columns.start;
                start..start + len
            })
        })
    }

    /// Copies the block out of the `whole` tensor.
    pub fn extract(&self, whole: &[f32], block: &mut [f32]) {
        let mut at = 0;
        for range in self.ranges() {
            block[at..at + range.len()].copy_from_slice(&whole[range.clone()]);
            at += range.len();
        }
    }

    /// Copies elements `part` of the block, which are `values`, to their places in the `whole`
    /// tensor.
    pub fn insert(&self, part: Range<usize>, values: &[f32], whole: &mut [f32]) {
        for (range, start) in self.ranges_of(part) {
            whole[start..start + range.len()].copy_from_slice(&values[range]);
        }
    }

    /// Returns the range of the whole tensor that elements `part` of the block are, if they are
    /// contiguous.
    pub fn contiguous(&self, part: Range<usize>) -> Option<Range<usize>> {
        let mut ranges = self.ranges_of(part);
        let (range, start) = ranges.next()?;
        ranges.next().is_none().then(|| start..start + range.len())
    }

    /// Returns the contiguous ranges of the whole tensor that make up elements `part` of the block:
    /// for each, its range in the part and its start in the whole tensor.
    fn ranges_of(&self, part: Range<usize>) -> impl Iterator<Item = (Range<usize>, usize)> + use<> {
        let mut at = 0;
        self.ranges().filter_map(move |range| {
            let (start, end) = (part.start.max(at), part.end.min(at + range.len()));
            let in_whole = range.start + start.saturating_sub(at);
            at += range.len();
            (start < end).then(|| (start - part.start..end - part.start, in_whole))
        })
    }

    /// Writes the initial values for `seed` of elements `part` of the block, which are those that
    /// they have in the whole tensor.
    pub fn initialise(&self, seed: u64, part: Range<usize>, values: &mut [f32]) {
        for (range, start) in self.ranges_of(part) {
            self.spec.initial.fill(seed, &self.spec.name, start, &mut values[range]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_a_tensor_start_as_the_whole_does_and_go_back_to_it() {
        let spec = TensorSpec {
            name: "t".into(),
            shape: vec![5, 2, 3],
            initial: Initial::Normal { deviation: 1.0 },
        };
        let (mut whole, mut rebuilt) = (vec![0.0; 30], vec![f32::NAN; 30]);
        TensorShard::whole(&spec).initialise(3, 0..30, &mut whole);
        let blocks = [
            (vec![1..2, 0..1], 0..6),
            (vec![2..5; 1], 0..1),
            (vec![4..5, 2..4], 1..6),
            (vec![5..5; 1], 0..6),
            (vec![0..5; 1], 2..2),
        ];
        for (rows, columns) in blocks {
            let shard = TensorShard { spec: spec.clone(), rows, columns, is_copy: false };
            let (mut block, mut same) = (vec![0.0; shard.num_elements()], vec![0.0; shard.num_elements()]);
            let (len, cut) = (block.len(), block.len() / 3);
            shard.initialise(3, 0..cut, &mut block[..cut]);
            shard.initialise(3, cut..len, &mut block[cut..]);
            shard.extract(&whole, &mut same);
            assert_eq!(block, same);
            assert!(shard.contiguous(0..len).is_none(), "{shard:?}");
            assert_eq!(shard.contiguous(0..1).is_some(), len > 0, "{shard:?}");
            shard.insert(0..cut, &block[..cut], &mut rebuilt);
            shard.insert(cut..len, &block[cut..], &mut rebuilt);
        }
        assert_eq!(rebuilt, whole);
    }
}
