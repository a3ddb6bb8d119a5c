//! Pipeline parallelism: the stages of a rank, run in the order of a schedule, with messages to the ranks of the stages before
//! and after.
//!
//! The way of a micro-batch through a stage: a receive is posted into the input of a free slot; the forward pass waits for it and
//! fills the slot; the output leaves in a send that owns it. On the way back a receive is posted into the last array of a free
//! set of gradients, the backward pass waits for it, fills the set and adds to the gradients of the parameters, and the first
//! array of the set leaves in a send. An array comes back from its send when it is wanted next, a pass or more later. Nothing else
//! blocks.
//!
//! Invariants: a slot or a set serves one micro-batch at a time ([`program`]); the messages of a step are named by direction,
//! stage and micro-batch; every rank adds the micro-batches up in the order of its schedule, so a schedule that keeps that order
//! gives the bits of a single stage.

mod lane;
pub mod program;
mod source;

use self::lane::Lane;
use self::program::{Instruction, RankProgram};
pub use self::source::Source;
use self::source::load;
use super::data::GradSync;
use super::layout::Layout;
use super::schedule::{Schedule, Work};
use super::stage::{Accumulate, BackwardContext, Pass, Stage};
use super::tensor::exchange::{Exchanger, here, here_mut};
use crate::comm::{Communicator, Front, Grid, LARGEST_TAG};
use crate::device::Device;
use crate::nn::FlatBuffer;
use crate::trace::{self, Name};
use crate::{Error, Result};

/// This rank's parameters and what a step does to them.
pub struct Weights<D: Device> {
    /// The parameters.
    pub parameters: FlatBuffer<D>,
    /// Their gradients.
    pub gradients: FlatBuffer<D>,
    /// What brings gradients together and parameters up to date.
    pub sync: GradSync<D>,
    /// The step's sums: see [`totals`](crate::device::totals).
    pub sums: D::Buffer,
}

/// The communicators of a [`Pipeline`], made before anything that can fail on one rank alone.
pub struct PipelineChannels {
    stage: Communicator,
    tensor: Communicator,
}

impl PipelineChannels {
    /// For the stage and tensor axes of `grid`. Collective over the grid.
    pub fn new(grid: &Grid) -> PipelineChannels {
        let own = |axis: &Communicator| axis.duplicate();
        PipelineChannels { stage: own(&grid.stage), tensor: own(&grid.tensor) }
    }
}

/// A rank's stages at work.
pub struct Pipeline<'a, D: Device> {
    exchanger: Exchanger<'a, D>,
    channel: Communicator,
    num_micro_batches: usize,
    training: RankProgram,
    evaluation: RankProgram,
    lanes: Vec<Lane<D>>,
    recompute: bool,
    /// The samples of the next step are in their places.
    is_loaded: bool,
}

