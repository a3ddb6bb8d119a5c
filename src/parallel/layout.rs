//! The layout of a model: the stages and the shards of tensors that each rank holds.

use std::ops::Range;

use super::balance::balance;
use super::batch::Summation;
use super::schedule::{PipelineScheduleKind, Schedule};
use super::stage::{Head, Stage};
use super::tensor::division::FeatureDivision;
use super::tensor::exchange::MessageLengths;
use super::tensor::{LayerPart, Piece, Split, split, split_classes};
use crate::comm::GridShape;
use crate::nn::{Model, TensorShard};
use crate::{Error, Result};

/// A plan that spreads a model over the stage and tensor axes of a grid.
#[derive(Debug, Clone, PartialEq)]
pub struct ParallelPlan {
    /// The actions of the ranks of the stage axis.
    pub schedule: Schedule,
    /// The layers of each stage.
    pub layers: Vec<Range<usize>>,
    /// The division of layers among the ranks of the tensor axis.
    pub split: Split,
    /// True to divide the positions of sequences among these ranks too: see [`super::tensor::positions`].
    pub sequence_parallel: bool,
    /// The order of the sums that ranks share.
    pub summation: Summation,
    /// True to discard the activations inside groups of layers after the forward pass, and recompute
    /// them in the backward pass.
    pub recompute: bool,
    /// True to keep the gradients of all values until a backward pass is over, which audits need. A schedule
    /// that postpones the gradients of weights keeps them too.
    pub keeps_gradients: bool,
    /// The share of the ranks' time that a pipeline's schedule leaves idle, with which traces
    /// compare the measured bubble; `None` for a model that is not trained as a pipeline.
    pub expected_bubble: Option<f64>,
}

impl ParallelPlan {
    /// Plans all layers of `model` in one stage, with sums by layout.
    ///
    /// # Errors
    /// `num_micro_batches` is 0.
    pub fn single_stage(model: &Model, num_micro_batches: usize) -> Result<ParallelPlan> {
        let schedule = PipelineScheduleKind::Sequential.generate(1, 1, num_micro_batches)?;
        Ok(ParallelPlan::of(schedule, vec![0..model.layers.len(); 1]))
    }

    fn of(schedule: Schedule, layers: Vec<Range<usize>>) -> ParallelPlan {
        let summation = Summation::ByLayout;
        ParallelPlan {
            schedule,
            layers,
            split: Split::Pairs,
            sequence_parallel: false,
            summation,
            recompute: false,
            keeps_gradients: false,
            expected_bubble: None,
        }
    }

    /// Returns true if the gradients of all values are there until a backward pass is over, and those of
    /// weights can be computed then.
    pub fn keeps_all_gradients(&self) -> bool {
        self.keeps_gradients || self.schedule.splits_passes()
    }

