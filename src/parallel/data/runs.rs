//! The elements of a segment that an update treats alike: pure logic.

use std::ops::Range;

use crate::nn::{Segmentation, TensorShard};
use crate::optim::OptimizerSettings;

/// Consecutive elements of a segment whose update is one pass.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UpdateRun {
    /// The elements.
    pub elements: Range<usize>,
    /// True if weight decay applies.
    pub decays: bool,
    /// True if the squares of the gradient count, for the elements are no copies.
    pub counts: bool,
}

/// The runs of every segment. The padding after a tensor belongs to its run.
#[derive(Debug, Clone)]
pub struct UpdateRuns {
    segments: Vec<Vec<UpdateRun>>,
}

impl UpdateRuns {
    /// Returns the runs of `shards` in the segments of `segmentation`.
    pub fn new(
        shards: &[TensorShard],
        segmentation: &Segmentation,
        optimizer: &OptimizerSettings,
    ) -> UpdateRuns {
        let lengths = segmentation.segment_lengths(shards);
        let positions = segmentation.positions(shards);
        let mut segments: Vec<Vec<UpdateRun>> = lengths.iter().map(|_| Vec::new()).collect();
        for (shard, position) in shards.iter().zip(&positions) {
            let (decays, counts) = (optimizer.decays(&shard.spec.shape), !shard.is_copy);
            let (runs, start) = (&mut segments[position.segment], position.range.start);
            match runs.last_mut() {
                Some(last) if (last.decays, last.counts) == (decays, counts) => continue,
                Some(last) => last.elements.end = start,
                None => {}
            }
            let start = if runs.is_empty() { 0 } else { start };
            runs.push(UpdateRun { elements: start..lengths[position.segment], decays, counts });
        }
        UpdateRuns { segments }
    }

    /// Returns the runs within elements `range` of a segment.
    pub fn within(&self, segment: usize, range: Range<usize>) -> impl Iterator<Item = UpdateRun> {
        self.segments[segment].iter().filter_map(move |run| {
            let elements = run.elements.start.max(range.start)..run.elements.end.min(range.end);
            (!elements.is_empty()).then_some(UpdateRun { elements, ..*run })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nn::{Initial, TensorSpec};
    use crate::optim::{DecayScope, Rule};

    #[test]
    fn runs_cover_a_segment_once() {
        let shard = |shape: &[usize], is_copy| {
            let initial = Initial::Constant { value: 0.0 };
            let spec = TensorSpec { name: "t".into(), shape: shape.to_vec(), initial };
            TensorShard { is_copy, ..TensorShard::whole(&spec) }
        };
        let shards = [
            shard(&[4, 9], false),
            shard(&[4], false),
            shard(&[7], true),
            shard(&[2, 2], true),
            shard(&[5, 5], false),
        ];
        let segmentation = Segmentation { segments: vec![0..4, 4..5], multiple: 64 };
        let all = OptimizerSettings::new(Rule::AdamW);
        let matrices = OptimizerSettings { decay: DecayScope::Matrices, ..all };
        let found = |optimizer: &OptimizerSettings, range| -> Vec<(Range<usize>, bool, bool)> {
            let runs = UpdateRuns::new(&shards, &segmentation, optimizer);
            runs.within(0, range).map(|run| (run.elements, run.decays, run.counts)).collect()
        };
        assert_eq!(found(&all, 0..192), [(0..96, true, true), (96..192, true, false)]);
        let expected =
            [(0..64, true, true), (64..96, false, true), (96..128, false, false), (128..192, true, false)];
        assert_eq!(found(&matrices, 0..192), expected);
        assert_eq!(found(&matrices, 70..100), [(70..96, false, true), (96..100, false, false)]);
        let runs = UpdateRuns::new(&shards, &segmentation, &all);
        assert_eq!(runs.within(1, 0..64).count(), 1);
    }
}
