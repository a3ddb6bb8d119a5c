//! Pipeline parallelism: the stages of a rank, run in the order of a schedule, with messages to the
//! ranks of the previous and the next stages.
//!
//! A micro-batch passes through a stage as follows. A receive is posted into the input of a free
//! activation slot. The forward pass waits for it and fills the slot, and the output is sent, owned
//! by its send. For the backward pass, a receive is posted into the last array of a free gradient
//! set; the pass waits for it, fills the set and adds to the gradients of the parameters, and the
//! first array of the set is sent. An array is taken back from its send when it is used next, one
//! pass or more later. Nothing else blocks.
//!
//! Invariants: a slot or a set serves one micro-batch at a time ([`program`]); the messages of a
//! step are tagged by direction, stage and micro-batch; every rank adds
//! up the micro-batches in their order, whatever the schedule, which gives the bits of a single stage.

pub mod footprint;
mod local_stage;
mod messages;
pub mod program;
mod record;
mod source;
mod stage_arrays;
mod weight_gradients;

use self::local_stage::LocalStage;
use self::program::{Instruction, MOST_JOINED, RankProgram};
pub use self::source::MicroBatchSource;
pub(super) use self::source::load;
use self::stage_arrays::StageArrays;
use super::data::Weights;
use super::layout::Layout;
use super::schedule::{Schedule, Work};
use super::stage::{BackwardContext, Pass};
use super::tensor::exchange::Exchanger;
use super::watch::Recorder;
use super::zero::Direction;
use crate::comm::{Channels, Communicator, LARGEST_TAG};
use crate::device::Device;
use crate::sums::Section;
use crate::trace::{self, Name};
use crate::{Error, Result};

/// The stages of one rank, with everything that is needed to run them.
pub struct Pipeline<'a, D: Device> {
    exchanger: Exchanger<'a, D>,
    channel: Communicator,
    num_micro_batches: usize,
    training: RankProgram,
    evaluation: RankProgram,
    stages: Vec<LocalStage<D>>,
    /// The micro-batches whose gradients of weights are computed with those of the next pass.
    joined: Vec<(Instruction, Section)>,
    /// The record of the step that is audited.
    recorder: Option<Recorder>,
    /// True if the samples of the next step are in their arrays already.
    is_loaded: bool,
}

