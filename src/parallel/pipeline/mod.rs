//! Pipeline parallelism: the stages of a rank, run in the order of a schedule, with messages to the ranks of the stages before
//! and after.
//!
//! The way of a micro-batch through a stage: a receive is posted into the input of a free slot; the forward pass waits for it and
//! fills the slot; the output leaves in a send that owns it. On the way back a receive is posted into the last array of a free
//! set of gradients, the backward pass waits for it, fills the set and adds to the gradients of the parameters, and the first
//! array of the set leaves in a send. An array comes back from its send when it is wanted next. Nothing else blocks.
//!
//! Invariants: a slot or a set serves one micro-batch at a time ([`program`]); the messages of a step are named by direction,
//! stage and micro-batch; every rank adds the micro-batches up in the order of its schedule, so a schedule that keeps that order
//! gives the bits of a single stage.

mod lane;
pub mod program;

use self::lane::Lane;
use self::program::{Instruction, Program};
use super::data::GradSync;
use super::layout::Layout;
use super::schedule::{Schedule, Work};
use super::stage::{BackwardContext, Pass, Stage};
use super::tensor::exchange::{Exchanger, here, here_mut};
use crate::comm::{Buffer, Communicator, Front, Grid};
use crate::device::Device;
use crate::nn::FlatBuffer;
use crate::observe::{self, Name};
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

/// Where the rows of micro-batches come from.
pub trait Source {
    /// The number of rows of micro-batch `micro_batch`.
    fn rows(&self, micro_batch: usize) -> usize;

    /// Writes the inputs and targets of these rows; either is left out where it is empty.
    ///
    /// # Errors
    /// They cannot be read.
    fn read(&mut self, micro_batch: usize, inputs: &mut [f32], targets: &mut [f32]) -> Result<()>;
}

/// The communicators of a [`Pipeline`], made before anything that can fail on one rank alone.
pub struct PipelineChannels {
    stage: Communicator,
    tensor: Communicator,
}

impl PipelineChannels {
    /// For the stage and tensor axes of `grid`. Collective over the grid.
    ///
    /// # Errors
    /// None at present.
    pub fn new(grid: &Grid) -> Result<PipelineChannels> {
        let twin = |of: &Communicator| of.split(0, of.rank());
        Ok(PipelineChannels { stage: twin(&grid.stage)?, tensor: twin(&grid.tensor)? })
    }
}

/// A rank's stages at work.
pub struct Pipeline<'a, D: Device> {
    exchanger: Exchanger<'a, D>,
    channel: Communicator,
    schedule: Schedule,
    training: Program,
    evaluation: Program,
    lanes: Vec<Lane<D>>,
    recompute: bool,
}

