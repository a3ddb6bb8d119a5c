//! The steps of an audit: before and after the step that is audited.

use super::auditor::{Auditor, OpenAudit};
use super::exchange::{AFTER, BEFORE, LENGTH, RECORD};
use super::finding::Finding;
use super::job::Part;
use super::replay::{AuditedBatch, LoadRows, PartParameters};
use super::witness::AuditedBlock;
use crate::Result;
use crate::device::Device;
use crate::nn::FlatBuffer;
use crate::parallel::data::Weights;
use crate::parallel::layout::Layout;
use crate::parallel::pipeline::Pipeline;
use crate::parallel::watch::{BitFold, BlockWatch, FaultKind, FoldRecord, Recorder, Site};

impl<D: Device> Auditor<'_, D> {
    /// Prepares a step, from 1, with the samples of `batch` for its audit: see [`super`]. `load` loads rows
    /// of the batch. Collective.
    ///
    /// # Errors
    /// A sample cannot be read, or there is no memory.
    pub fn before(
        &mut self,
        step: u64,
        weights: &mut Weights<D>,
        pipeline: &mut Pipeline<'_, D>,
        batch: AuditedBatch,
        load: &mut LoadRows<'_, D>,
    ) -> Result<()> {
        let (rank, role, device) = (self.rank(), self.role(), self.job.device);
        let fault = self.settings.fault.filter(|fault| fault.happens(step, rank));
        if !self.roles.are_replicas() && !self.roles.are_own() {
            self.exchange_parameters(weights)?;
        }
        let of_kind = |kind| fault.filter(|fault| fault.kind == kind).map(|fault| fault.choice);
        let is_in_weight = match of_kind(FaultKind::Weight) {
            Some(choice) => weights.flip_parameter(device, choice)?,
            None => false,
        };
        let (segment, own_block) = self.block(step, &self.own, self.replica_of(rank));
        let (_, block) = self.block(step, &self.played, self.replica_of(role));
        let num_arrays = 1 + weights.slot_names().len();
        let before =
            self.exchange(weights.block(device, segment, &own_block)?, num_arrays * block.len(), BEFORE)?;
        let mut parameters = FoldRecord::default();
        if self.roles.are_replicas() && !weights.has_parameters_in_parts() {
            parameters = fold_parameters(device, weights.parameters(), &self.own)?;
            if let Some(copy) = &mut self.copy {
                for segment in 0..copy.num_segments() {
                    let len = copy.segment_len(segment);
                    let from = device.view(weights.parameters().segment(segment), 0..len);
                    device.copy(from, device.view_mut(copy.segment_mut(segment), 0..len));
                }
            }
        }
        let sections = self.job.leaf(batch.len, self.replica_of(role));
        let source = match &self.copy {
            Some(copy) if !self.roles.are_replicas() => PartParameters::Copy(copy),
            _ => PartParameters::Own(weights),
        };
        let mut expected = self.replay.run(source, &sections, load, batch)?;
        expected.extend(&parameters);
        let site = fault.and_then(|fault| fault.site(&self.own.layout.stages, &self.own.numbers()));
        // such a fault may lie in the leaf or in the block, as its choice says
        let is_in_block = fault.is_some_and(|fault| {
            fault.kind == FaultKind::Update
                || self.job.grid.shape.data > 1
                    && matches!(fault.kind, FaultKind::Gradient | FaultKind::Message)
                    && (site.is_none() || fault.choice.is_multiple_of(2))
        });
        let in_leaf = site.filter(|_| !is_in_block).zip(fault.map(|fault| fault.choice));
        let received_fault = of_kind(FaultKind::Received);
        if fault.is_some() && !is_in_weight && !is_in_block && in_leaf.is_none() && received_fault.is_none() {
            warn_of_no_fault(rank, step);
        }
        let own_sections = self.job.division.sections(batch.len, self.replica_of(rank));
        let mut recorder = Recorder::new(self.own.numbers(), own_sections, in_leaf);
        recorder.record = parameters.clone();
        pipeline.start_recording(recorder);
        let blocks =
            (0..self.job.grid.shape.data).map(|replica| self.block(step, &self.own, replica).1).collect();
        let in_block = fault.filter(|_| is_in_block).map(|fault| (fault.kind, fault.choice));
        weights.watch(BlockWatch { segment, blocks, fault: in_block, ..BlockWatch::default() });
        self.open = Some(OpenAudit { expected, parameters, before, batch, received_fault });
        Ok(())
    }

    /// Ends the audit of a step, and describes the fault that was found, if there was one, in the same
    /// words on every rank. Collective.
    ///
    /// # Errors
    /// A sample cannot be read, or there is no memory.
    pub fn after(
        &mut self,
        step: u64,
        weights: &mut Weights<D>,
        pipeline: &mut Pipeline<'_, D>,
        load: &mut LoadRows<'_, D>,
    ) -> Result<Option<String>> {
        let Some(mut open) = self.open.take() else { return Ok(None) };
        let (rank, role, device) = (self.rank(), self.role(), self.job.device);
        let (segment, own_block) = self.block(step, &self.own, self.replica_of(rank));
        let (played_segment, block) = self.block(step, &self.played, self.replica_of(role));
        let recorder = pipeline.stop_recording();
        let mut watch = weights.unwatch();
        let has_fault = recorder.as_ref().is_some_and(Recorder::has_fault) || watch.fault.is_some();
        let own_record = recorder.map(|recorder| recorder.record).unwrap_or_default();
        let message = own_record.to_message();
        let num_words = self.exchange(vec![message.len() as i64], 1, LENGTH)?[0] as usize;
        let found = FoldRecord::from_message(&self.exchange(message, num_words, RECORD)?);
        let mut own = std::mem::take(&mut watch.sums);
        own.extend(weights.block(device, segment, &own_block)?);
        let (micro_batches, terms) = self.exchange_terms(watch, block.len())?;
        let before = open.before.clone();
        let blocks =
            AuditedBlock { segment: played_segment, elements: block.clone(), micro_batches, terms, before };
        let repeated = self.repeat(weights, &self.played, &blocks)?;
        let done = self.exchange(own, repeated.len(), AFTER)?;
        let is_whole = self.roles.are_replicas() && !weights.has_parameters_in_parts();
        let sums_len = repeated.len() - open.before.len();
        let updated = sums_len..sums_len + block.len();
        let received = match is_whole && !block.is_empty() {
            true => {
                if let Some(choice) = open.received_fault.take() {
                    weights.flip_received(device, played_segment, block.clone(), choice)?;
                }
                weights.parameter_block(device, played_segment, &block)?
            }
            false => repeated[updated.clone()].to_vec(),
        };
        if has_fault || open.received_fault.is_some() {
            warn_of_no_fault(rank, step);
        }
        let in_leaf = found.first_difference(&open.expected).map(|site| {
            let folds = [&found, &open.expected].map(|record| record.get(site).unwrap_or_default());
            (site, folds[0].num_different_bits(&folds[1]))
        });
        let differs = |values: &[f32], expected: &[f32], site: fn(usize) -> Site| {
            let (at, bits) = difference(values, expected, block.len())?;
            let tensor = self.played.tensor_at(played_segment, block.start + at);
            Some((site(tensor), bits))
        };
        let (sums, update) = (..sums_len, sums_len..);
        let in_sum = || differs(&done[sums], &repeated[sums], |tensor| Site::GradientSum { tensor });
        let in_update =
            || differs(&done[update.clone()], &repeated[update.clone()], |tensor| Site::Update { tensor });
        let in_message =
            || differs(&received, &repeated[updated.clone()], |tensor| Site::Received { tensor });
        let own = in_leaf.or_else(in_sum).or_else(in_update).or_else(in_message);
        let finding = Finding::first(&self.job.grid.all, role, own)?;
        let Some(finding) = finding else {
            self.last_clean = Some(step);
            return Ok(None);
        };
        let witness = match finding.site {
            Site::Received { .. } => None,
            Site::GradientSum { .. } | Site::Update { .. } => {
                self.witness_of_update(step, finding, weights, &blocks, [&done, &repeated])?
            }
            _ => self.witness_of_leaf(finding, &found, &open, load)?,
        };
        let layout = Layout::new(self.job.model, self.job.grid.shape, finding.audited, &self.job.plan)?;
        Ok(Some(finding.describe(step, self.last_clean, &layout, self.job.model, witness)))
    }
}

