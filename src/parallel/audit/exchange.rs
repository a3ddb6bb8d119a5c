//! The messages of an audit.

use super::auditor::Auditor;
use super::roles::Roles;
use crate::Result;
use crate::comm::Element;
use crate::device::Device;
use crate::nn::FlatBuffer;
use crate::parallel::data::Weights;
use crate::parallel::watch::BlockWatch;

/// Tags of messages.
pub(super) const PARAMETERS: i32 = 0;
pub(super) const BEFORE: i32 = 1;
pub(super) const LENGTH: i32 = 2;
pub(super) const RECORD: i32 = 3;
pub(super) const TERMS: i32 = 4;
pub(super) const AFTER: i32 = 5;
pub(super) const WITNESS: i32 = 6;

/// For every replica, by reduction, its arrays of a block.
pub(super) type ReplicaTerms = Vec<Vec<Vec<f32>>>;

impl<D: Device> Auditor<'_, D> {
    /// Sends `values` to the rank that plays this rank's part, and receives `len` from the rank whose
    /// part this one plays.
    pub(super) fn exchange<T: Element>(&self, values: Vec<T>, len: usize, tag: i32) -> Result<Vec<T>> {
        self.send_receive(values, self.roles.auditor_of(self.rank()), len, self.role(), tag)
    }

    /// Sends `values` to rank `to` and receives `len` from rank `from`.
    fn send_receive<T: Element>(
        &self,
        values: Vec<T>,
        to: usize,
        len: usize,
        from: usize,
        tag: i32,
    ) -> Result<Vec<T>> {
        let receive = self.channels.all.start_receive(vec![T::default(); len], from, tag)?;
        let send = self.channels.all.start_send(values, to, tag)?;
        let received = receive.wait();
        send.wait();
        Ok(received)
    }

    /// Gives every rank the parameters of the part that it plays.
    pub(super) fn exchange_parameters(&mut self, weights: &mut Weights<D>) -> Result<()> {
        let Some(mut copy) = self.copy.take() else { return Ok(()) };
        let values = all_values(self.job.device, weights.parameters())?;
        let received = self.exchange(values, num_values(&copy), PARAMETERS)?;
        set_values(self.job.device, &mut copy, &received)?;
        self.copy = Some(copy);
        Ok(())
    }

    /// Passes the `copy` of the parameters of the part that this rank plays on to the rank that plays it
    /// in `others`, and writes those of the part that this one plays there to `into`.
    pub(super) fn pass_parameters(
        &self,
        others: Roles,
        copy: &FlatBuffer<D>,
        into: &mut FlatBuffer<D>,
    ) -> Result<()> {
        let (to, role) = (others.auditor_of(self.role()), others.role_of(self.rank()));
        let from = self.roles.auditor_of(role);
        let values = all_values(self.job.device, copy)?;
        let received = self.send_receive(values, to, num_values(into), from, PARAMETERS)?;
        set_values(self.job.device, into, &received)
    }

    /// Sends the terms of every watched block to the rank that plays its owner, and returns those of
    /// the block of the part that this rank plays, of `len` elements: of every replica, by reduction.
    pub(super) fn exchange_terms(&self, watch: BlockWatch, len: usize) -> Result<(Vec<usize>, ReplicaTerms)> {
        let (shape, rank, role) = (self.job.grid.shape, self.rank(), self.role());
        let micro_batches: Vec<usize> = watch.terms.iter().map(|(micro_batch, _)| *micro_batch).collect();
        let terms_len = micro_batches.iter().map(|number| self.num_sums(*number) * len).sum();
        let at = |replica: usize, like: usize| {
            let (_, stage, tensor) = shape.coordinates(like);
            shape.rank(replica, stage, tensor)
        };
        let mut receives = Vec::new();
        for replica in 0..shape.data {
            let values = vec![0.0_f32; terms_len];
            receives.push(self.channels.all.start_receive(values, at(replica, role), TERMS)?);
        }
        let mut sends = Vec::new();
        for owner in 0..shape.data {
            let terms = watch.terms.iter().flat_map(|(_, blocks)| blocks[owner].iter().copied()).collect();
            let to = self.roles.auditor_of(at(owner, rank));
            sends.push(self.channels.all.start_send::<Vec<f32>>(terms, to, TERMS)?);
        }
        let received =
            receives.into_iter().map(|receive| self.cut_terms(&receive.wait(), &micro_batches, len));
        let received = received.collect();
        sends.into_iter().for_each(|send| drop(send.wait()));
        Ok((micro_batches, received))
    }

    /// Returns the number of arrays of a replica in the reduction after `micro_batch`.
    fn num_sums(&self, micro_batch: usize) -> usize {
        self.job.division.canonical_subtrees(micro_batch).map_or(1, |subtrees| subtrees.most())
    }

    /// Cuts the terms of a replica into those of each reduction, for a block of `len` elements.
    pub(super) fn cut_terms(&self, terms: &[f32], micro_batches: &[usize], len: usize) -> Vec<Vec<f32>> {
        let mut rest = terms;
        let part = |micro_batch: &usize| {
            let (own, others) = rest.split_at(self.num_sums(*micro_batch) * len);
            rest = others;
            own.to_vec()
        };
        micro_batches.iter().map(part).collect()
    }
}

/// Returns the number of values of all segments.
fn num_values<D: Device>(flat: &FlatBuffer<D>) -> usize {
    (0..flat.num_segments()).map(|segment| flat.segment_len(segment)).sum()
}

/// Returns the values of all segments.
fn all_values<D: Device>(device: &D, flat: &FlatBuffer<D>) -> Result<Vec<f32>> {
    let mut values = Vec::with_capacity(num_values(flat));
    for segment in 0..flat.num_segments() {
        device.read(device.view(flat.segment(segment), 0..flat.segment_len(segment)), &mut |from| {
            values.extend_from_slice(from);
            Ok(())
        })?;
    }
    Ok(values)
}

/// Overwrites all segments with `values`.
fn set_values<D: Device>(device: &D, flat: &mut FlatBuffer<D>, values: &[f32]) -> Result<()> {
    let mut rest = values;
    for segment in 0..flat.num_segments() {
        let (own, others) = rest.split_at(flat.segment_len(segment));
        device.write(device.view_mut(flat.segment_mut(segment), 0..own.len()), &mut |into| {
            into.copy_from_slice(own);
            Ok(())
        })?;
        rest = others;
    }
    Ok(())
}
