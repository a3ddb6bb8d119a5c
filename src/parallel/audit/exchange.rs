//! The messages of an audit.

use super::auditor::Auditor;
use crate::comm::Element;
use crate::device::Device;
use crate::nn::FlatBuffer;
use crate::parallel::data::Weights;
use crate::parallel::watch::BlockWatch;
use crate::{Error, Result};

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
        let (to, from) = (self.roles.auditor_of(self.rank()), self.role());
        let receive = self.channel.start_receive(vec![T::default(); len], from, tag)?;
        let send = self.channel.start_send(values, to, tag)?;
        let received = receive.wait();
        send.wait();
        Ok(received)
    }

    /// Gives every rank the parameters of the part that it plays.
    pub(super) fn exchange_parameters(&mut self, weights: &mut Weights<D>) -> Result<()> {
        let Some(mut copy) = self.copy.take() else { return Ok(()) };
        let (device, flat) = (self.device, weights.parameters());
        let whole = |flat: &FlatBuffer<D>, segment: usize| -> Result<Vec<f32>> {
            let mut values = Vec::new();
            device.read(device.view(flat.segment(segment), 0..flat.segment_len(segment)), &mut |from| {
                values.extend_from_slice(from);
                Ok(())
            })?;
            Ok(values)
        };
        let mut all = Vec::new();
        (0..flat.num_segments()).try_for_each(|segment| {
            all.extend(whole(flat, segment)?);
            Ok::<_, Error>(())
        })?;
        let len = (0..copy.num_segments()).map(|segment| copy.segment_len(segment)).sum();
        let received = self.exchange(all, len, PARAMETERS)?;
        let mut rest = &received[..];
        for segment in 0..copy.num_segments() {
            let (own, others) = rest.split_at(copy.segment_len(segment));
            device.write(device.view_mut(copy.segment_mut(segment), 0..own.len()), &mut |into| {
                into.copy_from_slice(own);
                Ok(())
            })?;
            rest = others;
        }
        self.copy = Some(copy);
        Ok(())
    }

    /// Sends the terms of every watched block to the rank that plays its owner, and returns those of
    /// the block of the part that this rank plays, of `len` elements: of every replica, by reduction.
    pub(super) fn exchange_terms(&self, watch: BlockWatch, len: usize) -> Result<(Vec<usize>, ReplicaTerms)> {
        let (shape, rank, role) = (self.grid.shape, self.rank(), self.role());
        let micro_batches: Vec<usize> = watch.terms.iter().map(|(micro_batch, _)| *micro_batch).collect();
        let terms_len = micro_batches.iter().map(|number| self.num_sums(*number) * len).sum();
        let at = |replica: usize, like: usize| {
            let (_, stage, tensor) = shape.coordinates(like);
            shape.rank(replica, stage, tensor)
        };
        let mut receives = Vec::new();
        for replica in 0..shape.data {
            let values = vec![0.0_f32; terms_len];
            receives.push(self.channel.start_receive(values, at(replica, role), TERMS)?);
        }
        let mut sends = Vec::new();
        for owner in 0..shape.data {
            let terms = watch.terms.iter().flat_map(|(_, blocks)| blocks[owner].iter().copied()).collect();
            let to = self.roles.auditor_of(at(owner, rank));
            sends.push(self.channel.start_send::<Vec<f32>>(terms, to, TERMS)?);
        }
        let received =
            receives.into_iter().map(|receive| self.cut_terms(&receive.wait(), &micro_batches, len));
        let received = received.collect();
        sends.into_iter().for_each(|send| drop(send.wait()));
        Ok((micro_batches, received))
    }

    /// Returns the number of arrays of a replica in the reduction after `micro_batch`.
    fn num_sums(&self, micro_batch: usize) -> usize {
        self.division.canonical_subtrees(micro_batch).map_or(1, |subtrees| subtrees.most())
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
