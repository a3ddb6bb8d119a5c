//! The messages of an audit.

use std::ops::Range;

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
pub(super) const MICRO_BATCHES: i32 = 7;

/// The most elements of parameters in one message, 16 MiB.
const MESSAGE_LEN: usize = 1 << 22;

/// For every replica, by reduction, its arrays of a block.
pub(super) type ReplicaTerms = Vec<Vec<Vec<f32>>>;

impl<D: Device> Auditor<'_, D> {
    /// Sends `values` to the rank that plays this rank's part, and receives `len` from the rank whose
    /// part this one plays.
    pub(super) fn exchange<T: Element>(&self, values: Vec<T>, len: usize, tag: i32) -> Result<Vec<T>> {
        self.swap(values, self.roles.auditor_of(self.rank()), len, self.role(), tag)
    }

    /// Sends `values` to rank `to` and receives `len` from rank `from`.
    fn swap<T: Element>(
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
        let (to, from) = (self.roles.auditor_of(self.rank()), self.role());
        self.copy_parameters(weights.parameters(), to, from, &mut copy)?;
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
        self.copy_parameters(copy, to, self.roles.auditor_of(role), into)
    }

    /// Sends the parameters in `own` to rank `to`, and receives those in `into` from rank `from`, in messages
    /// of at most [`MESSAGE_LEN`] elements of a segment.
    fn copy_parameters(
        &self,
        own: &FlatBuffer<D>,
        to: usize,
        from: usize,
        into: &mut FlatBuffer<D>,
    ) -> Result<()> {
        let device = self.job.device;
        let (sent, received) = (messages(own), messages(into));
        for number in 0..sent.len().max(received.len()) {
            let receive = received.get(number).map(|(_, elements)| {
                let values = vec![0.0_f32; elements.len()];
                self.channels.all.start_receive(values, from, PARAMETERS)
            });
            let receive = receive.transpose()?;
            if let Some((segment, elements)) = sent.get(number) {
                let mut values = Vec::with_capacity(elements.len());
                device.read(device.view(own.segment(*segment), elements.clone()), &mut |from| {
                    values.extend_from_slice(from);
                    Ok(())
                })?;
                self.channels.all.start_send::<Vec<f32>>(values, to, PARAMETERS)?.wait();
            }
            if let Some((receive, (segment, elements))) = receive.zip(received.get(number)) {
                let values = receive.wait();
                device.write(device.view_mut(into.segment_mut(*segment), elements.clone()), &mut |into| {
                    into.copy_from_slice(&values);
                    Ok(())
                })?;
            }
        }
        Ok(())
    }

    /// Sends the terms of every watched block to the rank that plays its owner, and returns those of
    /// the block of the part that this rank plays, of `len` elements: of every replica, by reduction.
    pub(super) fn exchange_terms(&self, watch: BlockWatch, len: usize) -> Result<(Vec<usize>, ReplicaTerms)> {
        let (shape, rank, role) = (self.job.grid.shape, self.rank(), self.role());
        // a rank without tensors has no reductions, but may play the part of one that has
        let own: Vec<i64> = watch.terms.iter().map(|(micro_batch, _)| *micro_batch as i64).collect();
        let num_reductions = self.exchange(vec![own.len() as i64], 1, LENGTH)?[0] as usize;
        let micro_batches = self.exchange(own, num_reductions, MICRO_BATCHES)?;
        let micro_batches: Vec<usize> = micro_batches.into_iter().map(|number| number as usize).collect();
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

/// Returns the messages in which the values of `flat` are sent: segments, and elements of them.
fn messages<D: Device>(flat: &FlatBuffer<D>) -> Vec<(usize, Range<usize>)> {
    let of_segment = |segment: usize| {
        let len = flat.segment_len(segment);
        let elements = move |start: usize| (segment, start..len.min(start + MESSAGE_LEN));
        (0..len).step_by(MESSAGE_LEN).map(elements)
    };
    (0..flat.num_segments()).flat_map(of_segment).collect()
}