impl<'a, D: Device> Pipeline<'a, D> {
    /// The stages of `layout` in the order of `schedule`, which has been checked, for micro-batches of at most `rows` rows. With
    /// `recompute` a slot keeps only what comes into the stage and what leaves it, and the backward pass begins with another
    /// forward pass (Chen et al., "Training deep nets with sublinear memory cost", 2016). Not collective.
    ///
    /// # Errors
    /// The device has not enough memory, or a step has more messages than MPI has tags.
    pub fn new(
        device: &'a D,
        channels: PipelineChannels,
        layout: &Layout,
        schedule: &Schedule,
        rows: usize,
        recompute: bool,
    ) -> Result<Pipeline<'a, D>> {
        let PipelineChannels { stage: channel, tensor } = channels;
        let (lanes, limit) = (program::most_lanes(schedule), LARGEST_TAG as usize + 1);
        let num_tags = lanes.saturating_mul(schedule.num_micro_batches).saturating_mul(2);
        if schedule.num_stages > 1 && num_tags > limit {
            let micro_batches = schedule.num_micro_batches;
            let why = format!(
                "{lanes} stages of a rank and {micro_batches} micro-batches make {num_tags} messages between two ranks in a step"
            );
            return Err(Error::input(
                "numbering messages",
                format!("{why}, but MPI promises no more than {limit} tags"),
            ));
        }
        let widest = layout.stages.iter().map(Stage::widest_exchange).max().unwrap_or_default();
        let exchanger = match tensor.size() {
            1 => Exchanger::alone(device),
            _ => Exchanger::new(device, tensor, rows, widest)?,
        };
        let training = RankProgram::new(schedule, channel.rank());
        let evaluation = RankProgram::new(&schedule.forward_only(), channel.rank());
        let mut lanes = Vec::new();
        for (lane, stage) in layout.stages.iter().enumerate() {
            let num_slots = training.num_slots[lane].max(evaluation.num_slots[lane]);
            lanes.push(Lane::new(
                &exchanger,
                stage,
                num_slots,
                training.num_sets[lane].max(1),
                rows,
                recompute,
            )?);
        }
        let num_micro_batches = schedule.num_micro_batches;
        Ok(Pipeline {
            exchanger,
            channel,
            num_micro_batches,
            training,
            evaluation,
            lanes,
            recompute,
            is_loaded: false,
        })
    }

    /// The number of micro-batches of a step.
    pub fn num_micro_batches(&self) -> usize {
        self.num_micro_batches
    }

    /// Forward and backward passes of all micro-batches of a step: the gradients of the loss, times `scale`, of this rank's
    /// parameters, handed to [`Weights::sync`] as they are complete; the losses are in [`Weights::sums`] of the last stage.
    /// Collective over the grid.
    ///
    /// # Errors
    /// A sample cannot be read (this rank alone), or there is no memory for messages.
    pub fn train(&mut self, weights: &mut Weights<D>, source: &mut dyn Source<D>, scale: f32) -> Result<()> {
        for lane in &mut self.lanes {
            lane.has_gradients = Accumulate::default();
        }
        for at in 0..self.training.instructions.len() {
            let instruction = self.training.instructions[at];
            let rows = source.rows(instruction.action.micro_batch);
            match instruction.action.work {
                Work::Forward => self.forward(&instruction, &weights.parameters, rows, source)?,
                Work::Backward => self.backward(&instruction, weights, rows, scale, Pass::Whole)?,
                Work::InputGradient => self.backward(&instruction, weights, rows, scale, Pass::Inputs)?,
                Work::WeightGradient => self.backward(&instruction, weights, rows, scale, Pass::Weights)?,
                _ => self.message(&instruction, rows)?,
            }
        }
        for lane in &mut self.lanes {
            lane.collect();
            if !lane.has_gradients.weights {
                for tensor in lane.stage.tensors.clone() {
                    self.exchanger
                        .device
                        .fill(weights.gradients.tensor_mut(self.exchanger.device, tensor), 0.0);
                }
            }
        }
        Ok(())
    }

    /// True if a step starts the same operations whenever it has as many rows, and nobody looks in between: one micro-batch on one
    /// rank, in one stage.
    pub fn repeats(&self) -> bool {
        let alone = self.channel.size() == 1 && self.exchanger.is_alone();
        alone && self.num_micro_batches == 1 && self.lanes.len() == 1 && !trace::is_on()
    }

    /// Brings the samples of a step that [repeats](Pipeline::repeats) to their places, so that [`Pipeline::train`] finds them there
    /// until [`Pipeline::unload`]. Not collective.
    ///
    /// # Errors
    /// A sample cannot be read.
    pub fn load(&mut self, source: &mut dyn Source<D>) -> Result<()> {
        let Lane { stage, slots, .. } = &mut self.lanes[0];
        let rows = source.rows(0);
        load(self.exchanger.device, stage, 0, rows, &mut slots[0].activations, source)?;
        self.is_loaded = true;
        Ok(())
    }

    /// From now on passes load their samples themselves. Not collective.
    pub fn unload(&mut self) {
        self.is_loaded = false;
    }

    /// Forward passes of as many micro-batches as a step has; the losses are in [`Weights::sums`] of the last stage. Collective
    /// over the grid.
    ///
    /// # Errors
    /// A sample cannot be read (this rank alone), or there is no memory for messages.
    pub fn evaluate(&mut self, weights: &mut Weights<D>, source: &mut dyn Source<D>) -> Result<()> {
        for at in 0..self.evaluation.instructions.len() {
            let instruction = self.evaluation.instructions[at];
            let rows = source.rows(instruction.action.micro_batch);
            if instruction.action.work == Work::Forward {
                self.forward(&instruction, &weights.parameters, rows, source)?;
                let Lane { stage, slots, sets, .. } = &mut self.lanes[instruction.lane];
                if stage.head.is_some() && rows > 0 {
                    let (activations, gradients) =
                        (&slots[instruction.slot].activations, &mut sets[0].gradients);
                    stage.loss(&mut self.exchanger, rows, 0.0, activations, gradients, &mut weights.sums);
                }
            } else {
                self.message(&instruction, rows)?;
            }
        }
        self.lanes.iter_mut().for_each(Lane::collect);
        Ok(())
    }

    /// Posts a receive or a send.
    fn message(&mut self, instruction: &Instruction, rows: usize) -> Result<()> {
        let (peer, tag) = instruction.message.expect("a checked schedule has both ends of a message");
        let Lane { stage, slots, sets, .. } = &mut self.lanes[instruction.lane];
        let (slot, set) = (&mut slots[instruction.slot], &mut sets[instruction.set]);
        let (input_width, output_width) = stage.ends();
        match instruction.action.work {
            Work::ReceiveActivation => {
                slot.collect();
                let buffer = slot.activations.input().take().expect("a free slot has its arrays");
                slot.input =
                    Some(self.channel.start_receive(Front { buffer, len: rows * input_width }, peer, tag)?);
            }
            Work::ReceiveGradient => {
                set.collect();
                let buffer = set.gradients.output().take().expect("a free set has its arrays");
                set.output = Some(self.channel.start_receive(
                    Front { buffer, len: rows * output_width },
                    peer,
                    tag,
                )?);
            }
            Work::SendActivation => {
                let buffer = slot.activations.output().take().expect("an output is sent once");
                slot.output =
                    Some(self.channel.start_send(Front { buffer, len: rows * output_width }, peer, tag)?);
            }
            _ => {
                let buffer = set.gradients.input().take().expect("a gradient is sent once");
                set.input =
                    Some(self.channel.start_send(Front { buffer, len: rows * input_width }, peer, tag)?);
            }
        }
        Ok(())
    }

    fn forward(
        &mut self,
        instruction: &Instruction,
        parameters: &FlatBuffer<D>,
        rows: usize,
        source: &mut dyn Source<D>,
    ) -> Result<()> {
        let device = self.exchanger.device;
        let slot = &mut self.lanes[instruction.lane].slots[instruction.slot];
        match (slot.input.take(), instruction.neighbour) {
            (Some(pending), _) => *slot.activations.input() = Some(pending.wait().buffer),
            (None, Some((lane, from))) => {
                slot.collect();
                let mut input = slot.activations.input().take();
                let Lane { stage, slots, .. } = &mut self.lanes[lane];
                let len = rows * stage.ends().1;
                let from = device.view(here(slots[from].activations.output()), 0..len);
                device.copy(from, device.view_mut(here_mut(&mut input), 0..len));
                *self.lanes[instruction.lane].slots[instruction.slot].activations.input() = input;
            }
            (None, None) => slot.collect(),
        }
        let _span =
            trace::work(Name::Forward).micro_batch(instruction.action.stage, instruction.action.micro_batch);
        let Lane { stage, slots, inner, .. } = &mut self.lanes[instruction.lane];
        let activations = &mut slots[instruction.slot].activations;
        if !self.is_loaded {
            load(device, stage, instruction.action.micro_batch, rows, activations, source)?;
        }
        if let Some(inner) = inner.last_mut() {
            activations.swap_inner(inner);
        }
        for at in 0..self.lanes[instruction.lane].stage.num_pieces() {
            let Lane { stage, slots, .. } = &mut self.lanes[instruction.lane];
            let activations = &mut slots[instruction.slot].activations;
            stage.forward_piece(&mut self.exchanger, parameters, at, rows, activations)?;
            Pipeline::progress(&mut self.lanes);
        }
        let Lane { slots, inner, .. } = &mut self.lanes[instruction.lane];
        if let Some(inner) = inner.last_mut() {
            slots[instruction.slot].activations.swap_inner(inner);
        }
        Ok(())
    }

    fn backward(
        &mut self,
        instruction: &Instruction,
        weights: &mut Weights<D>,
        rows: usize,
        scale: f32,
        pass: Pass,
    ) -> Result<()> {
        let name = match pass {
            Pass::Whole => Name::Backward,
            Pass::Inputs => Name::InputGradient,
            Pass::Weights => Name::WeightGradient,
        };
        if pass != Pass::Weights {
            self.take_output_gradient(instruction, rows);
        }
        let _span = trace::work(name).micro_batch(instruction.action.stage, instruction.action.micro_batch);
        if pass != Pass::Weights {
            self.begin_backward(instruction, weights, rows, scale)?;
        }
        let has = self.lanes[instruction.lane].has_gradients;
        let completes = instruction.completes && (has.weights || rows > 0);
        for at in (0..self.lanes[instruction.lane].stage.num_pieces()).rev() {
            let Lane { stage, slots, sets, .. } = &mut self.lanes[instruction.lane];
            let mut context = BackwardContext {
                exchanger: &mut self.exchanger,
                parameters: &weights.parameters,
                gradients: &mut weights.gradients,
                rows,
                accumulate: has,
            };
            let (slot, set) = (&slots[instruction.slot], &mut sets[instruction.set]);
            stage.backward_piece(&mut context, at, pass, &slot.activations, &mut set.gradients)?;
            if let Some(first) = stage.first_tensor(at).filter(|_| completes) {
                let Weights { parameters, gradients, sync, sums } = weights;
                sync.completed(self.exchanger.device, first, parameters, gradients, sums)?;
            }
            Pipeline::progress(&mut self.lanes);
        }
        let Lane { slots, inner, has_gradients, .. } = &mut self.lanes[instruction.lane];
        has_gradients.biases |= rows > 0 && pass != Pass::Weights;
        has_gradients.weights |= rows > 0 && pass != Pass::Inputs;
        if self.recompute && pass != Pass::Inputs {
            slots[instruction.slot].activations.swap_inner(&mut inner[instruction.set]);
        }
        Ok(())
    }

    /// Brings the gradient of the stage's output, if it comes from another stage, to where the backward pass begins, and what is
    /// still in a send back.
    fn take_output_gradient(&mut self, instruction: &Instruction, rows: usize) {
        let device = self.exchanger.device;
        let Lane { stage, slots, sets, .. } = &mut self.lanes[instruction.lane];
        let set = &mut sets[instruction.set];
        slots[instruction.slot].collect();
        if let Some(pending) = set.output.take() {
            *set.gradients.output() = Some(pending.wait().buffer);
            return;
        }
        set.collect();
        if let Some((lane, from)) = instruction.neighbour {
            let mut output = set.gradients.output().take();
            let len = rows * stage.ends().1;
            let from = device.view(here(self.lanes[lane].sets[from].gradients.input()), 0..len);
            device.copy(from, device.view_mut(here_mut(&mut output), 0..len));
            *self.lanes[instruction.lane].sets[instruction.set].gradients.output() = output;
        }
    }

    /// What comes before the first layer of a backward pass: the forward pass again, if it is to be recomputed, and the loss.
    fn begin_backward(
        &mut self,
        instruction: &Instruction,
        weights: &mut Weights<D>,
        rows: usize,
        scale: f32,
    ) -> Result<()> {
        let Lane { stage, slots, sets, inner, .. } = &mut self.lanes[instruction.lane];
        let (activations, gradients) =
            (&mut slots[instruction.slot].activations, &mut sets[instruction.set].gradients);
        if self.recompute {
            activations.swap_inner(&mut inner[instruction.set]);
            for at in 0..stage.num_pieces() {
                stage.forward_piece(&mut self.exchanger, &weights.parameters, at, rows, activations)?;
            }
        }
        if stage.head.is_some() && rows > 0 {
            stage.loss(&mut self.exchanger, rows, scale, activations, gradients, &mut weights.sums);
        }
        Ok(())
    }

    /// Lets MPI move messages, which it does inside MPI calls only: called between layers. One call that finds something
    /// unfinished has moved all.
    fn progress(lanes: &mut [Lane<D>]) {
        for lane in lanes {
            let slots = lane.slots.iter_mut().flat_map(|slot| [&mut slot.output, &mut slot.input]);
            let sets = lane.sets.iter_mut().flat_map(|set| [&mut set.output, &mut set.input]);
            for transfer in slots.chain(sets).flatten().filter(|transfer| !transfer.is_done()) {
                if !transfer.test() {
                    return;
                }
            }
        }
    }
}
