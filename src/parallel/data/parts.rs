//! The ranks that provide the tensors of a run's state, each a part: pure logic.
//!
//! A replica provides those elements of its tensors that it owns in ZeRO, also where it keeps all
//! of them. So a checkpoint costs every rank one copy of its own part, and no rank more.

use std::collections::BTreeMap;
use std::ops::Range;

use super::plan::StatePlan;
use super::settings::SyncSettings;
use crate::Result;
use crate::comm::GridShape;
use crate::nn::{Model, TensorPosition, TensorShard};
use crate::parallel::bucket::buckets;
use crate::parallel::layout::{Layout, ParallelPlan};
use crate::parallel::zero::Partition;

/// The largest number of elements of a bundle of several tensors, 8 MiB.
const BUNDLE: usize = 1 << 21;

/// The providers of every tensor of a model, and the bundles of tensors in which they send them.
#[derive(Debug, Clone)]
pub struct StateParts {
    shape: GridShape,
    /// The holders of each tensor.
    holders: Vec<Vec<Holder>>,
    bundles: Vec<Range<usize>>,
}

/// A block of a tensor, which a rank of every replica holds.
#[derive(Debug, Clone)]
struct Holder {
    /// The rank in the first replica.
    rank: usize,
    shard: TensorShard,
    position: TensorPosition,
    /// The length of its segment.
    segment_len: usize,
}

/// The part of a tensor that one rank provides.
#[derive(Debug, Clone, PartialEq)]
pub struct ProvidedPart<'a> {
    /// The rank.
    pub rank: usize,
    /// The block of the tensor of which this is a part.
    pub shard: &'a TensorShard,
    /// The elements of the block.
    pub block: Range<usize>,
}

impl StateParts {
    /// Divides the tensors of `model` among the ranks of a grid of `shape`. Not collective.
    ///
    /// # Errors
    /// `plan` does not fit the model or the grid.
    pub fn new(
        model: &Model,
        shape: GridShape,
        plan: &ParallelPlan,
        sync: SyncSettings,
    ) -> Result<StateParts> {
        plan.schedule.check()?;
        let mut holders = vec![Vec::new(); model.tensors.len()];
        for rank in 0..shape.stage * shape.tensor {
            let layout = Layout::of_sound_plan(model, shape, rank, plan)?;
            let shards = layout.shards();
            let StatePlan { segmentation, lengths, .. } =
                StatePlan::new(&layout, sync, sync.division(plan, shape.data));
            let positions = segmentation.positions(&shards);
            let held = layout.tensors.into_iter().zip(positions);
            for ((number, shard), position) in held.filter(|((_, shard), _)| !shard.is_copy) {
                let segment_len = lengths[position.segment];
                holders[number].push(Holder { rank, shard, position, segment_len });
            }
        }
        let lengths: Vec<usize> = model.tensors.iter().map(|spec| spec.num_elements()).collect();
        Ok(StateParts { shape, holders, bundles: buckets(&lengths, BUNDLE) })
    }

    /// Returns the number of elements of each tensor of the model.
    pub fn tensor_lengths(&self) -> impl Iterator<Item = usize> {
        self.holders.iter().map(|holders| holders.first().map_or(0, |own| own.shard.spec.num_elements()))
    }

