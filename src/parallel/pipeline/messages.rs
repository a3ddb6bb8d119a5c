//! The messages of a pipeline between passes.

use super::Pipeline;
use super::local_stage::LocalStage;
use super::program::{Instruction, MessageEnd, NeighbourArrays};
use crate::Result;
use crate::comm::Front;
use crate::device::Device;
use crate::parallel::schedule::Work;
use crate::parallel::tensor::exchange::{here, here_mut};

impl<D: Device> Pipeline<'_, D> {
    /// Posts a receive or a send.
    pub(super) fn message(&mut self, instruction: &Instruction, rows: usize) -> Result<()> {
        let MessageEnd { peer, tag } =
            instruction.message.expect("a checked schedule has both ends of a message");
        let LocalStage { stage, slots, sets, .. } = &mut self.stages[instruction.local];
        let (slot, set) = (&mut slots[instruction.slot], &mut sets[instruction.set]);
        let front = |buffer, width| Front { buffer, len: rows * width };
        match instruction.action.work {
            Work::ReceiveActivation => {
                slot.collect();
                let buffer = slot.activations.input().take().expect("a free slot has its arrays");
                slot.input =
                    Some(self.channel.start_receive(front(buffer, stage.input_width()), peer, tag)?);
            }
            Work::ReceiveGradient => {
                set.collect();
                let buffer = set.gradients.output().take().expect("a free set has its arrays");
                let buffer = front(buffer, stage.output_gradient_width());
                set.output = Some(self.channel.start_receive(buffer, peer, tag)?);
            }
            Work::SendActivation => {
                let buffer = slot.activations.output().take().expect("an output is sent once");
                slot.output =
                    Some(self.channel.start_send(front(buffer, stage.output_width()), peer, tag)?);
            }
            _ => {
                let buffer = set.gradients.input().take().expect("a gradient is sent once");
                let buffer = front(buffer, stage.input_gradient_width());
                set.input = Some(self.channel.start_send(buffer, peer, tag)?);
            }
        }
        Ok(())
    }

    /// Makes the stage's input, if another stage computes it, available to the forward pass, and takes arrays
    /// back from their sends.
    pub(super) fn take_input(&mut self, instruction: &Instruction, rows: usize) {
        let device = self.exchanger.device;
        let slot = &mut self.stages[instruction.local].slots[instruction.slot];
        if let Some(pending) = slot.input.take() {
            *slot.activations.input() = Some(pending.wait().buffer);
            return;
        }
        slot.collect();
        if let Some(NeighbourArrays { local, number: from }) = instruction.neighbour {
            let mut input = slot.activations.input().take();
            let LocalStage { stage, slots, .. } = &mut self.stages[local];
            let len = rows * stage.output_width();
            let from = device.view(here(slots[from].activations.output()), 0..len);
            device.copy(from, device.view_mut(here_mut(&mut input), 0..len));
            *self.stages[instruction.local].slots[instruction.slot].activations.input() = input;
        }
    }

    /// Makes the gradient of the stage's output, if another stage computes it, available to the
    /// backward pass, and takes arrays back from their sends.
    pub(super) fn take_output_gradient(&mut self, instruction: &Instruction, rows: usize) {
        let device = self.exchanger.device;
        let LocalStage { stage, slots, sets, .. } = &mut self.stages[instruction.local];
        let set = &mut sets[instruction.set];
        slots[instruction.slot].collect();
        if let Some(pending) = set.output.take() {
            *set.gradients.output() = Some(pending.wait().buffer);
            return;
        }
        set.collect();
        if let Some(NeighbourArrays { local, number: from }) = instruction.neighbour {
            let mut output = set.gradients.output().take();
            let len = rows * stage.output_gradient_width();
            let from = device.view(here(self.stages[local].sets[from].gradients.input()), 0..len);
            device.copy(from, device.view_mut(here_mut(&mut output), 0..len));
            *self.stages[instruction.local].sets[instruction.set].gradients.output() = output;
        }
    }

    /// Lets MPI and the engine make progress, which they do only inside calls: called between
    /// layers. One test of an unfinished operation advances all operations.
    pub(super) fn progress(&mut self) {
        for local in &mut self.stages {
            let slots = local.slots.iter_mut().flat_map(|slot| [&mut slot.output, &mut slot.input]);
            let sets = local.sets.iter_mut().flat_map(|set| [&mut set.output, &mut set.input]);
            for pending in slots.chain(sets).flatten().filter(|pending| !pending.is_done()) {
                if !pending.test() {
                    return;
                }
            }
        }
    }
}