impl<'a, D: Device> Pipeline<'a, D> {
    /// Prepares to run the stages of `layout` in the order of `schedule`, which has been checked,
    /// for micro-batches of at most `rows` rows. With `recompute` a slot keeps only the values
    /// between groups of layers, and the backward pass of a group begins with its forward pass. Not
    /// collective.
    ///
    /// # Errors
    /// The device does not have enough memory, or a step has more messages than MPI has tags.
    pub fn new(
        device: &'a D,
        channels: &Channels,
        layout: &Layout,
        schedule: &Schedule,
        rows: usize,
        recompute: bool,
    ) -> Result<Pipeline<'a, D>> {
        let Channels { stages: channel, tensors: tensor, .. } = channels.clone();
        let (most, limit) = (program::most_local_stages(schedule), LARGEST_TAG as usize + 1);
        let num_tags = most.saturating_mul(schedule.num_micro_batches).saturating_mul(2);
        if schedule.num_stages > 1 && num_tags > limit {
            let micro_batches = schedule.num_micro_batches;
            let why = format!(
                "up to {most} stages on a rank and {micro_batches} micro-batches take {num_tags} tags, but \
                 MPI promises no more than {limit}; choose fewer micro-batches"
            );
            return Err(Error::input("numbering the messages of a pipeline", why));
        }
        let exchanger = match tensor.size() {
            1 => Exchanger::alone(device),
            _ => Exchanger::new(device, &tensor, layout.features, layout.longest_messages(rows))?,
        };
        let training = RankProgram::new(schedule, channel.rank());
        let evaluation = RankProgram::new(&schedule.forward_only(), channel.rank());
        let mut stages = Vec::new();
        for (local, stage) in layout.stages.iter().enumerate() {
            let arrays = StageArrays::new(stage, local, [&training, &evaluation], schedule, recompute);
            stages.push(LocalStage::new(exchanger.device, stage, rows, arrays)?);
        }
        let num_micro_batches = schedule.num_micro_batches;
        Ok(Pipeline {
            exchanger,
            channel,
            num_micro_batches,
            training,
            evaluation,
            stages,
            joined: Vec::with_capacity(MOST_JOINED),
            recorder: None,
            is_loaded: false,
        })
    }

    /// Returns the number of micro-batches of a step.
    pub fn num_micro_batches(&self) -> usize {
        self.num_micro_batches
    }

    /// Runs the forward and backward passes of all micro-batches of a step. The gradients of the
    /// loss, times `scale`, of this rank's parameters are handed to `weights` as they are completed;
    /// the losses are added to [`Weights::sums_mut`] of the last stage. Collective over the grid.
    ///
    /// # Errors
    /// A sample cannot be read (this rank alone), or there is no memory for messages.
    pub fn train(
        &mut self,
        weights: &mut Weights<D>,
        source: &mut dyn MicroBatchSource<D>,
        scale: f32,
    ) -> Result<()> {
        for at in 0..self.training.instructions.len() {
            let instruction = self.training.instructions[at];
            let section = source.section(instruction.action.micro_batch);
            match instruction.action.work {
                Work::Forward => self.forward(&instruction, weights, section.len(), source)?,
                Work::Backward => self.backward(&instruction, weights, section, scale, Pass::Whole)?,
                Work::InputGradient => self.backward(&instruction, weights, section, scale, Pass::Inputs)?,
                Work::WeightGradient => {
                    self.joined.push((instruction, section));
                    if !instruction.joins_next || weights.division().reduces_each() {
                        self.weight_gradients(weights)?;
                        self.joined.clear();
                    }
                }
                _ => self.message(&instruction, section.len())?,
            }
        }
        self.stages.iter_mut().for_each(LocalStage::collect);
        Ok(())
    }

    /// Returns true if every step with the same number of rows starts the same operations, without
    /// communication in between: one micro-batch on one rank, in one stage.
    pub fn repeats(&self) -> bool {
        let alone = self.channel.size() == 1 && self.exchanger.is_alone();
        alone && self.num_micro_batches == 1 && self.stages.len() == 1 && !trace::is_on()
    }

    /// Begins a step that [repeats](Pipeline::repeats), outside of its recording: if the source's
    /// [`load`](MicroBatchSource::load) cannot be recorded, loads the samples, so that [`Pipeline::train`]
    /// does not until [`Pipeline::end_repeated`]. Not collective.
    ///
    /// # Errors
    /// A sample cannot be read.
    pub fn begin_repeated(&mut self, source: &mut dyn MicroBatchSource<D>) -> Result<()> {
        if source.begin_repeated(self.exchanger.device)? {
            return Ok(());
        }
        let LocalStage { stage, slots, .. } = &mut self.stages[0];
        let rows = source.rows(0);
        load(self.exchanger.device, stage, 0, rows, &mut slots[0].activations, source)?;
        self.is_loaded = true;
        Ok(())
    }

    /// Makes passes load their samples themselves again. Not collective.
    pub fn end_repeated(&mut self) {
        self.is_loaded = false;
    }

    /// Runs the forward passes of as many micro-batches as a step has; the losses are added to
    /// [`Weights::sums_mut`] of the last stage. Collective over the grid.
    ///
    /// # Errors
    /// A sample cannot be read (this rank alone), or there is no memory for messages.
    pub fn evaluate(&mut self, weights: &mut Weights<D>, source: &mut dyn MicroBatchSource<D>) -> Result<()> {
        for at in 0..self.evaluation.instructions.len() {
            let instruction = self.evaluation.instructions[at];
            let rows = source.rows(instruction.action.micro_batch);
            if instruction.action.work == Work::Forward {
                self.forward(&instruction, weights, rows, source)?;
                let LocalStage { stage, slots, sets, .. } = &mut self.stages[instruction.local];
                if stage.head.is_some() && rows > 0 {
                    let (activations, gradients) =
                        (&slots[instruction.slot].activations, &mut sets[0].gradients);
                    stage.loss(&mut self.exchanger, rows, 0.0, activations, gradients, weights.sums_mut())?;
                }
            } else {
                self.message(&instruction, rows)?;
            }
        }
        self.stages.iter_mut().for_each(LocalStage::collect);
        Ok(())
    }

    fn forward(
        &mut self,
        instruction: &Instruction,
        weights: &mut Weights<D>,
        rows: usize,
        source: &mut dyn MicroBatchSource<D>,
    ) -> Result<()> {
        let device = self.exchanger.device;
        self.take_input(instruction, rows);
        let _span =
            trace::work(Name::Forward).micro_batch(instruction.action.stage, instruction.action.micro_batch);
        let LocalStage { stage, slots, .. } = &mut self.stages[instruction.local];
        let activations = &mut slots[instruction.slot].activations;
        if !self.is_loaded {
            load(device, stage, instruction.action.micro_batch, rows, activations, source)?;
        }
        self.record_value(instruction, 0, rows)?;
        for group in 0..self.stages[instruction.local].groups.len() {
            let LocalStage { slots, groups, inner, .. } = &mut self.stages[instruction.local];
            let pieces = groups[group].pieces.clone();
            if let Some(inner) = inner.last_mut() {
                slots[instruction.slot].activations.swap_inner(&groups[group], inner);
            }
            for at in pieces {
                let LocalStage { stage, slots, .. } = &mut self.stages[instruction.local];
                let activations = &mut slots[instruction.slot].activations;
                weights.prepare(device, &stage.tensors_of(at), &stage.tensors, Direction::Forward)?;
                stage.forward_piece(&mut self.exchanger, weights.parameters(), at, rows, activations)?;
                self.record_value(instruction, at + 1, rows)?;
                self.progress();
            }
            let LocalStage { slots, groups, inner, .. } = &mut self.stages[instruction.local];
            if let Some(inner) = inner.last_mut() {
                slots[instruction.slot].activations.swap_inner(&groups[group], inner);
            }
        }
        Ok(())
    }

    fn backward(
        &mut self,
        instruction: &Instruction,
        weights: &mut Weights<D>,
        section: Section,
        scale: f32,
        pass: Pass,
    ) -> Result<()> {
        let rows = section.len();
        let name = match pass {
            Pass::Whole => Name::Backward,
            Pass::Inputs => Name::InputGradient,
        };
        self.take_output_gradient(instruction, rows);
        let _span = trace::work(name).micro_batch(instruction.action.stage, instruction.action.micro_batch);
        let LocalStage { stage, slots, sets, .. } = &mut self.stages[instruction.local];
        if stage.head.is_some() && rows > 0 {
            let (activations, gradients) =
                (&slots[instruction.slot].activations, &mut sets[instruction.set].gradients);
            stage.loss(&mut self.exchanger, rows, scale, activations, gradients, weights.sums_mut())?;
        }
        self.record_gradient(instruction, self.stages[instruction.local].stage.num_pieces(), rows)?;
        // the gradients of weights are recorded leaf by leaf
        let is_split = pass == Pass::Whole && self.recorder.is_some();
        let in_piece = if is_split { Pass::Inputs } else { pass };
        for group in (0..self.stages[instruction.local].groups.len()).rev() {
            let is_again = self.stages[instruction.local].recomputes();
            if is_again {
                self.recompute_group(instruction, weights, rows, group)?;
            }
            self.backward_group(instruction, weights, section, in_piece, group)?;
            if is_split {
                self.joined.push((*instruction, section));
                self.weight_group(weights, group)?;
                self.joined.clear();
            }
            if is_again && pass == Pass::Whole {
                self.stages[instruction.local].give_back_inner(instruction, group);
            }
        }
        Ok(())
    }

    /// Runs the backward pass of the pieces of a group.
    fn backward_group(
        &mut self,
        instruction: &Instruction,
        weights: &mut Weights<D>,
        section: Section,
        pass: Pass,
        group: usize,
    ) -> Result<()> {
        let device = self.exchanger.device;
        for at in self.stages[instruction.local].groups[group].pieces.clone().rev() {
            let LocalStage { stage, slots, sets, .. } = &mut self.stages[instruction.local];
            let own = stage.tensors_of(at);
            weights.prepare(device, &own, &stage.tensors, Direction::Backward)?;
            if !weights.division().has_rows(instruction.action.micro_batch) {
                continue;
            }
            if pass == Pass::Whole {
                weights.open(device, &own)?;
            }
            let (parameters, gradients) = weights.parameters_and_gradients();
            let exchanger = &mut self.exchanger;
            let mut context = BackwardContext { exchanger, parameters, gradients, section };
            let (slot, set) = (&mut slots[instruction.slot], &mut sets[instruction.set]);
            stage.backward_piece(&mut context, at, pass, &mut slot.activations, &mut set.gradients)?;
            if self.stages[instruction.local].stage.needs_gradient(at) {
                self.record_gradient(instruction, at, section.len())?;
            }
            if pass == Pass::Whole && !own.is_empty() {
                let end = self.stages[instruction.local].stage.tensors.end;
                let (own, micro_batch) = (own.start..end, instruction.action.micro_batch);
                weights.completed(device, &own, micro_batch, instruction.completes)?;
            }
            self.progress();
        }
        Ok(())
    }

    /// Repeats the forward pass of a group, in the arrays of the set of gradients.
    fn recompute_group(
        &mut self,
        instruction: &Instruction,
        weights: &mut Weights<D>,
        rows: usize,
        group: usize,
    ) -> Result<()> {
        let LocalStage { stage, slots, groups, inner, .. } = &mut self.stages[instruction.local];
        let (activations, group) = (&mut slots[instruction.slot].activations, &groups[group]);
        activations.swap_inner(group, &mut inner[instruction.set]);
        let (device, own) = (self.exchanger.device, stage.tensors_of_group(group));
        for at in group.pieces.clone() {
            weights.prepare(device, &stage.tensors_of(at), &own, Direction::Forward)?;
            stage.forward_piece(&mut self.exchanger, weights.parameters(), at, rows, activations)?;
        }
        Ok(())
    }
}