    /// Returns the parts of tensor `number` of the model, which cover it once.
    pub fn parts_of(&self, number: usize) -> impl Iterator<Item = ProvidedPart<'_>> {
        let of_holder =
            move |holder| (0..self.shape.data).filter_map(move |replica| self.part(holder, replica));
        self.holders[number].iter().flat_map(of_holder)
    }

    /// Returns the part of tensor `number` that `rank` provides, if it provides one.
    pub fn part_of(&self, number: usize, rank: usize) -> Option<ProvidedPart<'_>> {
        let (replica, stage, tensor) = self.shape.coordinates(rank);
        let in_first = self.shape.rank(0, stage, tensor);
        let holder = self.holders[number].iter().find(|holder| holder.rank == in_first)?;
        self.part(holder, replica)
    }

    fn part<'a>(&'a self, holder: &'a Holder, replica: usize) -> Option<ProvidedPart<'a>> {
        let Holder { rank, shard, position, segment_len } = holder;
        let (_, stage, tensor) = self.shape.coordinates(*rank);
        let partition = Partition::new(&[*segment_len], replica, self.shape.data);
        let block = partition.of_tensor(0, &position.range).block;
        let rank = self.shape.rank(replica, stage, tensor);
        (!block.is_empty()).then_some(ProvidedPart { rank, shard, block })
    }

    /// Returns the tensors of each bundle.
    pub fn bundles(&self) -> &[Range<usize>] {
        &self.bundles
    }

    /// Returns the number of elements that `rank` provides of the tensors of `bundle`.
    pub fn len_of(&self, bundle: usize, rank: usize) -> usize {
        let parts = self.bundles[bundle].clone().filter_map(|number| self.part_of(number, rank));
        parts.map(|part| part.block.len()).sum()
    }

    /// Returns the ranks that provide parts of `bundle`, each with the number of elements.
    pub fn providers(&self, bundle: usize) -> BTreeMap<usize, usize> {
        let mut lengths = BTreeMap::new();
        for part in self.bundles[bundle].clone().flat_map(|number| self.parts_of(number)) {
            *lengths.entry(part.rank).or_insert(0) += part.block.len();
        }
        lengths
    }

    /// Returns the number of elements of all tensors of the largest bundle.
    pub fn largest_bundle(&self) -> usize {
        let lengths: Vec<usize> = self.tensor_lengths().collect();
        self.bundles.iter().map(|own| lengths[own.clone()].iter().sum()).max().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Activation;
    use crate::nn::{Features, Loss, Network};
    use crate::parallel::schedule::PipelineScheduleKind;
    use crate::parallel::zero::Accumulation;

    #[test]
    fn every_element_is_provided_once_in_every_grid() {
        let network = Network::mlp(&[33, 17, 29, 8], Activation::Gelu, true, 10, Loss::CrossEntropy);
        let model = network.build(Features::Flat(50)).unwrap();
        for (data, stage, tensor) in [(1, 1, 1), (3, 1, 1), (2, 2, 1), (1, 1, 3), (5, 2, 2), (64, 1, 2)] {
            for bucket_bytes in [1, 1 << 20] {
                let shape = GridShape { data, stage, tensor };
                let kind = PipelineScheduleKind::OneForwardOneBackward;
                let schedule = kind.generate(stage, 1, 2).unwrap();
                let plan = ParallelPlan::pipeline(&model, schedule, None).unwrap();
                let sync = SyncSettings {
                    bucket_bytes,
                    zero: None,
                    accumulation: Accumulation::Whole,
                    overlap: true,
                    clip_norm: None,
                };
                let parts = StateParts::new(&model, shape, &plan, sync).unwrap();
                for (number, spec) in model.tensors.iter().enumerate() {
                    let mut counts = vec![0.0; spec.num_elements()];
                    for part in parts.parts_of(number) {
                        assert_eq!(parts.part_of(number, part.rank), Some(part.clone()));
                        let mut once = vec![0.0; counts.len()];
                        part.shard.insert(part.block.clone(), &vec![1.0; part.block.len()], &mut once);
                        counts.iter_mut().zip(once).for_each(|(count, once)| *count += once);
                    }
                    assert!(counts.iter().all(|count| *count == 1.0), "{shape:?} {}", spec.name);
                }
                for bundle in 0..parts.bundles().len() {
                    let providers = parts.providers(bundle);
                    let lengths = (0..data * stage * tensor).map(|rank| (rank, parts.len_of(bundle, rank)));
                    assert!(lengths.filter(|(_, len)| *len > 0).eq(providers));
                }
            }
        }
    }
}
