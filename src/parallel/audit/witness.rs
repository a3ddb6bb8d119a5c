//! The third rank, which says whose bits it has where two ranks differ.

use super::auditor::{Auditor, OpenAudit};
use super::exchange::{ReplicaTerms, WITNESS};
use super::finding::Finding;
use super::replay::{LoadRows, PartParameters};
use super::roles::Roles;
use super::update;
use crate::Result;
use crate::device::Device;
use crate::nn::FlatBuffer;
use crate::parallel::data::Weights;
use crate::parallel::watch::{BitFold, FoldRecord, Site};

/// A third rank, and the one of the two whose bits it has.
pub(super) type Verdict = Option<(usize, Option<usize>)>;

/// All that is known of the audited block of an update.
pub(super) struct AuditedBlock {
    pub(super) micro_batches: Vec<usize>,
    pub(super) terms: ReplicaTerms,
    /// The parameters and the slots before the update.
    pub(super) before: Vec<f32>,
    /// The sums, the parameters and the slots that the audited rank has.
    pub(super) done: Vec<f32>,
    /// Those that its auditor has.
    pub(super) repeated: Vec<f32>,
}

impl<D: Device> Auditor<'_, D> {
    /// Repeats the sums and the update of a block of `len` elements; returns the sums, the parameters and
    /// the slots.
    pub(super) fn repeat(
        &self,
        weights: &Weights<D>,
        micro_batches: &[usize],
        terms: &ReplicaTerms,
        before: &[f32],
        len: usize,
    ) -> Result<Vec<f32>> {
        let mut done = update::sums(self.job.division, micro_batches, terms, len);
        let updated = weights.repeat_update(self.job.device, before, &done[done.len() - len..])?;
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
        let Some(copy) = self.copy.take() else { return Ok(None) };
        let (third, record) = match (self.roles.third(audited), self.roles.another()) {
            (Some(third), _) => (third, self.repeat_as_replica(third, audited, &copy, open, load)?),
            (None, Some(others)) => {
                (others.auditor_of(audited), self.repeat_in_another_part(others, &copy, open, load)?)
            }
            (None, None) => return Ok(None),
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
        let (len, scale) = open.batch;
        let sections = self.job.leaf(len, self.replica_of(audited));
        let mut record = self.replay.run(PartParameters::Copy(copy), &sections, load, scale)?;
        record.extend(&open.parameters);
        Ok(record)
    }

    /// Repeats the leaf once more, where every rank plays its part of `others`; `copy` are the parameters
    /// of the part that it has played. Collective.
    fn repeat_in_another_part(
        &mut self,
        others: Roles,
        copy: &FlatBuffer<D>,
        open: &OpenAudit,
        load: &mut LoadRows<'_, D>,
    ) -> Result<FoldRecord> {
        let (job, channels) = (&self.job, &self.channels);
        let role = others.role_of(self.rank());
        let tensors = others.tensors(job.grid, &channels.tensors)?;
        let allocate = || {
            let part = job.part(role)?;
            let replay = job.replay(others, &part, channels.stages.clone(), &tensors)?;
            Ok((replay, part.parameters(job.device)?))
        };
        let (mut replay, mut parameters) = job.grid.all.agree(allocate())?;
        self.pass_parameters(others, copy, &mut parameters)?;
        let (len, scale) = open.batch;
        let sections = job.leaf(len, self.replica_of(role));
        replay.run(PartParameters::Copy(&parameters), &sections, load, scale)
    }

    /// Asks a third rank to repeat the update of a block. Collective.
    pub(super) fn witness_of_update(
        &self,
        finding: Finding,
        weights: &Weights<D>,
        block: &AuditedBlock,
    ) -> Result<Verdict> {
        let Finding { site, audited, auditor, .. } = finding;
        let is_third = |rank: &usize| *rank != audited && *rank != auditor;
        let Some(third) = (0..self.job.grid.all.size()).find(is_third) else { return Ok(None) };
        let AuditedBlock { micro_batches, terms, before, done, repeated } = block;
        let mut lengths =
            [terms[0].iter().map(Vec::len).sum(), before.len(), done.len()].map(|len: usize| len as i64);
        self.job.grid.all.broadcast(&mut lengths, auditor)?;
        let [terms_len, before_len, done_len] = lengths.map(|len| len as usize);
        let mut has = [false; 2];
        if self.rank() == auditor {
            let terms = terms.iter().flatten().flatten().copied();
            let data: Vec<f32> =
                terms.chain([before, done, repeated].into_iter().flatten().copied()).collect();
            self.channels.all.send(&data, third, WITNESS)?;
        } else if self.rank() == third {
            let num_replicas = self.job.division.num_replicas();
            let mut data = vec![0.0; num_replicas * terms_len + before_len + 2 * done_len];
            self.channels.all.receive(&mut data, auditor, WITNESS)?;
            let (all_terms, rest) = data.split_at(num_replicas * terms_len);
            let (before, rest) = rest.split_at(before_len);
            let len = (done_len - before_len) / (micro_batches.len() + 1);
            let of_replica = |terms: &[f32]| self.cut_terms(terms, micro_batches, len);
            let terms: ReplicaTerms = all_terms.chunks_exact(terms_len.max(1)).map(of_replica).collect();
            let own = self.repeat(weights, micro_batches, &terms, before, len)?;
            let sums_len = done_len - before_len;
            let is_sum = matches!(site, Site::GradientSum { .. });
            let site = if is_sum { 0..sums_len } else { sums_len..done_len };
            has = [&rest[..done_len], &rest[done_len..]].map(|other| {
                let pairs = own[site.clone()].iter().zip(&other[site.clone()]);
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
