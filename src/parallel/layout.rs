//! What of a model each rank holds: which stages, and of each layer which part.

use std::ops::Range;

use super::balance::balance;
use super::schedule::{Schedule, ScheduleKind};
use super::stage::{Head, Stage};
use super::tensor::{LayerPart, Piece, Split, split};
use crate::comm::{Grid, GridShape};
use crate::device::Device;
use crate::nn::{FlatBuffer, Model, TensorShard, hash_values};
use crate::{Error, Result};

/// How a model is spread over the stage and tensor axes of a grid.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// What the ranks of the stage axis do.
    pub schedule: Schedule,
    /// The layers of each stage.
    pub layers: Vec<Range<usize>>,
    /// How layers are shared over the tensor axis.
    pub split: Split,
    /// Forget the values inside a stage after the forward pass, and make them again in the backward pass.
    pub recompute: bool,
}

impl Plan {
    /// All layers of `model` in one stage, whole or shared as `split` says.
    ///
    /// # Errors
    /// `num_micro_batches` is 0.
    pub fn single_stage(model: &Model, num_micro_batches: usize, split: Split) -> Result<Plan> {
        let schedule = ScheduleKind::Sequential.generate(1, 1, num_micro_batches)?;
        Ok(Plan { schedule, layers: vec![0..model.layers.len(); 1], split, recompute: false })
    }

    /// The stages of `schedule`, with as many layers each as `sizes` says, or as makes them cost the same.
    ///
    /// # Errors
    /// `sizes` does not fit the schedule or the model.
    pub fn pipeline(model: &Model, schedule: Schedule, sizes: Option<&[usize]>) -> Result<Plan> {
        let layers = match sizes {
            None => balance(&model.costs(), schedule.num_stages),
            Some(sizes) => {
                let words = || sizes.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
                let (sum, num_layers) =
                    (sizes.iter().fold(0, |sum: usize, size| sum.saturating_add(*size)), model.layers.len());
                if sizes.len() != schedule.num_stages || sum != num_layers {
                    let why = format!(
                        "{words} is {found} stages with {sum} layers; the schedule has {stages} stages, {name} has {num_layers} layers",
                        words = words(),
                        found = sizes.len(),
                        stages = schedule.num_stages,
                        name = model.name
                    );
                    return Err(Error::input("--stages", why));
                }
                let mut end = 0;
                let mut next = |size: &usize| {
                    end += size;
                    end - size..end
                };
                sizes.iter().map(&mut next).collect()
            }
        };
        Ok(Plan { schedule, layers, split: Split::Pairs, recompute: false })
    }
}

/// Shows the values that this rank holds of one of its tensors to a function.
pub type Part<'a> = dyn Fn(usize, &mut dyn FnMut(&[f32]) -> Result<()>) -> Result<()> + 'a;

/// Where rank 0 puts whole tensors together.
pub trait Assembly {
    /// The memory for tensor `number` of the model.
    fn tensor(&mut self, number: usize) -> &mut [f32];

    /// Tensor `number` is whole; the next one follows.
    ///
    /// # Errors
    /// It is not what was expected.
    fn complete(&mut self, number: usize) -> Result<()>;
}

/// Memory for one tensor after the other, each to be looked at.
struct OneAtATime<'a> {
    lengths: Vec<usize>,
    values: Vec<f32>,
    look: &'a mut dyn FnMut(usize, &[f32]) -> Result<()>,
}

impl Assembly for OneAtATime<'_> {
    fn tensor(&mut self, number: usize) -> &mut [f32] {
        self.values.resize(self.lengths[number], 0.0);
        &mut self.values
    }

    fn complete(&mut self, number: usize) -> Result<()> {
        (self.look)(number, &self.values)
    }
}

/// What one rank holds, and where everything else is.
#[derive(Debug, Clone)]
pub struct Layout {
    /// This rank's stages, in order.
    pub stages: Vec<Stage>,
    /// This rank's tensors in logical order, each with its number in the model.
    pub tensors: Vec<(usize, TensorShard)>,
    /// For each tensor of the model, which ranks of the first replica hold it, and what of it.
    places: Vec<Vec<(usize, TensorShard)>>,
}

impl Layout {
    /// For rank `rank` of a grid of `shape`: its part of `model` as `plan` has it. Not collective.
    ///
    /// # Errors
    /// The schedule is not sound, the numbers do not fit each other, or a layer cannot be shared.
    pub fn new(model: &Model, shape: GridShape, rank: usize, plan: &Plan) -> Result<Layout> {
        let Plan { schedule, layers, split: how, .. } = plan;
        schedule.check()?;
        let fail = |why: String| Err(Error::input("laying out the model", why));
        if schedule.ranks.len() != shape.stage {
            let (found, wanted) = (schedule.ranks.len(), shape.stage);
            return fail(format!(
                "the schedule is for {found} ranks, but {wanted} share the layers of a replica"
            ));
        }
        let ends =
            layers.iter().try_fold(0, |end, run| (run.start == end && run.end >= end).then_some(run.end));
        if layers.len() != schedule.num_stages || ends != Some(model.layers.len()) {
            let lengths: Vec<String> = layers.iter().map(|run| run.len().to_string()).collect();
            return fail(format!(
                "{} layers in {} stages of {} layers; the schedule has {} stages, and together they must have all layers",
                model.layers.len(),
                layers.len(),
                lengths.join(", "),
                schedule.num_stages
            ));
        }
        let (_, stage_rank, tensor_rank) = shape.coordinates(rank);
        let mut layout =
            Layout { stages: Vec::new(), tensors: Vec::new(), places: vec![Vec::new(); model.tensors.len()] };
        for other in 0..shape.tensor {
            let parts = split(model, *how, other, shape.tensor)?;
            for (index, run) in layers.iter().enumerate() {
                let owner = schedule.rank_of(index).expect("a checked schedule runs every stage");
                for (number, shard) in parts[run.clone()].iter().flat_map(|part| &part.tensors) {
                    layout.places[*number].push((shape.rank(0, owner, other), shard.clone()));
                }
                if (owner, other) == (stage_rank, tensor_rank) {
                    layout.add_stage(model, index, &parts, run.clone(), index + 1 == layers.len());
                }
            }
        }
        Ok(layout)
    }