    /// Plans the stages of `schedule`, with the numbers of layers in `sizes`, where a residual counts as
    /// one layer, or with numbers that make the stages cost the same, with sums by layout.
    ///
    /// # Errors
    /// `sizes` does not fit the schedule or the model.
    pub fn pipeline(model: &Model, schedule: Schedule, sizes: Option<&[usize]>) -> Result<ParallelPlan> {
        let runs = model.runs();
        let stages = match sizes {
            None => {
                let costs = model.costs();
                let cost = |run: &Range<usize>| costs[run.clone()].iter().sum();
                balance(&runs.iter().map(cost).collect::<Vec<u64>>(), schedule.num_stages)
            }
            Some(sizes) => {
                let words = || sizes.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
                let sum = sizes.iter().fold(0, |sum: usize, size| sum.saturating_add(*size));
                if sizes.len() != schedule.num_stages || sum != runs.len() {
                    let why = format!(
                        "{words} is {found} stages with {sum} layers; the schedule has {stages} stages, \
                         {name} has {num_layers} layers{hint}",
                        num_layers = runs.len(),
                        hint =
                            if runs.len() < model.layers.len() { " (a residual counts as one)" } else { "" },
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
        // from runs to layers
        let start = |run: usize| runs.get(run).map_or(model.layers.len(), |run| run.start);
        let layers = stages.into_iter().map(|stage| start(stage.start)..start(stage.end)).collect();
        Ok(ParallelPlan::of(schedule, layers))
    }
}

/// The stages and tensors of one rank.
#[derive(Debug, Clone)]
pub struct Layout {
    /// This rank's stages, in order.
    pub stages: Vec<Stage>,
    /// This rank's tensors in logical order, each with its number in the model.
    pub tensors: Vec<(usize, TensorShard)>,
    /// The division of features among the ranks of the tensor axis.
    pub features: FeatureDivision,
    /// The tensors here that another layer uses too.
    pub ties: Vec<TensorTie>,
    /// The parameters of the model divided by the ranks that share a replica, the same number on every rank.
    pub mean_parameters: usize,
}

/// A tensor of this rank that another layer uses too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorTie {
    /// The number of the tensor among those of this rank.
    pub tensor: usize,
    /// The other use.
    pub other: TieEnd,
}

/// The place of the other use of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TieEnd {
    /// A tensor of this rank.
    Here(usize),
    /// The tensor of a rank of the stage axis.
    Peer(usize),
}

impl Layout {
    /// Lays out `model` for rank `rank` of a grid of `shape`, as `plan` says. Not collective.
    ///
    /// # Errors
    /// The schedule is not sound, the numbers do not fit each other, or a layer cannot be divided.
    pub fn new(model: &Model, shape: GridShape, rank: usize, plan: &ParallelPlan) -> Result<Layout> {
        plan.schedule.check()?;
        Layout::of_sound_plan(model, shape, rank, plan)
    }

    /// As [`Layout::new`], without the proof that the schedule is sound, which takes as long as the schedule
    /// and is the same for every rank.
    ///
    /// # Errors
    /// The numbers do not fit each other, or a layer cannot be divided.
    pub fn of_sound_plan(
        model: &Model,
        shape: GridShape,
        rank: usize,
        plan: &ParallelPlan,
    ) -> Result<Layout> {
        let ParallelPlan { schedule, layers, split: how, .. } = plan;
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
                "{} layers in {} stages of {} layers; the schedule has {} stages, and together they must \
                 have all layers",
                model.layers.len(),
                layers.len(),
                lengths.join(", "),
                schedule.num_stages
            ));
        }
        let starts: Vec<usize> = model.runs().iter().map(|run| run.start).collect();
        let cut = layers
            .iter()
            .map(|run| run.start)
            .find(|start| *start < model.layers.len() && !starts.contains(start));
        if let Some(cut) = cut {
            return fail(format!("a stage begins with layer {cut}, which is inside of a residual"));
        }
        let (_, stage_rank, tensor_rank) = shape.coordinates(rank);
        let features =
            FeatureDivision::new(plan.summation, shape.tensor).with_positions(plan.sequence_parallel);
        let mut layout = Layout {
            stages: Vec::new(),
            tensors: Vec::new(),
            features,
            ties: Vec::new(),
            mean_parameters: model.num_parameters() / (shape.stage * shape.tensor),
        };
        let parts = split(model, *how, tensor_rank, features);
        let owners = schedule.owners();
        for (index, run) in layers.iter().enumerate() {
            if owners[index] == Some(stage_rank) {
                let is_last = index + 1 == layers.len();
                let head = is_last
                    .then(|| Head::new(model).with_share(split_classes(model, *how, tensor_rank, features)));
                layout.add_stage(model, index, &parts, run.clone(), head);
            }
        }
        if !plan.recompute {
            layout.stages.iter_mut().for_each(Stage::join_loss_and_activation);
        }
        if !plan.keeps_all_gradients() {
            layout.stages.iter_mut().for_each(Stage::share_gradients);
        }
        let stage_of = |layer: usize| layers.iter().position(|run| run.contains(&layer)).unwrap_or_default();
        for (user, layer) in model.layers.iter().enumerate().filter(|(_, layer)| layer.is_tied()) {
            let owner = model.layers.iter().position(|other| other.tensors == layer.tensors);
            let uses = [owner.unwrap_or(user), user].map(|layer| owners[stage_of(layer)]);
            layout.tie(layer.tensors.start, uses, stage_rank);
        }
        Ok(layout)
    }

    /// Ties tensor `number` of the model, which ranks `uses` of the stage axis have, if this rank,
    /// `stage_rank`, is among them.
    fn tie(&mut self, number: usize, uses: [Option<usize>; 2], stage_rank: usize) {
        let own: Vec<usize> =
            (0..self.tensors.len()).filter(|tensor| self.tensors[*tensor].0 == number).collect();
        let peer = uses.into_iter().flatten().find(|rank| *rank != stage_rank);
        match (own.as_slice(), peer) {
            (&[tensor, other], _) => self.ties.push(TensorTie { tensor, other: TieEnd::Here(other) }),
            (&[tensor], Some(rank)) => self.ties.push(TensorTie { tensor, other: TieEnd::Peer(rank) }),
            _ => {}
        }
    }

    /// Returns true if one of `tensors` of this rank is used by another layer too.
    pub fn is_tied(&self, tensors: &Range<usize>) -> bool {
        self.ties.iter().any(|tie| {
            tensors.contains(&tie.tensor)
                || matches!(tie.other, TieEnd::Here(other) if tensors.contains(&other))
        })
    }

    fn add_stage(
        &mut self,
        model: &Model,
        index: usize,
        parts: &[LayerPart],
        run: Range<usize>,
        head: Option<Head>,
    ) {
        let before = parts[..run.start].iter().flat_map(|part| &part.pieces);
        let width = before.fold(model.input.len(), |width, piece| match piece {
            Piece::Layer(layer) => layer.output_len(),
            Piece::Exchange(exchange) if exchange.is_in_place() => width,
            Piece::Exchange(exchange) => exchange.output_len(),
        });
        let before = run.start.checked_sub(1).map(|at| &parts[at]);
        let stage = Stage::new(index, before, &parts[run.clone()], width, self.tensors.len(), head);
        self.stages.push(stage);
        self.tensors.extend(parts[run].iter().flat_map(|part| part.tensors.iter().cloned()));
    }

    /// Returns the most values in a message of each kind of exchange over the tensor axis of `rows` rows.
    pub fn longest_messages(&self, rows: usize) -> MessageLengths {
        let lengths = self.stages.iter().map(|stage| stage.longest_messages(rows, self.features));
        lengths.fold(MessageLengths::default(), MessageLengths::max)
    }

    /// Returns the shards of this rank's tensors.
    pub fn shards(&self) -> Vec<TensorShard> {
        self.tensors.iter().map(|(_, shard)| shard.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nn::{Features, GptSizes, Network};

    #[test]
    fn gradients_share_memory_unless_they_are_needed_later() {
        let model = Network::deep_mlp(16, 32).build(Features::Flat(16)).unwrap();
        let shape = GridShape { data: 1, stage: 2, tensor: 1 };
        let width = |kind: PipelineScheduleKind, keeps_gradients| {
            let plan = ParallelPlan::pipeline(&model, kind.generate(2, 1, 4).unwrap(), None).unwrap();
            let plan = ParallelPlan { keeps_gradients, ..plan };
            let stage = &Layout::new(&model, shape, 0, &plan).unwrap().stages[0];
            stage.row_widths(&stage.one_group()).gradients
        };
        let all = width(PipelineScheduleKind::OneForwardOneBackward, true);
        for kind in [PipelineScheduleKind::ZeroBubble, PipelineScheduleKind::Deferred] {
            assert_eq!(width(kind, false), all, "{kind:?}");
        }
        assert!(2 * width(PipelineScheduleKind::OneForwardOneBackward, false) <= all);
    }

    #[test]
    fn logits_stay_where_they_are() {
        let (len, rows, num_ranks) = (32, 5, 2);
        let layout = |vocabulary, rank| {
            let gpt = Network::gpt(GptSizes { layers: 2, heads: 2, width: 16, bias: true, dropout: 0.0 });
            let model = gpt.build(Features::Tokens { len, vocabulary }).unwrap();
            let plan = ParallelPlan::single_stage(&model, 1).unwrap();
            let plan = ParallelPlan { summation: Summation::Canonical { num_leaves: 8 }, ..plan };
            Layout::new(&model, GridShape { data: 1, stage: 1, tensor: num_ranks }, rank, &plan).unwrap()
        };
        for rank in 0..num_ranks {
            let [small, large] = [100, 5000].map(|vocabulary| layout(vocabulary, rank));
            assert_eq!(small.longest_messages(rows), large.longest_messages(rows));
            let MessageLengths { statistics, exponentials, .. } = large.longest_messages(rows);
            assert_eq!((statistics, exponentials), (3 * num_ranks * rows * len, rows * len));
            assert_eq!(large.stages[0].output_width(), len * 5000 / num_ranks);
        }
    }
}
