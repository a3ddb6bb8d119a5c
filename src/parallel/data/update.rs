//! The update of a bucket's parameters, the gradients of tied tensors, and the norm of all gradients.

use std::ops::Range;

use super::ties::OtherUse;
use super::{UpdateRun, Weights};
use crate::Result;
use crate::comm::{Front, Operation};
use crate::device::{Device, clip_factor, totals};
use crate::parallel::settle;
use crate::parallel::zero::ZeroStage;
use crate::sums::ExactSum;
use crate::trace::{self, Name};

/// The tag of messages with gradients of tied tensors.
const TIE_TAG: i32 = 0;

impl<D: Device> Weights<D> {
    /// Returns the elements of a bucket that this rank updates.
    pub(super) fn updated(&self, segment: usize) -> Range<usize> {
        match self.stage {
            ZeroStage::None => 0..self.gradients.flat().segment_len(segment),
            _ => self.partition.owned(segment),
        }
    }

    /// Updates this rank's elements of a bucket, and starts to distribute them.
    pub(super) fn update_bucket(&mut self, device: &D, segment: usize) -> Result<()> {
        self.watch_gradient(device, segment)?;
        let range = self.updated(segment);
        if segment == 0 {
            // no pass is left that the first layers' update could run beside
            device.join_steps();
        }
        let span = trace::work(Name::Optimizer);
        for UpdateRun { elements, decays, counts } in self.runs.within(segment, range.clone()) {
            let values = self.parameters.updatable(device, segment, elements.clone());
            let gradient = self.gradients.view(device, segment, elements.clone());
            let sums = if counts { &mut self.sums } else { &mut self.uncounted };
            let sums = device.view_mut(sums, 0..totals::LEN);
            let own = elements.start - range.start..elements.end - range.start;
            self.optimizer.step(device, segment, own, decays, values, gradient, sums);
        }
        settle(device);
        drop(span);
        self.gradients.close(segment);
        self.watch_update(device, segment)?;
        self.parameters.updated(segment)
    }

    /// Updates all parameters with gradients that are scaled to a norm of at most `largest`. A single rank
    /// leaves the factor on its device, so that the step can be recorded. Collective over the grid.
    pub(super) fn clip(&mut self, device: &D, largest: f64) -> Result<()> {
        let len = self.sum_squares(device);
        if self.norms.size() == 1 {
            self.optimizer.clip(device, device.view(&self.squares, 0..len), largest);
        } else {
            self.update.gradient_scale = clip_factor(self.norm(device, len)?, largest);
            self.optimizer.begin(device, &self.update)?;
        }
        (0..self.buckets.len()).rev().try_for_each(|segment| self.update_bucket(device, segment))
    }

    /// Sums the squares of this rank's part of each tensor of the gradient, every logical parameter counted
    /// once in the grid, and returns the length of the sums.
    fn sum_squares(&mut self, device: &D) -> usize {
        let each = device.squares_len();
        let len = each * self.gradients.flat().num_tensors();
        device.fill(device.view_mut(&mut self.squares, 0..len), 0.0);
        for segment in 0..self.buckets.len() {
            let start = self.partition.owned(segment).start;
            for (tensor, place) in self.gradients.flat().tensors_in(segment) {
                let kept = self.partition.of_tensor(segment, &place).kept;
                if self.counts[tensor] && !kept.is_empty() {
                    let own = self.gradients.view(device, segment, start + kept.start..start + kept.end);
                    let squares = device.view_mut(&mut self.squares, each * tensor..each * (tensor + 1));
                    device.sum_squares(own, squares);
                }
            }
        }
        len
    }

    /// Returns the norm of the whole gradient, from the squares of all ranks' parts. Its bits do not
    /// depend on the stages of the tensors, and, on the CPU, where squares are summed exactly, not on
    /// the ranks that tensors are divided among. Every replica sums its part, whatever the stage of
    /// ZeRO. Collective over the grid.
    fn norm(&mut self, device: &D, len: usize) -> Result<f64> {
        let mut sum = ExactSum::default();
        device.read(device.view(&self.squares, 0..len), &mut |squares| {
            let each = squares.chunks_exact(device.squares_len());
            each.for_each(|squares| sum += device.exact_squares(squares));
            Ok(())
        })?;
        self.norms.all_reduce(sum.words_mut(), Operation::Sum)?;
        Ok(sum.value().sqrt())
    }

    /// Returns true if the squares that this rank's optimizer sums count towards the norm: in stage
    /// 0 every rank sums all of them, and only one may count.
    pub fn counts_squares(&self) -> bool {
        self.stage != ZeroStage::None || self.reductions.is_root()
    }

    /// Returns true if the update of a bucket waits for the gradients of another use.
    pub(super) fn is_tied(&self, segment: usize) -> bool {
        self.ties.iter().any(|tie| tie.segments().any(|own| own == segment))
    }

    /// Updates the buckets that waited for the gradients of another use.
    pub(super) fn update_tied_buckets(&mut self, device: &D) -> Result<()> {
        for segment in (0..self.buckets.len()).rev() {
            if self.is_tied(segment) {
                self.update_bucket(device, segment)?;
            }
        }
        Ok(())
    }

    /// Adds the gradients of both uses of tied tensors, which have been reduced. Collective over the ranks
    /// that share them.
    ///
    /// # Errors
    /// There is no memory for messages.
    pub(super) fn add_tied_gradients(&mut self, device: &D) -> Result<()> {
        for number in 0..self.ties.len() {
            let segment = self.ties[number].segment;
            let range = self.updated(segment);
            let len = range.len();
            match &mut self.ties[number].other {
                OtherUse::Here(other) => self.gradients.add_both(device, [segment, *other], range),
                OtherUse::Peer { rank, messages } => {
                    let peer = *rank;
                    let [mut sent, mut received] =
                        messages.each_mut().map(|message| message.take().expect("messages are here"));
                    let own = self.gradients.view(device, segment, range.clone());
                    device.copy(own, device.view_mut(&mut sent, 0..len));
                    let receive = self.tied.start_receive(Front { buffer: received, len }, peer, TIE_TAG)?;
                    let send = self.tied.start_send(Front { buffer: sent, len }, peer, TIE_TAG)?;
                    received = receive.wait().buffer;
                    sent = send.wait().buffer;
                    let into = self.gradients.view_mut(device, segment, range);
                    device.add(device.view(&received, 0..len), into);
                    let OtherUse::Peer { messages, .. } = &mut self.ties[number].other else { continue };
                    *messages = [Some(sent), Some(received)];
                }
            }
        }
        Ok(())
    }
}