    fn add_stage(&mut self, model: &Model, index: usize, parts: &[LayerPart], run: Range<usize>, last: bool) {
        let before = parts[..run.start].iter().flat_map(|part| &part.pieces);
        let width = before.fold(model.input.len(), |width, piece| match piece {
            Piece::Layer(layer) => layer.output_len(),
            Piece::Exchange(exchange) if exchange.is_in_place() => width,
            Piece::Exchange(exchange) => exchange.width,
        });
        let head = last.then_some(Head { loss: model.loss, outputs: model.outputs });
        self.stages.push(Stage::new(index, &parts[run.clone()], width, self.tensors.len(), head));
        self.tensors.extend(parts[run].iter().flat_map(|part| part.tensors.iter().cloned()));
    }

    /// This rank's tensors alone.
    pub fn shards(&self) -> Vec<TensorShard> {
        self.tensors.iter().map(|(_, shard)| shard.clone()).collect()
    }

    /// Brings whole tensors, one after the other in logical order, to rank 0 of the world, straight into their places in
    /// `whole`; nothing but the block of one rank is ever held beside it. `part` shows what this rank holds of its tensor
    /// number so and so: all of its block if `num_replicas` is 1, else what it keeps of it, the parts of the first
    /// `num_replicas` replicas making up the block. Collective over the grid.
    ///
    /// # Errors
    /// What `part` or `whole` return (this rank alone).
    pub fn gather(
        &self,
        grid: &Grid,
        num_replicas: usize,
        part: &Part<'_>,
        whole: &mut dyn Assembly,
    ) -> Result<()> {
        let (rank, is_root) = (grid.all.rank(), grid.all.is_root());
        let mut block = Vec::new();
        for (number, holders) in self.places.iter().enumerate() {
            let tag = (number % (1 << 15)) as i32;
            let local = self.tensors.iter().position(|(other, _)| *other == number);
            for (holder, shard) in holders {
                let (_, stage, tensor) = grid.shape.coordinates(*holder);
                let source = |replica| grid.shape.rank(replica, stage, tensor);
                if !is_root {
                    let is_mine = (0..num_replicas).any(|replica| source(replica) == rank);
                    if let (true, Some(local)) = (is_mine, local) {
                        part(local, &mut |values| grid.all.send(values, 0, tag))?;
                    }
                    continue;
                }
                // a block of whole rows lies in one piece, and goes where it belongs at once
                let mut pieces = shard.ranges();
                let first = pieces.next().filter(|_| pieces.next().is_none());
                let target = match first.clone() {
                    Some(piece) => &mut whole.tensor(number)[piece],
                    None => {
                        block.resize(shard.num_elements(), 0.0);
                        &mut block[..]
                    }
                };
                let mut at = 0;
                for from in (0..num_replicas).map(source) {
                    match local {
                        Some(local) if from == rank => part(local, &mut |values| {
                            target[at..at + values.len()].copy_from_slice(values);
                            at += values.len();
                            Ok(())
                        })?,
                        _ => at += grid.all.receive(&mut target[at..], from, tag)?,
                    }
                }
                if at != target.len() {
                    let why = format!("its {num_replicas} replicas sent {at} of the {} values", target.len());
                    return Err(Error::failed(
                        format!("gathering {} from rank {holder}", shard.spec.name),
                        why,
                    ));
                }
                if first.is_none() {
                    shard.insert(&block, whole.tensor(number));
                }
            }
            if is_root {
                whole.complete(number)?;
            }
        }
        Ok(())
    }

    /// The same for `flat`, of which every replica holds all; shows the tensors to `look` on rank 0, each with its number.
    /// Collective over the grid.
    ///
    /// # Errors
    /// What `look` returns (rank 0 alone).
    pub fn look_at<D: Device>(
        &self,
        grid: &Grid,
        device: &D,
        flat: &FlatBuffer<D>,
        look: &mut dyn FnMut(usize, &[f32]) -> Result<()>,
    ) -> Result<()> {
        let lengths = self
            .places
            .iter()
            .map(|holders| holders.first().map_or(0, |(_, shard)| shard.spec.num_elements()));
        let mut one = OneAtATime { lengths: lengths.collect(), values: Vec::new(), look };
        self.gather(grid, 1, &|local, show| device.read(flat.tensor(device, local), show), &mut one)
    }

    /// A hash of all parameters' bits in logical order, on every rank: XXH3 with 128 bits over the little-endian bytes of the
    /// whole tensors, whatever the layout. Collective over the grid.
    ///
    /// # Errors
    /// The transfer from the device failed.
    pub fn digest<D: Device>(&self, grid: &Grid, device: &D, flat: &FlatBuffer<D>) -> Result<u128> {
        let mut hash = xxhash_rust::xxh3::Xxh3::new();
        self.look_at(grid, device, flat, &mut |_, values| {
            hash_values(&mut hash, values);
            Ok(())
        })?;
        let digest = hash.digest128();
        let mut halves = [digest as i64, (digest >> 64) as i64];
        grid.all.broadcast(&mut halves, 0)?;
        Ok(u128::from(halves[0] as u64) | u128::from(halves[1] as u64) << 64)
    }
}