fn warn_of_no_fault(rank: usize, step: u64) {
    log::warn!("--inject-fault has not happened: rank {rank} has no such array in step {step}");
}

/// Returns the checksums of the tensors of `part`, which lie in `parameters`.
fn fold_parameters<D: Device>(device: &D, parameters: &FlatBuffer<D>, part: &Part) -> Result<FoldRecord> {
    let mut record = FoldRecord::default();
    for (local, tensor) in part.numbers().into_iter().enumerate() {
        device.read(parameters.tensor(device, local), &mut |values| {
            record.add(Site::Parameter { tensor }, BitFold::of(values));
            Ok(())
        })?;
    }
    Ok(record)
}

/// Compares arrays of `len` elements, one behind the other. Returns the first element of an array that
/// differs from that of `others`, and the number of bits that differ in that array.
fn difference(values: &[f32], others: &[f32], len: usize) -> Option<(usize, u32)> {
    let num_bits = |(one, two): (&f32, &f32)| (one.to_bits() ^ two.to_bits()).count_ones();
    let arrays = values.chunks(len.max(1)).zip(others.chunks(len.max(1)));
    arrays.into_iter().find_map(|(values, others)| {
        let at = values.iter().zip(others).position(|pair| num_bits(pair) > 0)?;
        Some((at, values.iter().zip(others).map(num_bits).sum()))
    })
}

#[cfg(test)]
mod tests {
    use super::difference;

    #[test]
    fn bits_are_counted_in_the_first_array_that_differs() {
        let values = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        let flipped = |value: f32, bits: u32| f32::from_bits(value.to_bits() ^ bits);
        assert_eq!(difference(&values, &values, 2), None);
        let mut others = values;
        (others[3], others[4]) = (flipped(4.0, 0b101), flipped(5.0, 1));
        assert_eq!(difference(&values, &others, 2), Some((1, 2)));
    }
}