impl<'a, D: Device<Buffer: Buffer<f32>>> Pipeline<'a, D> {
    /// The stages of `layout` in the order of `schedule`, which has been checked, for micro-batches of at most `rows` rows. With
    /// `recompute` a slot keeps only what comes into the stage and what leaves it, and the backward pass begins with another
    /// forward pass (Chen et al., "Training deep nets with sublinear memory cost", 2016). Not collective.
    ///
    /// # Errors
    /// The device has not enough memory.
    pub fn new(
        device: &'a D,
        channels: PipelineChannels,
        layout: &Layout,
        schedule: &Schedule,
        rows: usize,
        recompute: bool,
    ) -> Result<Pipeline<'a, D>> {
        let PipelineChannels { stage: channel, tensor } = channels;
        if schedule.num_stages.saturating_mul(schedule.num_micro_batches) > 1 << 24 {
            let why = format!("{} stages and {} micro-batches", schedule.num_stages, schedule.num_micro_batches);
            return Err(Error::input("numbering the messages of a step", why));
        }
        let widest = layout.stages.iter().map(Stage::widest_exchange).max().unwrap_or_default();
        let exchanger = match tensor.size() {
            1 => Exchanger::alone(device)?,
            _ => Exchanger::new(device, tensor, rows, widest)?,
        };
        let training = Program::new(schedule, channel.rank());
        let evaluation = Program::new(&schedule.forward_only(), channel.rank());
        let mut lanes = Vec::new();
        for (lane, stage) in layout.stages.iter().enumerate() {
            let num_slots = training.num_slots[lane].max(evaluation.num_slots[lane]);
            lanes.push(Lane::new(&exchanger, stage, num_slots, training.num_sets[lane].max(1), rows, recompute)?);
        }
        Ok(Pipeline { exchanger, channel, schedule: schedule.clone(), training, evaluation, lanes, recompute })
    }

    /// The number of micro-batches of a step.
    pub fn num_micro_batches(&self) -> usize {
        self.schedule.num_micro_batches
    }

    /// Forward and backward passes of all micro-batches of a step: the gradients of the loss, times `scale`, of this rank's
    /// parameters, handed to [`Weights::sync`] as they are complete; the losses are in [`Weights::sums`] of the last stage.
    /// Collective over the grid.
    ///
    /// # Errors
    /// A sample cannot be read (this rank alone), or there is no memory for messages.
    pub fn train(&mut self, weights: &mut Weights<D>, source: &mut dyn Source, scale: f32) -> Result<()> {
        for lane in &mut self.lanes {
            lane.has_gradients = [false; 2];
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
            if !lane.has_gradients[1] {
                for tensor in lane.stage.tensors.clone() {
                    self.exchanger.device.fill(weights.gradients.tensor_mut(self.exchanger.device, tensor), 0.0);
                }
            }
        }
        Ok(())
    }

    /// Forward passes of as many micro-batches as a step has; the losses are in [`Weights::sums`] of the last stage. Collective
    /// over the grid.
    ///
    /// # Errors
    /// A sample cannot be read (this rank alone), or there is no memory for messages.
    pub fn evaluate(&mut self, weights: &mut Weights<D>, source: &mut dyn Source) -> Result<()> {
        for at in 0..self.evaluation.instructions.len() {
            let instruction = self.evaluation.instructions[at];
            let rows = source.rows(instruction.action.micro_batch);
            if instruction.action.work == Work::Forward {
                self.forward(&instruction, &weights.parameters, rows, source)?;
                let Lane { stage, slots, sets, .. } = &mut self.lanes[instruction.lane];
                if stage.head.is_some() && rows > 0 {
                    let (activations, gradients) = (&slots[instruction.slot].activations, &mut sets[0].gradients);
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
        let action = instruction.action;
        let partner = action.partner().expect("a checked schedule has both ends of a message");
        let peer = self.schedule.rank_of(partner.stage).expect("a checked schedule runs every stage");
        let Lane { stage, slots, sets, .. } = &mut self.lanes[instruction.lane];
        let (slot, set) = (&mut slots[instruction.slot], &mut sets[instruction.set]);
        let (input_width, output_width) = stage.ends();
        // of the two ends of a message, the sender's stage names it
        let sender = match action.work {
            Work::ReceiveActivation | Work::ReceiveGradient => partner,
            _ => action,
        };
        let direction = usize::from(matches!(action.work, Work::SendGradient | Work::ReceiveGradient));
        let number = (direction * self.schedule.num_stages + sender.stage) * self.schedule.num_micro_batches;
        let tag = (number + action.micro_batch) as i32;
        match action.work {
            Work::ReceiveActivation => {
                slot.collect();
                let buffer = slot.activations.input().take().expect("a free slot has its arrays");
                slot.input = Some(self.channel.start_receive(buffer, peer, tag)?);
            }
            Work::ReceiveGradient => {
                set.collect();
                let buffer = set.gradients.output().take().expect("a free set has its arrays");
                set.output = Some(self.channel.start_receive(buffer, peer, tag)?);
            }
            Work::SendActivation => {
                let buffer = slot.activations.output().take().expect("an output is sent once");
                let front = Front { buffer, len: rows * output_width };
                slot.output = Some(self.channel.start_send(front, peer, tag)?);
            }
            _ => {
                let buffer = set.gradients.input().take().expect("a gradient is sent once");
                let front = Front { buffer, len: rows * input_width };
                set.input = Some(self.channel.start_send(front, peer, tag)?);
            }
        }
        Ok(())
    }

    fn forward(
        &mut self,
        instruction: &Instruction,
        parameters: &FlatBuffer<D>,
        rows: usize,
        source: &mut dyn Source,
    ) -> Result<()> {
        let device = self.exchanger.device;
        let slot = &mut self.lanes[instruction.lane].slots[instruction.slot];
        match (slot.input.take(), instruction.neighbour) {
            (Some(pending), _) => *slot.activations.input() = Some(pending.wait()),
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
        let Lane { stage, slots, inner, .. } = &mut self.lanes[instruction.lane];
        let activations = &mut slots[instruction.slot].activations;
        let inputs = if stage.index == 0 { rows * stage.ends().0 } else { 0 };
        let targets = stage.head.as_ref().map_or(0, |head| rows * head.targets_per_row());
        if inputs + targets > 0 {
            let (input, target_array) = activations.samples();
            device.write(device.view_mut(here_mut(input), 0..inputs), &mut |inputs| {
                let targets = device.view_mut(target_array, 0..targets);
                device.write(targets, &mut |targets| source.read(instruction.action.micro_batch, inputs, targets))
            })?;
        }
        if let Some(inner) = inner.last_mut() {
            activations.swap_inner(inner);
        }
        let span = observe::work(Name::Forward).micro_batch(stage.index, instruction.action.micro_batch);
        stage.forward(&mut self.exchanger, parameters, rows, activations)?;
        drop(span);
        if let Some(inner) = inner.last_mut() {
            activations.swap_inner(inner);
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
        if pass != Pass::Weights {
            self.take_output_gradient(instruction, weights, rows, scale)?;
        }
        let Lane { stage, slots, sets, inner, has_gradients } = &mut self.lanes[instruction.lane];
        let (activations, set) = (&mut slots[instruction.slot].activations, &mut sets[instruction.set]);
        let name = match pass {
            Pass::Whole => Name::Backward,
            Pass::Inputs => Name::InputGradient,
            Pass::Weights => Name::WeightGradient,
        };
        let _span = observe::work(name).micro_batch(stage.index, instruction.action.micro_batch);
        let mut has = *has_gradients;
        for at in (0..stage.num_pieces()).rev() {
            let mut context = BackwardContext {
                exchanger: &mut self.exchanger,
                parameters: &weights.parameters,
                gradients: &mut weights.gradients,
                rows,
                accumulate: *has_gradients,
            };
            stage.backward_piece(&mut context, at, pass, activations, &mut set.gradients)?;
            if let (true, Some(first)) = (instruction.completes, stage.first_tensor(at)) {
                let Weights { parameters, gradients, sync, sums } = weights;
                if has[1] || rows > 0 {
                    sync.completed(self.exchanger.device, first, parameters, gradients, sums)?;
                }
            }
        }
        has[0] |= rows > 0 && pass != Pass::Weights;
        has[1] |= rows > 0 && pass != Pass::Inputs;
        *has_gradients = has;
        if self.recompute && pass != Pass::Inputs {
            activations.swap_inner(&mut inner[instruction.set]);
        }
        Ok(())
    }

    /// Brings the gradient of the stage's output to where the backward pass begins, and what it reads back.
    fn take_output_gradient(
        &mut self,
        instruction: &Instruction,
        weights: &mut Weights<D>,
        rows: usize,
        scale: f32,
    ) -> Result<()> {
        let device = self.exchanger.device;
        let Lane { stage, slots, sets, inner, .. } = &mut self.lanes[instruction.lane];
        let (slot, set) = (&mut slots[instruction.slot], &mut sets[instruction.set]);
        slot.collect();
        if self.recompute {
            slot.activations.swap_inner(&mut inner[instruction.set]);
            stage.forward(&mut self.exchanger, &weights.parameters, rows, &mut slot.activations)?;
        }
        match (set.output.take(), instruction.neighbour) {
            (Some(pending), _) => *set.gradients.output() = Some(pending.wait()),
            (None, Some((lane, from))) => {
                set.collect();
                let mut output = set.gradients.output().take();
                let len = rows * stage.ends().1;
                let from = device.view(here(self.lanes[lane].sets[from].gradients.input()), 0..len);
                device.copy(from, device.view_mut(here_mut(&mut output), 0..len));
                *self.lanes[instruction.lane].sets[instruction.set].gradients.output() = output;
            }
            (None, None) => {
                set.collect();
                if rows > 0 {
                    let (activations, gradients) = (&slot.activations, &mut set.gradients);
                    stage.loss(&mut self.exchanger, rows, scale, activations, gradients, &mut weights.sums);
                }
            }
        }
        Ok(())
    }
}
