//! The passes that compute the gradients of weights of one or several micro-batches.

use smallvec::SmallVec;

use super::Pipeline;
use super::local_stage::{GradientSet, LocalStage};
use super::program::{Instruction, MOST_JOINED};
use crate::Result;
use crate::device::Device;
use crate::parallel::data::Weights;
use crate::parallel::schedule::Action;
use crate::parallel::stage::{Activations, WeightRows};
use crate::parallel::tensor::exchange::Exchanger;
use crate::sums::Section;
use crate::trace::{self, Name};

/// Some rows of a micro-batch, with its arrays.
#[derive(Clone, Copy)]
struct RowRange {
    slot: usize,
    set: usize,
    first_row: usize,
    section: Section,
}

type RowRanges = SmallVec<[RowRange; MOST_JOINED]>;

impl RowRange {
    /// Returns all rows of a micro-batch.
    fn all((instruction, section): &(Instruction, Section)) -> RowRange {
        let Instruction { slot, set, .. } = *instruction;
        RowRange { slot, set, first_row: 0, section: *section }
    }
}

impl<D: Device> Pipeline<'_, D> {
    /// Computes the gradients of weights of the joined micro-batches, which are of one stage.
    pub(super) fn weight_gradients(&mut self, weights: &mut Weights<D>) -> Result<()> {
        let Some((last, _)) = self.joined.last().copied() else { return Ok(()) };
        let Action { stage, micro_batch, .. } = last.action;
        let _span = trace::work(Name::WeightGradient).micro_batch(stage, micro_batch);
        for group in (0..self.stages[last.local].groups.len()).rev() {
            self.weight_group(weights, group)?;
            for (instruction, _) in &self.joined {
                let stage = &mut self.stages[instruction.local];
                if stage.recomputes() {
                    stage.give_back_inner(instruction, group);
                }
            }
        }
        Ok(())
    }

    /// Computes the gradients of weights of the joined micro-batches, for the pieces of a group. In a
    /// recorded step the audited leaf is added on its own first, with the same bits.
    pub(super) fn weight_group(&mut self, weights: &mut Weights<D>, group: usize) -> Result<()> {
        let Some((last, _)) = self.joined.last().copied() else { return Ok(()) };
        let (device, micro_batch) = (self.exchanger.device, last.action.micro_batch);
        let (leaf, rest) = self.leaf_and_rest();
        for at in self.stages[last.local].groups[group].pieces.clone().rev() {
            let local = &mut self.stages[last.local];
            let own = local.stage.tensors_of(at);
            if own.is_empty() || !weights.division().has_rows(micro_batch) {
                continue;
            }
            weights.open(device, &own)?;
            for rows in [&leaf, &rest].into_iter().filter(|rows| !rows.is_empty()) {
                let local = &mut self.stages[last.local];
                local.add_weight_gradients(&mut self.exchanger, weights, at, rows)?;
                if rows.last().is_some_and(|last| last.section.is_complete()) && std::ptr::eq(rows, &leaf) {
                    self.record_weight_gradients(weights, last.local, at)?;
                }
            }
            let end = self.stages[last.local].stage.tensors.end;
            weights.completed(device, &(own.start..end), micro_batch, last.completes)?;
            self.progress();
        }
        Ok(())
    }

    /// Returns the rows of the joined micro-batches: in a recorded step those of the audited leaf, and
    /// the others.
    fn leaf_and_rest(&self) -> (RowRanges, RowRanges) {
        let Some(recorder) = &self.recorder else {
            return (RowRanges::new(), self.joined.iter().map(RowRange::all).collect());
        };
        let (mut leaf, mut rest) = (RowRanges::new(), RowRanges::new());
        for joined @ (instruction, section) in &self.joined {
            let all = RowRange::all(joined);
            match recorder.in_leaf(instruction.action.micro_batch) {
                None => rest.push(all),
                Some(in_leaf) => {
                    leaf.push(RowRange { section: in_leaf, ..all });
                    let first_row = in_leaf.len();
                    rest.extend(section.after_first_leaf().map(|section| RowRange {
                        first_row,
                        section,
                        ..all
                    }));
                }
            }
        }
        (leaf, rest)
    }
}

impl<D: Device> LocalStage<D> {
    /// Adds the gradients of the parameters of piece `at` for some rows.
    fn add_weight_gradients(
        &mut self,
        exchanger: &mut Exchanger<'_, D>,
        weights: &mut Weights<D>,
        at: usize,
        rows: &[RowRange],
    ) -> Result<()> {
        let LocalStage { stage, slots, sets, .. } = self;
        let mut in_slots: SmallVec<[Option<&mut Activations<D>>; MOST_JOINED]> =
            rows.iter().map(|_| None).collect();
        for (number, slot) in slots.iter_mut().enumerate() {
            if let Some(place) = rows.iter().position(|rows| rows.slot == number) {
                in_slots[place] = Some(&mut slot.activations);
            }
        }
        let mut found: SmallVec<[Option<WeightRows<'_, D>>; MOST_JOINED]> =
            rows.iter().map(|_| None).collect();
        for (number, set) in sets.iter_mut().enumerate() {
            if let Some(place) = rows.iter().position(|rows| rows.set == number) {
                if stage.shares_input_gradient(at) {
                    // the piece works in place, and the array may be on its way to the previous stage
                    set.collect();
                }
                let GradientSet { gradients, .. } = set;
                let RowRange { first_row, section, .. } = rows[place];
                let activations = in_slots[place].take();
                found[place] =
                    activations.map(|activations| WeightRows { activations, gradients, first_row, section });
            }
        }
        let mut found: SmallVec<[WeightRows<'_, D>; MOST_JOINED]> = found.into_iter().flatten().collect();
        let (_, gradients) = weights.parameters_and_gradients();
        stage.weights_piece(exchanger, gradients, at, &mut found)
    }
}
