//! The third rank, which says whose bits it has where two ranks differ.

use std::ops::Range;

use super::auditor::{Auditor, OpenAudit};
use super::exchange::{ReplicaTerms, WITNESS};
use super::finding::Finding;
use super::job::Part;
use super::replay::{LoadRows, PartParameters};
use super::update;
use crate::Result;
use crate::device::Device;
use crate::nn::FlatBuffer;
use crate::parallel::data::Weights;
use crate::parallel::watch::{BitFold, FoldRecord, Site};

/// A third rank, and the one of the two whose bits it has.
pub(super) type Verdict = Option<(usize, Option<usize>)>;

/// The audited block of an update, as it was before.
pub(super) struct AuditedBlock {
    pub(super) segment: usize,
    /// The elements of the segment.
    pub(super) elements: Range<usize>,
    /// The micro-batches after which the gradients of the segment were reduced.
    pub(super) micro_batches: Vec<usize>,
    pub(super) terms: ReplicaTerms,
    /// The parameters and the slots.
    pub(super) before: Vec<f32>,
}

impl<D: Device> Auditor<'_, D> {
    /// Repeats the sums and the update of a block of `part`; returns the sums, the parameters and the
    /// slots.
    pub(super) fn repeat(&self, weights: &Weights<D>, part: &Part, block: &AuditedBlock) -> Result<Vec<f32>> {
        let AuditedBlock { segment, elements, micro_batches, terms, before } = block;
        let mut done = update::sums(self.job.division, micro_batches, terms, elements.len());
        let runs = part.update_runs(weights);
        let gradient = &done[done.len() - elements.len()..];
        let updated =
            weights.repeat_update(self.job.device, &runs, *segment, elements.clone(), before, gradient)?;
        done.extend(updated);
        Ok(done)
    }

    /// Asks a third rank to repeat the leaf, and returns the rank and the one of the two whose bits it
    /// has. Collective.
    pub(super) fn witness_of_leaf(
        &mut self,
        finding: Finding,
        found: &FoldRecord,
        open: &OpenAudit,
        load: &mut LoadRows<'_, D>,
    ) -> Result<Verdict> {
        let Finding { site, audited, auditor, .. } = finding;
        let (replica, others) = (self.roles.third(audited), self.roles.another());
        let third = replica.or_else(|| Some(others?.auditor_of(audited)));
        let Some((third, copy)) = third.and_then(|third| Some((third, self.copy.take()?))) else {
            return Ok(None);
        };
        let record = match replica {
            Some(_) => self.repeat_as_replica(third, audited, &copy, open, load)?,
            None => self.repeat_in_another_part(&copy, open, load)?,
        };
        self.copy = Some(copy);
        let mut folds = Vec::new();
        for fold in [found, &open.expected].map(|record| record.get(site).unwrap_or_default()) {
            fold.write(&mut folds);
        }
        self.job.grid.all.broadcast(&mut folds, auditor)?;
        let (first, second) = folds.split_at(BitFold::MESSAGE_LEN);
        let own = record.get(site).unwrap_or_default();
        let has = [own == BitFold::read(first), own == BitFold::read(second)];
        self.verdict(third, has, finding)
    }

    /// Repeats the leaf of the replica of `audited`, if this rank belongs to that of `third`, with the
    /// parameters from before the step. Collective over that replica.
    fn repeat_as_replica(
        &mut self,
        third: usize,
        audited: usize,
        copy: &FlatBuffer<D>,
        open: &OpenAudit,
        load: &mut LoadRows<'_, D>,
    ) -> Result<FoldRecord> {
        if self.replica_of(self.rank()) != self.replica_of(third) {
            return Ok(FoldRecord::default());
        }
        let sections = self.job.leaf(open.batch.len, self.replica_of(audited));
        let mut record = self.replay.run(PartParameters::Copy(copy), &sections, load, open.batch)?;
        record.extend(&open.parameters);
        Ok(record)
    }

    /// Repeats the leaf once more, where every rank plays a part besides its first, if there are such
    /// parts; `copy` are the parameters of the part that it has played. Collective.
    fn repeat_in_another_part(
        &mut self,
        copy: &FlatBuffer<D>,
        open: &OpenAudit,
        load: &mut LoadRows<'_, D>,
    ) -> Result<FoldRecord> {
        let (job, channels) = (&self.job, &self.channels);
        let Some((others, tensors)) = &channels.others else { return Ok(FoldRecord::default()) };
        let (others, role) = (*others, others.role_of(self.rank()));
        let allocate = || {
            let part = job.part(role)?;
            let replay = job.replay(others, &part, channels.stages.clone(), tensors)?;
            Ok((replay, part.parameters(job.device)?))
        };
        let (mut replay, mut parameters) = job.grid.all.agree(allocate())?;
        self.pass_parameters(others, copy, &mut parameters)?;
        let sections = job.leaf(open.batch.len, self.replica_of(role));
        replay.run(PartParameters::Copy(&parameters), &sections, load, open.batch)
    }

    /// Asks a third rank to repeat the update of a block of `step`, after which the audited rank and its
    /// auditor have the sums, the parameters and the slots in `outcomes`. Collective.
    pub(super) fn witness_of_update(
        &self,
        step: u64,
        finding: Finding,
        weights: &Weights<D>,
        block: &AuditedBlock,
        outcomes: [&[f32]; 2],
    ) -> Result<Verdict> {
        let Finding { site, audited, auditor, .. } = finding;
        let is_third = |rank: &usize| *rank != audited && *rank != auditor;
        let Some(third) = (0..self.job.grid.all.size()).find(is_third) else { return Ok(None) };
        let AuditedBlock { micro_batches, terms, before, .. } = block;
        let terms_len = |terms: &Vec<Vec<f32>>| terms.iter().map(Vec::len).sum::<usize>();
        let mut sizes =
            [terms.iter().map(terms_len).sum(), before.len(), outcomes[0].len(), micro_batches.len()]
                .map(|len: usize| len as i64);
        self.job.grid.all.broadcast(&mut sizes, auditor)?;
        let [terms_len, before_len, outcome_len, num_reductions] = sizes.map(|len| len as usize);
        let mut numbers: Vec<i64> = micro_batches.iter().map(|number| *number as i64).collect();
        numbers.resize(num_reductions, 0);
        self.job.grid.all.broadcast(&mut numbers, auditor)?;
        let mut has = [false; 2];
        if self.rank() == auditor {
            let terms = terms.iter().flatten().flatten().copied();
            let more = [&before[..], outcomes[0], outcomes[1]].into_iter().flatten().copied();
            let data: Vec<f32> = terms.chain(more).collect();
            self.channels.all.send(&data, third, WITNESS)?;
        } else if self.rank() == third {
            let mut data = vec![0.0; terms_len + before_len + 2 * outcome_len];
            self.channels.all.receive(&mut data, auditor, WITNESS)?;
            let (all_terms, rest) = data.split_at(terms_len);
            let (before, rest) = rest.split_at(before_len);
            let part = self.job.part(audited)?;
            let (segment, elements) = self.block(step, &part, self.replica_of(audited));
            let micro_batches: Vec<usize> = numbers.into_iter().map(|number| number as usize).collect();
            let of_replica = |terms: &[f32]| self.cut_terms(terms, &micro_batches, elements.len());
            let each = terms_len / self.job.division.num_replicas();
            let terms = all_terms.chunks_exact(each.max(1)).map(of_replica).collect();
            let block = AuditedBlock { segment, elements, micro_batches, terms, before: before.to_vec() };
            let own = self.repeat(weights, &part, &block)?;
            let sums_len = outcome_len - before_len;
            let is_sum = matches!(site, Site::GradientSum { .. });
            let compared = if is_sum { 0..sums_len } else { sums_len..outcome_len };
            has = [&rest[..outcome_len], &rest[outcome_len..]].map(|other| {
                let pairs = own[compared.clone()].iter().zip(&other[compared.clone()]);
                pairs.into_iter().all(|(one, two)| one.to_bits() == two.to_bits())
            });
        }
        self.verdict(third, has, finding)
    }

    /// Tells all ranks whose bits the `third` rank has: those of the audited rank, or of its auditor.
    fn verdict(&self, third: usize, has: [bool; 2], finding: Finding) -> Result<Verdict> {
        let mut word = [i64::from(has[0]) + 2 * i64::from(has[1])];
        self.job.grid.all.broadcast(&mut word, third)?;
        let confirmed = match word[0] {
            1 => Some(finding.audited),
            2 => Some(finding.auditor),
            _ => None,
        };
        Ok(Some((third, confirmed)))
    }
}
